"""The ledger as an HTML table in program order; a script sorts it and folds it by signal, mesh axis or phase."""

from __future__ import annotations

from jshard.inspect.ledger.entries import Line, joined
from jshard.inspect.report.facts import Facts
from jshard.printing.markup import Markup, element
from jshard.printing.pages.shell import stack, table
from jshard.printing.pages.words import NO_SIGNAL, Colours, linked, measured, signal_name
from jshard.programs.provenance import PHASES

COLUMNS = (  # key, title, True if it sorts as a number
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
        return element("div", _notes(facts), class_="ledger")
    lines = joined(ledger)  # the layers of a stack
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
    lines_table = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", rows),
        element("tfoot", foot),
        id="ledger",
        data_columns=len(COLUMNS),
    )
    scroller = element("div", lines_table, class_="scroller", tabindex=0, role="region", aria_label="ledger")
    return element("div", element("div", choose, every, class_="controls"), scroller, _notes(facts), class_="ledger")


def _row(line: Line, number: int, most: int, colours: Colours, sources: tuple[str, ...]) -> Markup:
    where, name = ", ".join(line.mesh_axes), line.collective.replace("_", "-")
    via = element("span", line.via, class_="via" if line.asked else "via unasked")
    dtype = element("span", line.dtype, class_="via")
    place = f"{line.place.source}:{line.place.line or 0:07d}" if line.place is not None else ""
    chips = [colours.chip(name) for name in line.mesh_axes]
    bar = stack([(f"fill {colours.of(line.mesh_axes[0])}", line.total)], most)
    cells = (  # the sort key and the content of each column
        (place, linked(line.place, sources)),
        (line.signal, signal_name(line.signal)),
        (f"{PHASES.index(line.phase)} {line.phase}", element("span", line.phase)),
        (line.collective, element("span", element("span", name, class_="what"), [" ", via] if line.via else None)),
        (where, element("span", chips, element("span", f" of {line.group:,}", class_="quiet"))),
        (line.count, element("span", f"{line.count:,}" if line.count_known else f"{line.count:,} ?")),
        (line.payload, element("span", measured(line.payload), " ", dtype, title=line.source or None)),
        (line.total, element("span", measured(line.total), bar, class_="amount")),
    )
    return element(
        "tr",
        [
            element("td", cell, class_=f"c-{key}", data_sort=sort)
            for (key, *_), (sort, cell) in zip(COLUMNS, cells, strict=True)
        ],
        data_order=number,
        data_signal=line.signal if line.signal != "-" else NO_SIGNAL,
        data_axis=where,
        data_phase=line.phase,
        data_count=line.count,
        data_total=line.total,
    )


def claims_table(facts: Facts) -> Markup | None:
    """Draw the claims beside the layouts of their parameters."""
    head = "Line", "Signal", "Asked", "Parameter", "Array", "In use", "At rest", "Shard", "First use", "Why not"
    rows = ((linked(each.place, facts.sources), *each.cells()[1:]) for each in facts.ledger.claims)
    return table("claims", head, rows, numbers=()) if facts.ledger.claims else None


def _notes(facts: Facts) -> Markup:
    ledger = facts.ledger
    notes = ledger.summary(), *map(str, (*ledger.left, *ledger.choices, *ledger.unused, *ledger.unsplit))
    return element("ul", [element("li", words) for words in notes], class_="notes")
