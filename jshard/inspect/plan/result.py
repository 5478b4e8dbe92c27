"""The result of planning: a page of text, and a JSON document with a version."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

from jshard.hardware.chips import HOP
from jshard.inspect.compiled.collective import CompiledCollective
from jshard.inspect.compiled.program_text import digest
from jshard.inspect.ledger.entries import document_of
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.plan.aot import Compiled
from jshard.inspect.plan.comparison import Comparison, Row
from jshard.inspect.plan.estimate import MODEL, Estimate, Memory, in_words
from jshard.inspect.plan.topology import Topology
from jshard.printing.table import Block, Rows, Shown
from jshard.printing.units import size

SCHEMA = "jshard.plan/1"
NUMBERS = (5, 6, 7, 8)  # the right-aligned columns of a row


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Shown):
    """A program's ledger, its compiled collectives, its memory, and its time by a model. It prints as a page."""

    topology: Topology
    mesh: Mapping[str, int]
    asked: Ledger
    got: tuple[CompiledCollective, ...]
    comparison: Comparison | None  # None if the program was too large to compile
    memory: Memory
    estimate: Estimate | None
    compilers: str  # jax 0.10.2, libtpu 0.0.42.1
    seconds: float  # the time of the compilation
    cached: bool
    compiled: Compiled

    @property
    def text_of_program(self) -> str:
        """The compiled text; "" if the program was too large."""
        return self.compiled.text

    def blocks(self) -> Iterator[Block]:
        """Yield a section for each question, its answer last."""
        mesh = " x ".join(f"{name} {count:,}" for name, count in self.mesh.items())
        when = f", cached (it took {self.seconds:.1f} s to compile)" if self.cached else f" in {self.seconds:.1f} s"
        yield f"{self.topology}, mesh {mesh}, compiled by {self.compilers}{when}"
        for section in (self._wire, self._memory, self._time):
            yield ""
            yield from section()

    def _wire(self) -> Iterator[Block]:
        if self.comparison is None:
            asked = f"{size(self.asked.total)} on the wire per device asked"
            yield f"wire: {asked}; the program was too large to compile, so nothing is known of its run"
            return
        comparison, asked = self.comparison, sum(row.asked for row in self.comparison.rows)
        yield Rows([_cells(row) for row in comparison.rows], NUMBERS)
        more = comparison.got - comparison.asked
        change = "as many" if not more else f"{size(abs(more))} {'more' if more > 0 else 'less'}"
        runs = sum(got.count for got in self.got if got.group > 1)
        yield (
            f"wire: {size(comparison.asked)} per device asked in {asked:,} collectives, {size(comparison.got)} run ({change}) "
            f"in {runs:,} instructions, {size(comparison.hidden)} of it hidden and "
            f"{size(comparison.got - comparison.hidden)} not"
        )
        if self.topology.slices > 1:
            yield self._between_slices()

    def _between_slices(self) -> str:
        """Return a sentence about the bytes on the slower network."""
        chip, found = self.topology.chip, [got for got in self.got if self.topology.spans_slices(got.members)]
        total, late = sum(got.total for got in found), sum(got.total * (1 - got.hidden) for got in found)
        told = f"{size(total)} of it in {sum(got.count for got in found):,} instructions"
        if not chip.link:
            return f"between slices: {told}"
        rate = f"{chip.between_hosts / chip.devices / 1e9:.3g} GB/s a device and {in_words(HOP)} a hop"
        return (
            f"between slices: {told}, {size(total - round(late))} of that hidden and {size(round(late))} not, at {rate}"
        )

    def _memory(self) -> Iterator[Block]:
        memory = self.memory
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

    def _time(self) -> Iterator[Block]:
        estimate = self.estimate
        if estimate is None:
            why = "there are no figures for it" if self.memory.parts else "nothing was compiled"
            yield f"time: no estimate for {self.topology.name}, {why}"
            return
        rows = [
            (part.name, part.words, f"at {part.peak}" if part.peak else "", in_words(part.seconds))
            for part in estimate.parts
        ]
        yield Rows(rows, (3,))
        yield f"figures: {estimate.source}"
        yield f"time: {in_words(estimate.seconds)} a step = {MODEL} ({'; '.join(estimate.remarks)})"

    def to_json(self) -> str:
        """Return a JSON document with its schema."""
        comparison, memory, estimate = self.comparison, self.memory, self.estimate
        rows = [] if comparison is None else list(map(document_of, comparison.rows))
        fields = {
            "schema": SCHEMA,
            "topology": {
                "name": self.topology.name,
                "chip": self.topology.chip.name,
                "kind": self.topology.chip.kind,
                "devices": self.topology.devices,
                "slices": self.topology.slices,
            },
            "mesh": dict(self.mesh),
            "compilers": self.compilers,
            "seconds": self.seconds,
            "cached": self.cached,
            "program": digest(self.text_of_program),
            "wire": {
                "asked": self.asked.total,
                "got": None if comparison is None else comparison.got,
                "rows": rows,
            },
            "memory": {
                **document_of(memory),
                "needed": memory.needed,
                "fits": memory.fits,
                "within_budget": None if memory.budget is None else memory.over_budget() is None,
            },
            "time": None
            if estimate is None
            else {
                "model": MODEL,
                "measured": False,
                "seconds": estimate.seconds,
                **document_of(estimate),
                "parts": [{**document_of(part), "seconds": part.seconds} for part in estimate.parts],
            },
        }
        return json.dumps(fields, indent=2)


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
