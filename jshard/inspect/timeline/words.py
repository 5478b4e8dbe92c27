"""Times, steps and sums in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jshard.inspect.timeline.lanes import TimedEvent
from jshard.printing.units import three_digits


def span(nanoseconds: float) -> str:
    """`412 ns`, `1.23 µs`, `45.6 ms`: three digits."""
    return three_digits(nanoseconds, 1000, ("ns", "µs", "ms", "s"))


def share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "–"


def steps_in_words(numbers: Sequence[int]) -> str:
    """`steps 7 to 8`, `step 7`, or "" for none."""
    return f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else "".join(f"step {n}" for n in numbers)


def sums(bars: Iterable[TimedEvent]) -> list[tuple[TimedEvent, list[float]]]:
    """Group bars by operation, over all devices and steps: one bar of each, and the times of all, the longest sum first.

    Loops and calls are not among them, as what they run is.
    """
    found: dict[tuple[str, str], tuple[TimedEvent, list[float]]] = {}
    for bar in bars:
        if bar.kind != "around":
            found.setdefault((bar.program, bar.op), (bar, []))[1].append(bar.duration)
    return sorted(found.values(), key=lambda each: -sum(each[1]))


def by_signal(bars: Iterable[TimedEvent]) -> list[tuple[str, float, float]]:
    """Sum over devices and steps, by signal: the time of what it computes, and that of its collectives."""
    found: dict[str, list[float]] = {}
    for bar in bars:
        if bar.kind != "around":
            found.setdefault(bar.signal, [0.0, 0.0])[bar.kind == "collective"] += bar.duration
    return [(name, found[name][0], found[name][1]) for name in sorted(found, key=lambda name: -sum(found[name]))]
