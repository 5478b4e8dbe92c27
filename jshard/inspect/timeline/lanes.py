"""Arrange events for drawing: a lane for each device, in it a row for each event that runs beside or inside another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jshard.schedules import Table

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class TimedEvent:
    """One event: times in nanoseconds from the begin of the picture."""

    lane: int
    row: int
    op: str
    kind: str  # compute, collective, or around: a loop or a call, with others inside
    collective: str
    signal: str  # "decoder/attn"; "-" when it stands under none
    phase: str
    line: str  # configs/mlp.yaml:4, or ""
    program: str
    step: int | None
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclasses.dataclass(frozen=True)
class Lane:
    """A device. Times in nanoseconds; `both` is what a collective and a computation ran in at once."""

    name: str
    rank: int
    rows: int
    compute: float
    collectives: float
    both: float
    idle: float


@dataclasses.dataclass(frozen=True)
class Window:
    """One step, from its first operation in any process to its last."""

    step: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Drawing:
    """What a page of a capture shows. `notes` are sentences about how to read it."""

    title: str
    about: tuple[str, ...]
    lanes: tuple[Lane, ...]
    bars: tuple[TimedEvent, ...]
    steps: tuple[Window, ...]
    length: float
    notes: tuple[str, ...]
    table: Table | None = None  # that the stages of a pipeline run by

    def total(self, what: str) -> float:
        """Sum a field of the lanes, a time, over all of them."""
        return sum(getattr(lane, what) for lane in self.lanes)


def rows(spans: Sequence[Span]) -> list[int]:
    """Return the row of each span: the first free one, so that what runs inside another is below it.

    Spans are sorted by start.
    """
    ends: list[float] = []
    found = []
    for start, end in spans:
        row = next((row for row, free in enumerate(ends) if free <= start), len(ends))
        if row == len(ends):
            ends.append(end)
        ends[row] = end
        found.append(row)
    return found


def lane(name: str, rank: int, bars: Iterable[TimedEvent], length: float) -> Lane:
    """Sum what a device did in a picture of this length. Loops and calls are not counted, as what they run is."""
    bars = list(bars)
    compute = union((bar.start, bar.end) for bar in bars if bar.kind == "compute")
    moving = union((bar.start, bar.end) for bar in bars if bar.kind == "collective")
    busy = union((bar.start, bar.end) for bar in bars if bar.kind != "around")
    return Lane(
        name,
        rank,
        1 + max((bar.row for bar in bars), default=0),
        compute,
        moving,
        compute + moving - busy,
        length - busy,
    )


def union(spans: Iterable[Span]) -> float:
    """Return the length that spans cover, what several cover once."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
