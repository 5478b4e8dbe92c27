"""What each device holds at rest, as bars; by signal, as a table."""

from __future__ import annotations

import itertools

from jshard.inspect.report.array_placement import AT_REST
from jshard.inspect.report.facts import Facts
from jshard.inspect.report.markup import Markup, element
from jshard.inspect.report.words import linked, measured, size

MOST_BARS = 16
PLURAL = {"parameter": "parameters", "gradient": "gradients"}


def memory_bars(facts: Facts) -> Markup:
    memory = facts.memory
    most = max((sum(device.values()) for device in memory), default=0)
    if not most:
        return element("p", "The program holds nothing from one step to the next.", class_="quiet")
    kinds = [kind for kind in AT_REST if any(device[kind] for device in memory)]
    groups = [(n, n) for n in range(len(memory))] if len(memory) <= MOST_BARS else list(_alike(memory))
    said = ""
    if len(groups) > MOST_BARS:
        groups, said = groups[:MOST_BARS], f"{len(groups) - MOST_BARS:,} more runs of devices are left out."
    bars = [_bar(first, last, memory[first], most, kinds) for first, last in groups]
    legend = [
        element(
            "li",
            element("span", class_=f"swatch m{AT_REST.index(kind)}"),
            PLURAL.get(kind, kind),
            element("b", measured(max(device[kind] for device in memory))),
        )
        for kind in kinds
    ]
    return element(
        "div",
        element("ul", legend, class_="legend"),
        element("ol", bars, class_="devices"),
        element("p", said, class_="quiet") if said else None,
        _by_signal(facts, kinds),
        class_="memory",
    )


def _alike(memory: list[dict[str, int]]) -> list[tuple[int, int]]:
    """Runs of neighbours that hold as much."""
    runs, start = [], 0
    for _, run in itertools.groupby(memory):
        length = len(list(run))
        runs.append((start, start + length - 1))
        start += length
    return runs


def _bar(first: int, last: int, device: dict[str, int], most: int, kinds: list[str]) -> Markup:
    name = f"device {first}" if first == last else f"devices {first:,}–{last:,}, each"
    x, parts = 0.0, []
    for kind in kinds:
        width = 1000 * device[kind] / most
        if width:
            parts.append(
                element(
                    "rect",
                    element("title", f"{PLURAL.get(kind, kind)}: {size(device[kind])}"),
                    x=x,
                    width=max(0.5, width - 1.5),
                    height=16,
                    class_=f"m{AT_REST.index(kind)}",
                )
            )
        x += width
    svg = element("svg", parts, viewBox="0 0 1000 16", preserveAspectRatio="none", class_="split", aria_hidden="true")
    return element("li", element("span", name, class_="who"), svg, element("b", measured(sum(device.values()))))


def _by_signal(facts: Facts, kinds: list[str]) -> Markup:
    sources = tuple(text.source for text in facts.texts)
    places = {array.signal: array.place for array in facts.of(*AT_REST)}
    head = [element("th", "Signal", scope="col"), element("th", "Line", scope="col")]
    head += [element("th", PLURAL.get(kind, kind).capitalize(), scope="col", class_="n") for kind in kinds]
    rows = []
    for signal, sums in sorted(facts.memory_by_signal().items(), key=lambda each: -sum(each[1].values())):
        cells = [element("td", measured(sums[kind]) if sums[kind] else "–", class_="n") for kind in kinds]
        cells.append(element("td", element("b", measured(sum(sums.values()))), class_="n"))
        name = element("span", signal, class_="name") if signal != "-" else element("span", "no signal", class_="quiet")
        rows.append(
            element("tr", element("th", name, scope="row"), element("td", linked(places[signal], sources)), cells)
        )
    head.append(element("th", "Together", scope="col", class_="n"))
    table = element("table", element("thead", element("tr", head)), element("tbody", rows), class_="plain-table")
    return element("div", table, class_="scroller", tabindex=0, role="region", aria_label="memory at rest by signal")
