"""A plan as a page of text: asked and got, memory, time."""

from __future__ import annotations

from collections.abc import Iterator

from jshard.chips import HOP
from jshard.inspect.plan.comparison import Row
from jshard.inspect.plan.estimate import MODEL, in_words
from jshard.inspect.plan.result import Result
from jshard.table import Block, Rows
from jshard.units import size

NUMBERS = (5, 6, 7, 8)  # the columns of a row that stand to the right


def page(plan: Result) -> Iterator[Block]:
    """One section for each question, the answer to it last."""
    yield heading(plan)
    for section in (_wire, _memory, _time):
        yield ""
        yield from section(plan)


def heading(plan: Result) -> str:
    mesh = " x ".join(f"{name} {count:,}" for name, count in plan.mesh.items())
    when = ", looked up (it took {} when it was made)" if plan.cached else " in {}"
    return f"{plan.topology}, mesh {mesh}, compiled by {plan.compilers}{when.format(f'{plan.seconds:.1f} s')}"


# -- what is asked and what runs --


def _wire(plan: Result) -> Iterator[Block]:
    if plan.comparison is None:
        asked = f"{size(plan.asked.total)} on the wire per device asked"
        yield f"wire: {asked}; what would run is not known, as the program was not compiled to its end"
        return
    yield Rows([_cells(row) for row in plan.comparison.rows], NUMBERS)
    yield wire_summary(plan)
    if plan.topology.slices > 1:
        yield _between_slices(plan)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.place or "-"),
        row.signal,
        row.phase,
        row.collective,
        f"over {', '.join(row.mesh_axes) or '?'}",
        f"asked {row.asked:,}",
        size(row.wire_asked),
        f"got {row.got:,}",
        size(row.wire_got),
        _hidden(row),
        "; ".join(map(str, row.differences)),
        f"({row.via})" if row.via else "",
    )


def _hidden(row: Row) -> str:
    late = row.wire_got - row.hidden
    if not (row.hidden and late):
        return "" if not row.got else "hidden" if row.hidden else "not hidden"
    return f"{size(row.hidden)} hidden, {size(late)} not"


def wire_summary(plan: Result) -> str:
    """The last line of the section."""
    comparison = plan.comparison
    assert comparison is not None
    more = comparison.got - comparison.asked
    change = "as many" if not more else f"{size(abs(more))} {'more' if more > 0 else 'less'}"
    runs = sum(got.count for got in plan.got if got.group > 1)
    return (
        f"wire: {size(comparison.asked)} per device asked in {sum(row.asked for row in comparison.rows):,} collectives, "
        f"{size(comparison.got)} run ({change}) in {runs:,} instructions, {size(comparison.hidden)} of it hidden and "
        f"{size(comparison.got - comparison.hidden)} not"
    )


def _between_slices(plan: Result) -> str:
    """Tell of the bytes that go over the slower network."""
    chip, found = plan.topology.chip, [got for got in plan.got if plan.topology.spans_slices(got.members)]
    total, late = sum(got.total for got in found), sum(got.total * (1 - got.hidden) for got in found)
    told = f"{size(total)} of it in {sum(got.count for got in found):,} instructions"
    if not chip.link:
        return f"between slices: {told}"
    rate = f"{chip.between_hosts / chip.devices / 1e9:.3g} GB/s a device and {in_words(HOP)} a hop"
    return f"between slices: {told}, {size(total - round(late))} of that hidden and {size(round(late))} not, at {rate}"


# -- memory --


def _memory(plan: Result) -> Iterator[Block]:
    memory = plan.memory
    rows = [
        (
            str(rest.place or "-"),
            rest.signal,
            size(rest.parameters),
            "of parameters",
            size(rest.optimizer),
            "of optimizer state",
        )
        for rest in memory.rest
        if rest.parameters or rest.optimizer
    ]
    yield Rows(rows, (2, 4))
    yield Rows([(size(bytes_), name) for name, bytes_ in memory.parts.items()], (0,))
    named = "asked for" if not memory.parts else "put into memory"
    yield from (f"largest {named}: {large}" for large in memory.largest)
    yield f"memory: {memory.verdict()}"
    if too_much := memory.over_budget():
        yield f"memory: {too_much}"


# -- time --


def _time(plan: Result) -> Iterator[Block]:
    estimate = plan.estimate
    if estimate is None:
        why = "there are no figures for it" if plan.memory.parts else "nothing was compiled"
        yield f"time: no estimate for {plan.topology.name}, {why}"
        return
    rows = [
        (part.name, part.words, f"at {part.peak}" if part.peak else "", in_words(part.seconds))
        for part in estimate.parts
    ]
    yield Rows(rows, (3,))
    yield f"figures: {estimate.source}"
    yield f"time: {in_words(estimate.seconds)} a step = {MODEL} ({'; '.join(estimate.remarks)})"
