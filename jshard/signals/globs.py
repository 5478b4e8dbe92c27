"""Paths of parameters, and globs over paths: `layers/*/attn/{q,k,v}_proj/**`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from jshard.errors import Location, quoted
from jshard.signals.faults import Path
from jshard.signals.nodes import Node
from jshard.signals.value_types import Names, Reading

# The number of a block with something below it: `blocks/0/`, `Dense_0/`, `['layers_0'][`, and not `fc1/`.
BLOCK = re.compile(r"(?<![^/.\['])((?:[A-Za-z]\w*_)?)([0-9]+)(?=['\]]*[/.\[])")
Row = TypeVar("Row", bound=Hashable)


class ParameterPath(str):
    """The path of a parameter of a function.

    `inner` is the path below its argument; `led` begins with the argument's name, for a function
    with several arguments of parameters. Globs match `inner`. Globs that begin with the argument's
    name match `led` too: if a part of the model has this name, both matches count.
    """

    argument: str
    inner: str  # "" for an argument that is an array
    led: str

    @classmethod
    def of(cls, argument: str, inner: str, *, led: bool = False) -> ParameterPath:
        whole = "/".join(filter(None, (argument, inner)))
        path = cls(whole if led or not inner else inner)
        path.argument, path.inner, path.led = argument, inner, whole
        return path


def repeats(entries: Iterable[tuple[Row, str]]) -> Iterator[tuple[Row, str, int]]:
    """Join equal rows of repeated blocks: yield each row, its path and the number of arrays: `blocks/*/up/kernel`, 12.

    Blocks repeat if their names differ in a number alone and the same parameters are below each.
    """
    entries = list(entries)
    inside = collections.defaultdict[str, set[str]](set)
    for _, path in entries:
        for block in BLOCK.finditer(path):
            inside[path[: block.end()]].add(path[block.end() :])
    kinds = {head: (head.rstrip("0123456789"), frozenset(paths)) for head, paths in inside.items()}
    times = collections.Counter(kinds.values())

    def stem(block: re.Match[str]) -> str:
        return block[1] + "*" if times[kinds[block.string[: block.end()]]] > 1 else block[0]

    alike = collections.defaultdict[tuple[Row, str], list[str]](list)
    for row, path in entries:
        alike[row, BLOCK.sub(stem, path)].append(path)
    for (row, _), paths in alike.items():
        parts = zip(*map(BLOCK.split, paths), strict=True)
        yield row, "".join(part if {*others} <= {part} else "*" for part, *others in parts), len(paths)


def below(path: str) -> str:
    """Return the path below its argument."""
    return path.inner if isinstance(path, ParameterPath) else path


OTHERS = "**"  # alone: all parameters without another claim
MOST_SPELLINGS = 1_000
LONGEST = 200  # characters of a path or glob shown in an error


@dataclasses.dataclass(frozen=True)
class Globs(Names):
    """A glob or a list of globs, read as a tuple. The place of each is noted, as `match.layers/**`."""

    wants: str = "a glob or a list of globs"
    example: str = '["layers/*/mlp/**"]'
    noun: str = "glob "

    def read(self, node: Node, path: Path, reading: Reading) -> tuple[str, ...]:
        found = super().read(node, path, reading)
        if found and not patterns(found):
            hint = f'write {path[-1]}: ["**", {quoted(found[0], LONGEST)}]'
            reading.faults.add(path, node.place, f"has {path[-1]} of exceptions alone", hint)
        return found

    def is_there(self, name: str, place: Location, path: Path, reading: Reading) -> bool:
        reading.places[".".join((*path, name))] = place
        says, hint = _fault(name.removeprefix("!"))
        if says:
            reading.faults.add(path, place, f"has {path[-1]} {quoted(name, LONGEST)}, {says}", hint)
        return not says


class Glob:
    """A glob over paths. `*` matches any text within a part, `?` a single character, `**` any
    number of parts including none, and `{a,b}` either alternative. Other characters, as dots and
    brackets, match themselves. A path matched by one of the `exceptions` does not fit."""

    def __init__(self, text: str, exceptions: Sequence[Glob] = ()):
        self.text, self.exceptions = text, exceptions
        self.heads = {one.partition("/")[0] for one in spellings(text)}  # possible names of arguments
        # Each part of a path ends in a slash here, so that "**" is any number of parts wherever it stands.
        self._fits = re.compile("|".join(map(_regex, spellings(text)))).fullmatch
        letters = [part.strip("/") for piece, *_ in _choices(text)[::2] for part in re.split("[*?]", piece)]
        self._holds = max(letters, key=len)  # text in every matching path, for a fast first check

    def fits(self, path: str) -> bool:
        ways = [below(path), *([path.led] if isinstance(path, ParameterPath) and path.argument in self.heads else [])]
        fits = any(self._holds in one and self._fits(f"{one}/") is not None for one in ways)
        return fits and not any(each.fits(path) for each in self.exceptions)


def patterns(match: Iterable[str]) -> list[Glob]:
    """Return the globs of a list, with its "!value/output/**" entries as their exceptions."""
    match = list(match)
    exceptions = [Glob(text[1:]) for text in match if text.startswith("!")]
    return [Glob(text, exceptions) for text in match if not text.startswith("!")]


def spellings(glob: str) -> Iterator[str]:
    """Yield a glob for each combination of alternatives: `{q,k}_proj` gives `q_proj` and `k_proj`."""
    return map("".join, itertools.product(*_choices(glob)))


def respelt(glob: str) -> Iterator[str]:
    """Yield corrections of a glob: of a dotted path, a regular expression, a module or a path's end."""
    for one in (glob, glob.removeprefix("params/"), glob.replace(".", "/"), glob.replace(".*", "**")):
        for each in (one, f"{one}/**", f"**/{one}", f"**/{one}/**"):
            if not _fault(each)[0]:
                yield each


def narrowed(glob: str) -> Iterator[tuple[str, str]]:
    """Yield each alternative, and the glob with this alternative in place of its braces."""
    choices = _choices(glob)
    for number in range(1, len(choices), 2):
        for one in choices[number]:
            pieces = ["{" + ",".join(each) + "}" if at % 2 else each[0] for at, each in enumerate(choices)]
            yield one, "".join([*pieces[:number], one, *pieces[number + 1 :]])


def _choices(glob: str) -> list[list[str]]:
    """Split a glob into pieces, each a list of alternatives."""
    pieces = re.split(r"\{([^{}]*)\}", glob)
    return [piece.split(",") if number % 2 else [piece] for number, piece in enumerate(pieces)]


def _regex(spelling: str) -> str:
    """Return the regular expression of a glob without alternatives, for paths with a slash at the end. It
    never backtracks over a "*" or "**" after a match of the next piece, so that no glob takes long."""
    runs: list[list[str]] = [[]]
    for part in spelling.split("/"):
        if part == "**":
            runs.append([])
        else:
            runs[-1].append(_with_gaps([_literal(text) for text in part.split("*")], "[^/]") + "/")
    return _with_gaps(["".join(run) for run in runs], "(?:[^/]*/)")


def _with_gaps(pieces: Sequence[str], gap: str) -> str:
    """Join pieces by any number of `gap`; each piece but the last matches at its first occurrence."""
    first, *rest = pieces
    return (
        first + "".join(f"(?>{gap}*?{piece})" for piece in rest[:-1]) + "".join(f"{gap}*{piece}" for piece in rest[-1:])
    )


def _literal(text: str) -> str:
    return "[^/]".join(map(re.escape, text.split("?")))


def _fault(glob: str) -> tuple[str, str]:
    """Return the fault of a glob and a hint; both are empty for a valid glob."""
    choices = _choices(glob)
    plain = "".join(text for text, *_ in choices)  # alternatives hold no brace
    if "{" in plain or "}" in plain:
        if glob.count("{") == glob.count("}"):
            return "whose braces are nested or in the wrong order", 'write "{a,b,c}"'
        if "{" in plain:
            return 'whose "{" is not closed', 'write "}" after the last alternative'
        return 'whose "}" has no "{" before it', 'write "{" before the first alternative'
    count = math.prod(map(len, choices))
    if count > MOST_SPELLINGS:
        return f"which has {count:,} spellings, more than {MOST_SPELLINGS:,}", 'write "*" for some of the alternatives'
    parts = [part for spelling in spellings(glob) for part in spelling.split("/")]
    if not all(parts):
        return "which has an empty part", f"write {quoted('/'.join(filter(None, glob.split('/'))) or '**', LONGEST)}"
    if any("**" in part and part != "**" for part in parts):
        return (
            'which has "**" and other letters in one part',
            'write "*" within a part, and "**" for any number of parts',
        )
    return "", ""
