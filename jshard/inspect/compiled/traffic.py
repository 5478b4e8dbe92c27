"""The collectives of a compiled program, read from its text: what XLA made of what was asked."""

from __future__ import annotations

from typing import Any

from jshard.inspect.compiled.collective import CompiledCollective as CompiledCollective
from jshard.inspect.compiled.collective import Large
from jshard.inspect.compiled.hlo_text import Program
from jshard.inspect.compiled.schedule import collectives_of, schedule_of
from jshard.provenance import cause


def collectives_in(compiled: Any) -> list[CompiledCollective]:
    """The collectives of `compiled` (a compiled program, or its text), in the order of the text's calls. Loops count by
    their trips, and every branch of a conditional counts."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    return list(collectives_of(schedule_of(Program(text))))


def wire_bytes(compiled: Any) -> int:
    """Bytes that each device puts on the wire in one run of a compiled program (or of its text)."""
    return sum(got.total for got in collectives_in(compiled))


def largest_results(text: str) -> tuple[Large, ...]:
    """The arrays that a compiled program puts into memory while it runs, the largest first. Of those of one shape only one
    is named: they may well take each other's place."""
    program = Program(text)
    found: dict[str, Large] = {}
    for size, shape, op_name in program.results(program.entry):
        if shape not in found or found[shape].signal == "-":
            found[shape] = Large(size, shape, cause(op_name).signal)
    return tuple(sorted(found.values(), key=lambda each: -each.size))
