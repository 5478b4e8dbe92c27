"""What was asked against what the compiler makes of it, when a plan is at hand."""

from __future__ import annotations

from jshard.inspect.plan.comparison import Comparison, Row
from jshard.inspect.plan.estimate import MODEL, Estimate, in_words
from jshard.inspect.plan.memory import Memory
from jshard.inspect.report.facts import Facts
from jshard.printing.markup import Child, Markup, element
from jshard.printing.pages.shell import legend, stack, table
from jshard.printing.pages.words import Colours, linked, measured, signal_name, times
from jshard.printing.units import size

SIDES = "Asked", "Got", "Wire asked", "Wire got"
HEAD = ("Line", "Signal", "Phase", "Collective", "Over", *SIDES, "What the compiler did")


def asked_got(facts: Facts, colours: Colours) -> Markup:
    plan = facts.plan
    if plan is None:
        words = "Not planned: nothing was compiled, so nothing is said here of what the compiler makes of it. To see it, type "
        command = f"jshard report {facts.title} --topology cpu:{facts.devices}"
        return element("p", words, element("code", command), ".", class_="quiet")
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
    total = max(memory.total, memory.capacity or 0) or 1
    parts = [(f"m{number % 4}", name, count) for number, (name, count) in enumerate(memory.parts.items())]
    limit = []
    if memory.capacity is not None:
        edge = min(1000 * memory.capacity / total, 997)
        limit = [element("rect", x=edge, width=3, height=16, class_="limit")]
    largest = [element("li", str(each)) for each in memory.largest]
    biggest = element("details", element("summary", "What is biggest while it runs"), element("ol", largest))
    return element(
        "div",
        element("h3", "Memory while it runs"),
        element("p", element("b", memory.verdict(), class_="unfit" if memory.fits is False else None)),
        stack([(class_, count, None) for class_, _, count in parts], total, *limit, track=True),
        legend((class_, name, measured(count)) for class_, name, count in parts if count),
        biggest if largest else None,
        class_="needs",
    )


def _estimate(estimate: Estimate | None) -> Markup | None:
    """The model of a step's time, each part of it visible."""
    if estimate is None:
        return None
    rows = [(part.name, part.words, part.peak, in_words(part.seconds)) for part in estimate.parts]
    foot = f"A model, not a measurement: {MODEL}", in_words(estimate.seconds)
    shown = table("estimate", ("Part", "What", "Peak", "Time"), rows, numbers=(2, 3), foot=(3, foot))
    source = element("p", f"{'; '.join(estimate.remarks).capitalize()}. Peaks: {estimate.source}.", class_="quiet")
    return element("div", element("h3", "How long it might take"), shown, source)


def comparison_table(comparison: Comparison, facts: Facts, colours: Colours) -> Markup:
    """Both sides of every line, the totals under them, and each difference by name."""
    rows = [_row(row, colours, facts.sources) for row in comparison.rows]
    asked, got = (f"{sum(getattr(row, side) for row in comparison.rows):,}" for side in ("asked", "got"))
    wire = measured(comparison.asked, name="asked"), measured(comparison.got, name="got")
    count = len(comparison.differences)
    foot = ("Total", asked, got, *wire, times(count, "difference") if count else "as asked")
    shown = table("asked against got", HEAD, rows, numbers=range(5, 9), foot=(5, foot))
    return element("div", element("h3", "Collective by collective"), shown)


def _row(row: Row, colours: Colours, sources: tuple[str, ...]) -> list[Child]:
    remarks = [element("span", str(each), class_=f"difference {each.kind}") for each in row.differences]
    if row.hidden:
        remarks.append(element("span", f"{size(row.hidden)} hidden under work", class_="quiet"))
    return [
        linked(row.place, sources),
        signal_name(row.signal),
        row.phase,
        row.collective.replace("_", "-"),
        [colours.chip(name) for name in row.mesh_axes],
        f"{row.asked:,}",
        f"{row.got:,}",
        measured(row.wire_asked),
        measured(row.wire_got),
        element("div", remarks or element("span", "as asked", class_="quiet"), class_="did"),
    ]
