"""The ledger as a table: the script sorts it, folds it by signal, mesh axis or phase; without a script it is in program
order."""

from __future__ import annotations

import dataclasses

from jshard.inspect.ledger.entries import Line
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.report.facts import Facts
from jshard.inspect.report.shell import stack
from jshard.inspect.report.words import NO_SIGNAL, Colours, linked, measured, signal_name, size, times
from jshard.markup import Markup, element
from jshard.provenance import PHASES

COLUMNS = (  # key, title, whether it sorts as a number
    ("place", "Line", False),
    ("signal", "Signal", False),
    ("phase", "Phase", False),
    ("collective", "Collective", False),
    ("axis", "Over", False),
    ("count", "Times", True),
    ("payload", "Payload", True),
    ("total", "On the wire", True),
)
GROUPS = (("signal", "signal"), ("axis", "mesh axis"), ("phase", "phase"), ("", "nothing"))


def ledger_table(facts: Facts, colours: Colours) -> Markup:
    ledger = facts.ledger
    if not ledger.lines:
        nothing = element("data", "0 B", value=0, data_total="wire", class_="total")
        quiet = element("p", "The program asks for no collective.", nothing, class_="quiet")
        return element("div", quiet, _notes(facts), class_="ledger")
    lines = merged(ledger)
    most = max(line.total for line in lines) or 1
    head = [
        element(
            "th",
            element("button", title, element("span", class_="sorted", aria_hidden="true"), type="button"),
            scope="col",
            role="columnheader",
            data_key=key,
            class_=f"c-{key}",
            data_numeric=numeric,
            aria_sort="none",
        )
        for key, title, numeric in COLUMNS
    ]
    rows = [_row(line, number, most, colours, facts.sources) for number, line in enumerate(lines)]
    exact = element("span", f"{ledger.total:,} B", class_="exact")
    foot = element(
        "tr",
        element("th", "Total", scope="row", colspan=5, class_="c-sum"),
        element("td", element("data", f"{ledger.count:,}", value=ledger.count, data_total="count"), class_="c-count"),
        element("td", class_="c-payload"),
        element("td", element("span", exact, measured(ledger.total, name="wire"), class_="amount"), class_="c-total"),
        class_="totals",
    )
    choose = element(
        "div",
        element("span", "Fold by", id="fold-by", class_="quiet"),
        [element("button", word, type="button", data_group=key, aria_pressed="false") for key, word in GROUPS],
        class_="segments",
        role="group",
        aria_labelledby="fold-by",
    )
    every = element("button", "Fold all", type="button", id="fold-all", class_="plain")
    table = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", rows),
        element("tfoot", foot),
        id="ledger",
        data_columns=len(COLUMNS),
    )
    scroller = element("div", table, class_="scroller", tabindex=0, role="region", aria_label="ledger")
    return element("div", element("div", choose, every, class_="controls"), scroller, _notes(facts), class_="ledger")


def merged(ledger: Ledger) -> list[Line]:
    """Lines that differ in nothing but their count as one, where the first of them stands: the layers of a stack."""
    counts: dict[Line, int] = {}
    for line in ledger:
        once = dataclasses.replace(line, count=1)
        counts[once] = counts.get(once, 0) + line.count
    return [dataclasses.replace(line, count=count) for line, count in counts.items()]


def _row(line: Line, number: int, most: int, colours: Colours, sources: tuple[str, ...]) -> Markup:
    times_said = f"{line.count:,}" if line.count_known else f"{line.count:,} ?"
    axes = [colours.chip(name) for name in line.mesh_axes]
    where = ", ".join(line.mesh_axes)
    name = line.collective.replace("_", "-")
    cells = (
        linked(line.place, sources),
        signal_name(line.signal),
        element("span", line.phase),
        element(
            "span",
            element("span", name, class_="what"),
            [" ", element("span", line.via, class_="via" if line.asked else "via unasked")] if line.via else None,
        ),
        element("span", axes, element("span", f" of {line.group:,}", class_="quiet")),
        element("span", times_said),
        element(
            "span", measured(line.payload), " ", element("span", line.dtype, class_="via"), title=line.source or None
        ),
        element("span", measured(line.total), _bar(line, most, colours), class_="amount"),
    )
    keys: dict[str, object] = {
        "place": f"{line.place.source}:{line.place.line or 0:07d}" if line.place is not None else "",
        "signal": line.signal,
        "phase": f"{PHASES.index(line.phase)} {line.phase}",
        "collective": line.collective,
        "axis": where,
        "count": line.count,
        "payload": line.payload,
        "total": line.total,
    }
    return element(
        "tr",
        [
            element("td", cell, class_=f"c-{key}", data_sort=keys[key])
            for (key, *_), cell in zip(COLUMNS, cells, strict=True)
        ],
        data_order=number,
        data_signal=line.signal if line.signal != "-" else NO_SIGNAL,
        data_axis=where,
        data_phase=line.phase,
        data_count=line.count,
        data_total=line.total,
    )


def _bar(line: Line, most: int, colours: Colours) -> Markup:
    return stack([(f"fill {colours.of(line.mesh_axes[0])}", line.total, None)], most)


def by_axis(facts: Facts, colours: Colours) -> Markup | None:
    """The wire bytes of a step as one bar, a part for each mesh axis."""
    sums, counts = facts.ledger.by("mesh_axes"), facts.ledger.counts("mesh_axes")
    whole = facts.ledger.total
    if not whole:
        return None
    parts, legend = [], []
    for names, total in sorted(sums.items(), key=lambda each: -each[1]):
        first, *_ = names.split(", ")
        parts.append((f"fill {colours.of(first)}", total, None))
        legend.append(
            element(
                "li",
                [colours.chip(name, _group(facts, name)) for name in names.split(", ")],
                element("b", measured(total)),
                element("span", times(counts[names], "collective"), class_="quiet"),
            )
        )
    return element("div", stack(parts, whole), element("ul", legend, class_="legend"), class_="by-axis")


def _group(facts: Facts, name: str) -> int | None:
    return facts.mesh.shape.get(name) if facts.mesh is not None else None


def _notes(facts: Facts) -> Markup | None:
    ledger, said = facts.ledger, []
    if not all(line.count_known for line in ledger):
        said.append("A number of times with ? is one trip of a while loop, whose trips no program text tells.")
    if any(line.branches for line in ledger):
        said.append("Every branch of a cond is counted.")
    if unasked := [line for line in ledger if not line.asked]:
        total = sum(line.total for line in unasked)
        said.append(f"{times(sum(line.count for line in unasked), 'collective')} of {size(total)} no signal asked for.")
    for left in ledger.left:
        where = "under no signal" if left.signal == "-" else f"under signal {left.signal} ({left.place})"
        said.append(
            f"{left.words}, {where}: nobody asked for it, the compiler decides what it moves, and no sum has it."
        )
    for idle in ledger.unused:
        said.append(f"Signal {idle.signal} ({idle.place}) is unused: nothing in this program is under it.")
    for each in ledger.unsplit:
        lies = f"{each.parameter} whole on each device ({size(each.bytes)}), not split by {each.keys}"
        said.append(f"Signal {each.signal} ({each.place}): {lies}; {each.hint}.")
    if ledger.is_auto:
        said.append(
            "On axis_types: auto the compiler adds collectives of its own where it needs them: see jshard plan."
        )
    for choice in ledger.choices:
        said.append(f"{choice.signal}: no signal names a strategy here; jshard chose {choice.words}.")
    return element("ul", [element("li", words) for words in said], class_="notes") if said else None
