"""Read what JAX's profiler writes, an `xplane.pb`: planes of lines of events, each a name, two times and its stats.

The numbers of the fields are those of XLA's profiler/protobuf/xplane.proto. JAX reads the file too, but does not hand on
the compiled programs in it, which tell what an operation is and whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jshard.programs.protobuf import Message

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


class Plane:
    """A device, the host, or what is said of the whole capture. `kinds` are the name and the stats of all events of a kind."""

    def __init__(self, plane: Message):
        self.name = plane.text(2)
        self._lines = plane.contents(3)
        words = [entry.message(2) for entry in plane.messages(5)]
        self._words = {word.number(1): word.text(2) for word in words}
        kinds = [entry.message(2) for entry in plane.messages(4)]
        self.kinds = {kind.number(1): (kind.text(4) or kind.text(2), self._stats(kind, 5)) for kind in kinds}
        self.stats = self._stats(plane, 6)

    def lines(self) -> Iterator[tuple[str, list[Mark]]]:
        """Read the name of each line, a thread or a stream, and its events."""
        for line in map(Message, self._lines):
            begin, events = line.number(3) * PICO, map(Message, line.contents(4))
            yield line.text(11) or line.text(2), [self._mark(event, begin) for event in events]

    def _mark(self, event: Message, begin: int) -> Mark:
        name, common = self.kinds.get(event.number(1), ("", {}))
        stats = {**common, **self._stats(event, 4)}
        return Mark(name, begin + event.number(2), event.number(3), stats)

    def _stats(self, message: Message, field: int) -> Stats:
        return dict(self._stat(stat) for stat in message.messages(field))

    def _stat(self, stat: Message) -> tuple[str, int | str | memoryview]:
        value: int | str | memoryview = ""
        for field, values in stat.items():
            if field == 5:
                value = stat.text(5)
            elif field == 7:  # a text that many events share
                value = self._words.get(stat.number(7), "")
            elif field != 1:
                value = values[-1]
        return self._words.get(stat.number(1), ""), value


def planes(file: Path) -> list[Plane]:
    return [Plane(plane) for plane in Message(file.read_bytes()).messages(1)]
