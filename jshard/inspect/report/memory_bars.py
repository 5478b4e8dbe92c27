"""What each device holds at rest, as bars; by signal, as a table."""

from __future__ import annotations

import itertools

from jshard.inspect.report.facts import AT_REST, Facts
from jshard.printing.markup import Markup, element
from jshard.printing.pages.shell import legend, stack, table
from jshard.printing.pages.words import linked, measured, signal_name, size

MOST_BARS = 16
PLURAL = {"parameter": "parameters", "gradient": "gradients"}


def memory_bars(facts: Facts) -> Markup:
    memory = facts.memory
    most = max((sum(device.values()) for device in memory), default=0)
    if not most:
        return element("p", "The program holds nothing from one step to the next.", class_="quiet")
    kinds = [kind for kind in AT_REST if any(device[kind] for device in memory)]
    groups = [(n, n) for n in range(len(memory))] if len(memory) <= MOST_BARS else list(_alike(memory))
    left_out = ""
    if len(groups) > MOST_BARS:
        groups, left_out = groups[:MOST_BARS], f"{len(groups) - MOST_BARS:,} more runs of devices are left out."
    bars = [_bar(first, last, memory[first], most, kinds) for first, last in groups]
    heaviest = {kind: measured(max(device[kind] for device in memory)) for kind in kinds}
    return element(
        "div",
        legend((_colour(kind), PLURAL.get(kind, kind), heaviest[kind]) for kind in kinds),
        element("ol", bars, class_="devices"),
        element("p", left_out, class_="quiet") if left_out else None,
        _by_signal(facts, kinds),
        class_="memory",
    )


def _alike(memory: list[dict[str, int]]) -> list[tuple[int, int]]:
    """Runs of neighbours that hold as much."""
    runs = [[number for number, _ in run] for _, run in itertools.groupby(enumerate(memory), lambda each: each[1])]
    return [(run[0], run[-1]) for run in runs]


def _bar(first: int, last: int, device: dict[str, int], most: int, kinds: list[str]) -> Markup:
    name = f"device {first}" if first == last else f"devices {first:,}–{last:,}, each"
    parts = [(_colour(kind), device[kind], f"{PLURAL.get(kind, kind)}: {size(device[kind])}") for kind in kinds]
    total = element("b", measured(sum(device.values())))
    return element("li", element("span", name, class_="who"), stack(parts, most), total)


def _colour(kind: str) -> str:
    return f"m{AT_REST.index(kind)}"


def _by_signal(facts: Facts, kinds: list[str]) -> Markup:
    places = {array.signal: array.place for array in facts.of(*AT_REST)}
    head = ["Signal", "Line", *(PLURAL.get(kind, kind).capitalize() for kind in kinds), "Together"]
    rows = [
        [
            signal_name(signal),
            linked(places[signal], facts.sources),
            *(measured(sums[kind]) if sums[kind] else "–" for kind in kinds),
            element("b", measured(sum(sums.values()))),
        ]
        for signal, sums in sorted(facts.memory_by_signal().items(), key=lambda each: -sum(each[1].values()))
    ]
    return table("memory at rest by signal", head, rows, numbers=range(2, len(head)))
