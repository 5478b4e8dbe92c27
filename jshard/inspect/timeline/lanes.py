"""The arrangement of events: a lane for each device, rows for events that overlap, and sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jshard.inspect.timeline.event import Event

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Lane:
    """A device. Times are in nanoseconds; `both` is the time with a collective and a computation at once."""

    name: str
    rank: int
    rows: int
    compute: float
    collectives: float
    both: float
    idle: float


@dataclasses.dataclass(frozen=True)
class Window:
    """A step, from its first operation in any process to its last."""

    step: int
    start: float
    end: float


def rows(spans: Sequence[Span]) -> list[int]:
    """Return the row of each span, sorted by start: the first free row, so that nested spans are below."""
    ends: list[float] = []
    found = []
    for start, end in spans:
        row = next((row for row, free in enumerate(ends) if free <= start), len(ends))
        if row == len(ends):
            ends.append(end)
        ends[row] = end
        found.append(row)
    return found


def lane(name: str, rank: int, bars: Iterable[Event], length: float) -> Lane:
    """Return the sums of a device in a picture of this length. Loops and calls do not count, as their contents do."""
    bars = list(bars)
    compute = union((bar.start, bar.end) for bar in bars if bar.operation.kind == "compute")
    moving = union((bar.start, bar.end) for bar in bars if bar.operation.kind == "collective")
    busy = union((bar.start, bar.end) for bar in bars if bar.operation.kind != "around")
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
    """Return the length covered by spans; overlaps count once."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def sums(bars: Iterable[Event]) -> list[tuple[Event, list[float]]]:
    """Group bars by operation over all devices and steps: a bar of each, and all its times,
    the longest sum first. Loops and calls are left out, as their contents are counted."""
    found: dict[tuple[str, str], tuple[Event, list[float]]] = {}
    for bar in bars:
        if bar.operation.kind != "around":
            found.setdefault((bar.program, bar.op), (bar, []))[1].append(bar.duration)
    return sorted(found.values(), key=lambda each: -sum(each[1]))


def by_signal(bars: Iterable[Event]) -> list[tuple[str, float, float]]:
    """Return, for each signal, the time of its computations and of its collectives over all devices and steps."""
    found: dict[str, list[float]] = {}
    for bar in bars:
        if bar.operation.kind != "around":
            found.setdefault(bar.operation.signal, [0.0, 0.0])[bar.operation.kind == "collective"] += bar.duration
    return [(name, found[name][0], found[name][1]) for name in sorted(found, key=lambda name: -sum(found[name]))]
