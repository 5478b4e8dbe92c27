"""What was asked against what the compiler makes of it, when a plan is at hand."""

from __future__ import annotations

from jshard.inspect.plan.comparison import Comparison, Row
from jshard.inspect.plan.estimate import MODEL, Estimate, Part, in_words
from jshard.inspect.plan.memory import Memory
from jshard.inspect.plan.planning import Plan
from jshard.inspect.report.facts import Facts
from jshard.inspect.report.markup import Markup, element
from jshard.inspect.report.words import Colours, linked, measured, times

HEAD = (
    "Line",
    "Signal",
    "Phase",
    "Collective",
    "Over",
    "Asked",
    "Got",
    "Wire asked",
    "Wire got",
    "What the compiler did",
)
NUMBERS = range(5, 9)


def asked_got(facts: Facts, colours: Colours) -> Markup:
    if facts.plan is None:
        words = "Not planned: nothing was compiled, so nothing is said here of what the compiler makes of it. To see it, type "
        command = f"jshard report {facts.title} --topology cpu:{facts.devices}"
        return element("p", words, element("code", command), ".", class_="quiet")
    plan: Plan = facts.plan
    too_large = element(
        "p", "The program was too large to be compiled to its end: there is no text to compare with.", class_="quiet"
    )
    kept = "looked up: it was compiled before" if plan.cached else f"compiled in {plan.seconds:,.1f} s"
    return element(
        "div",
        element("p", f"{plan.topology}, {kept} by {plan.compilers}.", class_="quiet"),
        _memory(plan.memory),
        too_large if plan.comparison is None else comparison_table(plan.comparison, facts, colours),
        _estimate(plan.estimate),
        class_="plan",
    )


def _memory(memory: Memory) -> Markup:
    """What the program needs on each device while it runs, against what the chip has."""
    whole = max(memory.total, memory.capacity or 0) or 1
    x, parts, legend = 0.0, [element("rect", width=1000, height=16, class_="track")], []
    for number, (name, count) in enumerate(memory.parts.items()):
        width = 1000 * count / whole
        if count:
            parts.append(element("rect", x=x, width=max(0.5, width), height=16, class_=f"m{number % 4}"))
            legend.append(
                element("li", element("span", class_=f"swatch m{number % 4}"), name, element("b", measured(count)))
            )
        x += width
    if memory.capacity is not None:
        edge = 1000 * memory.capacity / whole
        parts.append(element("rect", x=min(edge, 997), width=3, height=16, class_="limit"))
    bar = element("svg", parts, viewBox="0 0 1000 16", preserveAspectRatio="none", class_="split", aria_hidden="true")
    largest = [element("li", str(each)) for each in memory.largest]
    biggest = (
        element("details", element("summary", "What is biggest while it runs"), element("ol", largest))
        if largest
        else None
    )
    verdict = element("p", element("b", memory.verdict(), class_="unfit" if memory.fits is False else None))
    return element(
        "div",
        element("h3", "Memory while it runs"),
        verdict,
        bar,
        element("ul", legend, class_="legend"),
        biggest,
        class_="needs",
    )


def _estimate(estimate: Estimate | None) -> Markup | None:
    """The model of a step's time, each part of it visible."""
    if estimate is None:
        return None
    rows = [
        element(
            "tr",
            element("th", part.name, scope="row"),
            element("td", part.words),
            element("td", _rate(part), class_="n"),
            element("td", in_words(part.seconds), class_="n"),
        )
        for part in estimate.parts
    ]
    foot = element(
        "tr",
        element("th", f"A model, not a measurement: {MODEL}", colspan=3, scope="row"),
        element("td", in_words(estimate.seconds), class_="n"),
    )
    head = [
        element("th", word, scope="col", class_="n" if word in ("Peak", "Time") else None)
        for word in ("Part", "What", "Peak", "Time")
    ]
    table = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", rows),
        element("tfoot", foot),
        class_="plain-table",
    )
    doubts = (
        "Some layouts can't be seen: arithmetic is counted as if whole on every device. " if estimate.at_most else ""
    )
    doubts += "A while loop is counted as one trip. " if estimate.unknown else ""
    source = element("p", f"{doubts}Peaks: {estimate.source}.", class_="quiet")
    scroller = element("div", table, class_="scroller", tabindex=0, role="region", aria_label="estimate")
    return element("div", element("h3", "How long it might take"), scroller, source)


def _rate(part: Part) -> str:
    flops = part.name == "arithmetic"
    return f"{part.rate / (1e12 if flops else 1e9):,.4g} {'TFLOP/s' if flops else 'GB/s'}"


def comparison_table(comparison: Comparison, facts: Facts, colours: Colours) -> Markup:
    """Both sides of every line, the totals under them, and each difference by name."""
    sources = tuple(text.source for text in facts.texts)
    rows = [_row(row, colours, sources) for row in comparison.rows]
    head = [
        element("th", word, scope="col", class_="n" if number in NUMBERS else None) for number, word in enumerate(HEAD)
    ]
    counts = [sum(row.asked for row in comparison.rows), sum(row.got for row in comparison.rows)]
    foot = element(
        "tr",
        element("th", "Total", scope="row", colspan=5),
        [element("td", f"{count:,}", class_="n") for count in counts],
        element("td", measured(comparison.asked, name="asked"), class_="n"),
        element("td", measured(comparison.got, name="got"), class_="n"),
        element("td", _verdict(comparison)),
    )
    table = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", rows),
        element("tfoot", foot),
        class_="plain-table",
    )
    scroller = element("div", table, class_="scroller", tabindex=0, role="region", aria_label="asked against got")
    return element("div", element("h3", "Collective by collective"), scroller)


def _verdict(comparison: Comparison) -> str:
    count = len(comparison.differences)
    return "as asked" if not count else times(count, "difference")


def _row(row: Row, colours: Colours, sources: tuple[str, ...]) -> Markup:
    differences = [element("span", str(each), class_=f"difference {each.kind}") for each in row.differences]
    waiting = f"{row.asynchronous:,} of {row.got:,} asynchronous" if row.asynchronous else None
    said = [*differences, *([element("span", waiting, class_="quiet")] if waiting else [])]
    return element(
        "tr",
        element("td", linked(row.place, sources)),
        element(
            "td",
            element("span", row.signal, class_="name")
            if row.signal != "-"
            else element("span", "no signal", class_="quiet"),
        ),
        element("td", row.phase),
        element("td", row.collective.replace("_", "-")),
        element("td", [colours.chip(name) for name in row.mesh_axes]),
        element("td", f"{row.asked:,}", class_="n"),
        element("td", f"{row.got:,}", class_="n"),
        element("td", measured(row.wire_asked), class_="n"),
        element("td", measured(row.wire_got), class_="n"),
        element("td", said or element("span", "as asked", class_="quiet"), class_="did"),
        class_="differs" if differences else None,
    )
