"""The path of a parameter, by which signals claim it."""

from __future__ import annotations

import collections
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

# The number of a block with something below it: `blocks/0/`, `Dense_0/`, `['layers_0'][`, and not `fc1/`.
BLOCK = re.compile(r"(?<![^/.\['])((?:[A-Za-z]\w*_)?)([0-9]+)(?=['\]]*[/.\[])")
Row = TypeVar("Row", bound=Hashable)


class ParameterPath(str):
    """The path of a parameter of a function: below its argument (`inner`), or from the argument's name (`led`) where several
    arguments hold parameters. Globs fit `inner`, and those that begin with the argument's name also `led`: where a model has a
    part of that name too, both count."""

    argument: str
    inner: str  # "" of an array that is the argument itself
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
    """The path below its argument."""
    return path.inner if isinstance(path, ParameterPath) else path
