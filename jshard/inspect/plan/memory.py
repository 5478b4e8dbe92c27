"""What a compiled program needs on each device, against what the chip has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jshard.errors import Location
from jshard.inspect.compiled.collective import Large
from jshard.inspect.compiled.hlo_text import HloProgram
from jshard.inspect.ledger.memory import Resident
from jshard.inspect.plan.aot import Compiled
from jshard.inspect.plan.topology import Topology
from jshard.printing.units import size
from jshard.programs.provenance import cause
from jshard.signals.config import Configuration

SHOWN = 5  # of the largest arrays


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device. `capacity` is what the chip lets programs use, None when the table has none."""

    parts: Mapping[str, int]  # arguments, results not in place of arguments, temporaries, program; {} when too large
    total: int
    capacity: int | None
    rest: tuple[Resident, ...]  # what is held between steps, by signal
    largest: tuple[Large, ...]
    budget: int | None = None  # what the configuration allows, and where it says so
    budget_place: Location | None = None
    peak: int | None = None  # of arguments, results and temporaries, as they were placed; None where nobody says

    @property
    def needed(self) -> int:
        """Bytes that are held at once: the peak and the program. What one loop leaves for another the sum of the parts counts
        twice; a TPU's peak counts what it keeps in its own VMEM too, so the smaller counts."""
        return self.total if self.peak is None else min(self.total, self.peak + self.parts["program"])

    def over_budget(self) -> str | None:
        """The sentence when the program needs more than `jshard.budget` allows."""
        if self.budget is None or self.needed <= self.budget:
            return None
        biggest = max(self.parts, key=lambda name: self.parts[name]) if self.parts else None
        most = f", {size(self.parts[biggest])} of it {biggest}" if biggest else ""
        return (
            f"jshard.budget ({self.budget_place}) is {size(self.budget)}, and the program needs {size(self.needed)} on each "
            f"device{most}; write budget: {self.needed}, or split more of it: store: data"
        )

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None when nobody knows what the device has."""
        return None if self.capacity is None else self.needed <= self.capacity

    def verdict(self) -> str:
        if self.capacity is None:
            return f"needs {size(self.needed)} per device"
        share = f"{100 * self.needed / self.capacity:.0f} %"
        if self.fits:
            return f"fits: {size(self.needed)} of {size(self.capacity)} per device ({share})"
        more = size(self.needed - self.capacity)
        return f"does not fit: {size(self.needed)} of {size(self.capacity)} per device ({share}), {more} too much"


def memory_of(
    compiled: Compiled, topology: Topology, rest: tuple[Resident, ...], present: Configuration | None
) -> Memory:
    """Take the compiler's own sums, or what it said when it had too little; with the budget of what is loaded."""
    budget = {} if present is None else {"budget": present.budget, "budget_place": present.budget_place}
    if compiled.needed is not None:
        return Memory({}, compiled.needed, compiled.available, rest, compiled.largest[:SHOWN], **budget)
    sizes = compiled.memory
    parts = {
        "arguments": sizes["argument"],
        "results that take no argument's place": sizes["output"] - sizes["alias"],
        "temporaries": sizes["temp"],
        "program": sizes["generated_code"],
    }
    largest = largest_results(compiled.text)[:SHOWN]
    capacity, is_cpu = topology.chip.device_memory or None, topology.chip.platform == "cpu"
    peak = None if is_cpu else sizes.get("peak")  # XLA for CPU leaves temporaries out of it
    return Memory(parts, sum(parts.values()), capacity, rest, largest, **budget, peak=peak)


def largest_results(text: str) -> tuple[Large, ...]:
    """The arrays that a compiled program puts into memory while it runs, the largest first. Of those of one shape only one
    is named: they may well take each other's place."""
    program = HloProgram(text)
    found: dict[str, Large] = {}
    for bytes_, shape, op_name in program.results(program.entry):
        if shape not in found or found[shape].signal == "-":
            found[shape] = Large(bytes_, shape, cause(op_name).signal)
    return tuple(sorted(found.values(), key=lambda each: -each.size))
