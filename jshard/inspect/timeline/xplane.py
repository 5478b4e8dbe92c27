"""What JAX's profiler writes, an `xplane.pb`: planes of lines of events, each a name, two times and what is said of it.

The numbers of the fields are those of XLA's profiler/protobuf/xplane.proto. JAX reads the file too, but does not hand on
the compiled programs in it, which tell what an operation is and whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jshard.inspect.timeline.wire import fields, inside, text, whole

Stats = dict[str, int | str | memoryview]
PICO = 1000  # picoseconds of a nanosecond


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """One event: times in picoseconds of the capture's own clock."""

    name: str
    start: int
    duration: int
    stats: Stats

    @property
    def end(self) -> int:
        return self.start + self.duration


@dataclasses.dataclass(frozen=True)
class Kind:
    """What all events of one kind have in common."""

    identity: int
    name: str
    shown: str
    stats: Stats


class Plane:
    """A device, the host, or what is said of the whole capture."""

    def __init__(self, message: memoryview):
        self.name = ""
        self._lines: list[memoryview] = []
        self._words: dict[int, str] = {}
        kinds: list[memoryview] = []
        said: list[memoryview] = []
        for number, value in fields(message):
            if number == 2:
                self.name = text(value)
            elif number == 3:
                self._lines.append(inside(value))
            elif number == 4:
                kinds.append(_entry(inside(value)))
            elif number == 5:
                word = dict(fields(_entry(inside(value))))
                self._words[whole(word.get(1, 0))] = text(word.get(2, memoryview(b"")))
            elif number == 6:
                said.append(inside(value))
        self.kinds = {kind.identity: kind for kind in map(self._kind, kinds)}
        self.stats: Stats = dict(map(self._stat, said))

    def lines(self) -> Iterator[tuple[str, list[Mark]]]:
        """The name of each line, a thread or a stream, and its events."""
        for message in self._lines:
            name, begin, events = "", 0, []
            for number, value in fields(message):
                if number == 4:
                    events.append(inside(value))
                elif number == 3:
                    begin = whole(value)
                elif number in (2, 11):
                    name = text(value)
            yield name, [self._mark(event, begin * PICO) for event in events]

    def _mark(self, message: memoryview, begin: int) -> Mark:
        identity = offset = duration = 0
        own: Stats = {}
        for number, value in fields(message):
            if number == 1:
                identity = whole(value)
            elif number == 2:
                offset = whole(value)
            elif number == 3:
                duration = whole(value)
            elif number == 4:
                name, told = self._stat(inside(value))
                own[name] = told
        kind = self.kinds.get(identity)
        if kind is None:
            return Mark("", begin + offset, duration, own)
        return Mark(kind.shown or kind.name, begin + offset, duration, {**kind.stats, **own} if kind.stats else own)

    def _kind(self, message: memoryview) -> Kind:
        identity, name, shown = 0, "", ""
        stats: Stats = {}
        for number, value in fields(message):
            if number == 1:
                identity = whole(value)
            elif number == 2:
                name = text(value)
            elif number == 4:
                shown = text(value)
            elif number == 5:
                word, told = self._stat(inside(value))
                stats[word] = told
        return Kind(identity, name, shown, stats)

    def _stat(self, message: memoryview) -> tuple[str, int | str | memoryview]:
        name, told = "", ""
        for number, value in fields(message):
            if number == 1:
                name = self._words.get(whole(value), "")
            elif number == 5:
                told = text(value)
            elif number == 7:  # a text that many events share
                told = self._words.get(whole(value), "")
            else:
                told = value
        return name, told


def _entry(message: memoryview) -> memoryview:
    """The value of one pair of a mapping."""
    return inside(dict(fields(message)).get(2, memoryview(b"")))


def planes(file: Path) -> list[Plane]:
    return [Plane(inside(value)) for number, value in fields(memoryview(file.read_bytes())) if number == 1]
