"""Rename files: lines that map each tensor of a weight file to a parameter.

# regex: path | steps
embeddings\\.word\\.weight:       embed/embedding
layers\\.(\\d+)\\.q\\.weight:       layers/\\1/q/kernel | permute 1 0 | reshape 512 8 64
layers\\.(\\d+)\\.norm\\.weight:    norms/scale[\\1]                           # one row of a stack
layers\\.(\\d+)\\.qkv\\.weight:     layers/\\1/k/kernel | slice 0 512:640        # lines of one regex share the tensor
.*\\.position_ids:               -                                          # not wanted

The first line whose regex matches the whole name takes the tensor, together with all lines of the same regex.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jshard.errors import JShardError, Location, did_you_mean, quoted, refused
from jshard.layouts.index_ranges import Box
from jshard.training.checkpoints.tensors.view import Impossible, View

STEPS = {  # step -> form of its arguments, example
    "permute": (r"\d+( \d+)*", "permute 1 0"),
    "reshape": (r"(\d+ )*(-1|\d+)( \d+)*", "reshape 32 -1"),
    "slice": (r"\d+ \d*:\d*", "slice 0 0:512"),
    "split": (r"\d+ \d+", "split 0 128"),
}
SKIP = "-"
Region = tuple[int | slice, ...]  # of a parameter; further axes are whole


@dataclasses.dataclass(frozen=True)
class ParameterRegion:
    """A region of a parameter, filled by a tensor."""

    path: str
    region: Region = ()

    def within(self, shape: Sequence[int]) -> tuple[Box, list[bool]]:
        """Return the region's box in a parameter of this shape, and for each axis True if the tensor has it."""
        if len(self.region) > len(shape):
            raise Impossible(f"fills {self}, and {self.path} has {len(shape)} axes")
        region = [*self.region, *[slice(0, None)] * (len(shape) - len(self.region))]
        box = []
        for part, size in zip(region, shape, strict=True):
            begin = part if isinstance(part, int) else part.start
            end = part + 1 if isinstance(part, int) else size if part.stop is None else part.stop
            if not 0 <= begin < max(end, 1) or end > size:
                raise Impossible(f"fills {self}, and {self.path} is {list(shape)}")
            box.append((begin, end))
        return tuple(box), [not isinstance(part, int) for part in region]

    def __str__(self) -> str:
        words = [str(part) if isinstance(part, int) else _bounds(part) for part in self.region]
        return f"{self.path}[{', '.join(words)}]" if words else self.path


@dataclasses.dataclass(frozen=True)
class RenameLine:
    place: Location | None  # None: not from a file
    pattern: re.Pattern[str]
    target: str  # \1 stands for the text matched by group 1
    steps: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def skips(self) -> bool:
        return self.target == SKIP

    def target_of(self, name: str) -> ParameterRegion:
        found = self.pattern.fullmatch(name)
        assert found is not None
        return as_target(_GROUP.sub(lambda group: found[int(group[1])] or "", self.target))

    def view(self, shape: Sequence[int]) -> View:
        """Return the line's view of a tensor of this shape."""
        view = View.of(shape)
        for word, arguments in self.steps:
            view = getattr(view, word)(*arguments)
        return view


@dataclasses.dataclass
class Renaming:
    source: str
    lines: tuple[RenameLine, ...]

    @classmethod
    def read(cls, path: Path) -> Renaming:
        with refused(f"{path} can't be read", hint="name a file of lines `regex: path`"):
            text = path.read_text(encoding="utf-8", errors="replace")
        lines, faults = [], []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                try:
                    lines.append(_line(Location(str(path), number), re.split(r"\s#", line, maxsplit=1)[0].strip()))
                except JShardError as error:
                    faults.append(error)
        if faults:
            raise JShardError.of(faults)
        return cls(str(path), tuple(lines))

    def lines_of(self, name: str) -> Sequence[RenameLine]:
        """Return the lines for the tensor of this name: the first match, and all lines of the same regex."""
        first = next((line for line in self.lines if line.pattern.fullmatch(name)), None)
        return [line for line in self.lines if first is not None and line.pattern.pattern == first.pattern.pattern]

    def shadowed(self, names: Iterable[str]) -> Iterator[tuple[RenameLine, str, RenameLine]]:
        """Yield each line whose matches are all taken by earlier lines, with such a name and the line taking it."""
        takers = {name: self.lines_of(name) for name in names}
        for line in self.lines:
            matched = [name for name in takers if line.pattern.fullmatch(name)]
            if matched and not any(line in takers[name] for name in matched):
                yield line, matched[0], takers[matched[0]][0]


class Same(Renaming):
    """The identity: a tensor's name is the path of its parameter, joined by slashes or dots."""

    def __init__(self, paths: Iterable[str]):
        super().__init__("", ())
        self.by_name = {path.replace("/", "."): path for path in paths} | {path: path for path in paths}

    def lines_of(self, name: str) -> Sequence[RenameLine]:
        return [RenameLine(None, re.compile(re.escape(name)), self.by_name[name], ())] if name in self.by_name else []


_GROUP = re.compile(r"\\(\d)")
_TARGET = re.compile(r"([^\[\]]+)(?:\[([^\[\]]*)\])?")


def as_target(text: str) -> ParameterRegion:
    found = _TARGET.fullmatch(text)
    if found is None:
        raise ValueError(f"names {quoted(text)}, which is no path")
    try:
        return ParameterRegion(found[1], tuple(map(_bound, found[2].split(","))) if found[2] is not None else ())
    except ValueError:
        raise ValueError(f"names {quoted(text)}, whose region is none") from None


def _bound(word: str) -> int | slice:
    if ":" not in word:
        return int(word)
    begin, end = (int(bound) if bound.strip() else None for bound in word.split(":"))
    return slice(begin or 0, end)


def _bounds(part: slice) -> str:
    return f"{part.start or ''}:{'' if part.stop is None else part.stop}"


def _line(place: Location, text: str) -> RenameLine:
    found = re.fullmatch(r"(.*?):\s+(.*)", text)
    if found is None:
        raise JShardError(f"{place} has {quoted(text)}, which is no line of a rename file", hint="write regex: path")
    regex, (target, *steps) = found[1], (word.strip() for word in found[2].split("|"))
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise JShardError(
            f"{place} begins with {quoted(regex)}, which is no regular expression: {error}",
            hint=r"write letters as they are and \. for a dot",
        ) from None
    groups = [int(number) for number in _GROUP.findall(target)]
    if groups and max(groups) > pattern.groups:
        raise JShardError(
            f"{place} names \\{max(groups)}, and {quoted(regex)} has {pattern.groups} groups",
            hint="write (...) for each",
        )
    try:
        as_target(_GROUP.sub("0", target))
    except ValueError as error:
        raise JShardError(
            f"{place} {error}", hint="write layers/0/kernel, or stack/kernel[0] or qkv[:, 0:512]"
        ) from None
    return RenameLine(place, pattern, target, tuple(_step(place, step) for step in steps))


def _step(place: Location, text: str) -> tuple[str, tuple[Any, ...]]:
    word, *arguments = text.split() or [""]
    form, example = STEPS.get(word, (None, ""))
    if form is None or not re.fullmatch(form, " ".join(arguments), re.ASCII):
        hint = f"write {example}" if example else did_you_mean(word, STEPS, "use permute, reshape, slice or split")
        raise JShardError(f"{place} has the step {quoted(text)}, which is none", hint=hint)
    if word == "slice":
        begin, _, end = arguments[1].partition(":")
        return word, (int(arguments[0]), int(begin or 0), int(end) if end else None)
    return word, (tuple(map(int, arguments)),)
