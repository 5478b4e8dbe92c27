"""How a timeline says times and sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jshard.inspect.timeline.lanes import Bar


def span(nanoseconds: float) -> str:
    """`412 ns`, `1.23 µs`, `45.6 ms`: three digits."""
    value, unit = nanoseconds, "ns"
    for unit in ("ns", "µs", "ms", "s"):
        if value < 999.5 or unit == "s":
            break
        value /= 1000
    if unit == "ns":
        return f"{value:.0f} ns"
    return f"{value:.2f} {unit}" if value < 9.995 else f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


@dataclasses.dataclass
class Sum:
    """All runs of one operation, on all devices and in all steps."""

    op: str
    kind: str
    collective: str
    signal: str
    phase: str
    line: str
    program: str
    runs: int = 0
    total: float = 0.0
    longest: float = 0.0


def sums(bars: Iterable[Bar]) -> list[Sum]:
    """By operation, the longest first; loops and calls are not among them, as what they run is."""
    found: dict[tuple[str, str], Sum] = {}
    for bar in bars:
        if bar.kind == "around":
            continue
        made = found.setdefault(
            (bar.program, bar.op), Sum(bar.op, bar.kind, bar.collective, bar.signal, bar.phase, bar.line, bar.program)
        )
        made.runs += 1
        made.total += bar.duration
        made.longest = max(made.longest, bar.duration)
    return sorted(found.values(), key=lambda each: -each.total)


def by_signal(bars: Iterable[Bar]) -> list[tuple[str, float, float]]:
    """A signal, the time of what it computes, and that of its collectives: sums over devices and steps."""
    found: dict[str, tuple[float, float]] = {}
    for bar in bars:
        compute, moving = found.get(bar.signal, (0.0, 0.0))
        if bar.kind == "compute":
            found[bar.signal] = (compute + bar.duration, moving)
        elif bar.kind == "collective":
            found[bar.signal] = (compute, moving + bar.duration)
    return [(name, *found[name]) for name in sorted(found, key=lambda name: -sum(found[name]))]
