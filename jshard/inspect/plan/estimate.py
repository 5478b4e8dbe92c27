"""The needs of a compiled program per device, never measured: memory, and time by a model of its schedule."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from jshard.errors import Location
from jshard.inspect.compiled.collective import Large
from jshard.inspect.compiled.hlo_text import HloProgram
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.ledger.memory import Resident
from jshard.inspect.plan.aot import Compiled
from jshard.inspect.plan.topology import Topology
from jshard.inspect.plan.walk import Walked, link_rate
from jshard.printing.units import size, three_digits
from jshard.programs.flops import Flops
from jshard.programs.provenance import cause
from jshard.signals.config import Configuration

MODEL = "work + wait, by a walk through the compiled schedule"
UNITS = {"arithmetic": (1e12, "TFLOP/s"), "work": (1e12, "TFLOP/s")}  # others are in GB/s
SHOWN = 5  # the number of largest arrays to show


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device. `capacity` is the memory open to programs on the chip, None if the table has none."""

    parts: Mapping[str, int]  # arguments, results not in place of arguments, temporaries, program; {} when too large
    total: int
    capacity: int | None
    rest: tuple[Resident, ...]  # bytes held between steps, by signal
    largest: tuple[Large, ...]
    budget: int | None = None  # the limit in the configuration, and its line
    budget_place: Location | None = None
    peak: int | None = None  # of arguments, results and temporaries; None where the compiler gives none

    @property
    def needed(self) -> int:
        """Bytes held at a time: the sum of all parts, or peak plus program if that is less. The sum counts
        memory twice that one loop frees for another. A TPU's peak also counts arrays in its VMEM."""
        return self.total if self.peak is None else min(self.total, self.peak + self.parts["program"])

    def over_budget(self) -> str | None:
        """Return the error sentence if the program needs more than `jshard.budget` allows."""
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
        """True if the program fits; None if the memory of the device is unknown."""
        return None if self.capacity is None else self.needed <= self.capacity

    def verdict(self) -> str:
        """Return a sentence about the bytes needed and the bytes there."""
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
    """Return the compiler's sums, or its error's figures if memory was too small, with the loaded budget."""
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
    """Return the arrays a compiled program writes to memory, the largest first.
    Of arrays of equal shape it names only the first, as they may share memory."""
    program = HloProgram(text)
    found: dict[str, Large] = {}
    for bytes_, shape, op_name in program.results(program.entry):
        if shape not in found or found[shape].signal == "-":
            found[shape] = Large(bytes_, shape, cause(op_name).signal)
    return tuple(sorted(found.values(), key=lambda each: -each.size))


# -- time --


@dataclasses.dataclass(frozen=True)
class TimePart:
    """A part of the estimate: `amount` over `rate` a second. A step is its work plus its wait.
    The other parts are lower bounds: each is the time of its amount alone at the peak rate."""

    name: str  # arithmetic, memory, wire, work, wait
    words: str
    amount: float
    rate: float

    @property
    def seconds(self) -> float:
        return self.amount / self.rate

    @property
    def peak(self) -> str:
        """The rate in words; "" for seconds of the walk."""
        size, unit = UNITS.get(self.name, (1e9, "GB/s"))
        rate = self.rate / size
        return f"{rate:,.0f} {unit}" if rate >= 10 else f"{rate:.3g} {unit}" if self.rate > 1 else ""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A model of a step's time. It counts latency only between slices, and kernels at their peak rates."""

    parts: tuple[TimePart, ...]
    source: str
    at_most: bool = False  # some layouts are unknown: their arithmetic counts as whole on every device
    unknown: bool = False  # a while loop counts as one trip

    @property
    def remarks(self) -> list[str]:
        """The assumptions behind the numbers."""
        found = ["a model, nothing was measured"]
        found += ["arithmetic at most, where layouts can't be seen"] * self.at_most
        return [*found, *["a while loop counts one trip"] * self.unknown]

    def seconds_of(self, name: str) -> float:
        return sum(part.seconds for part in self.parts if part.name == name)

    @property
    def seconds(self) -> float:
        return self.seconds_of("work") + self.seconds_of("wait")


def estimate(asked: Ledger, walked: Walked, arithmetic: Flops, memory: Memory, topology: Topology) -> Estimate | None:
    """Return the estimated time; None without figures of the chip (as for pretended
    devices) or without a compiled program. Of the ledger only kernels count: compiled text
    shows neither their products nor their wire, so they work and wait as declared."""
    chip = topology.chip
    if not chip.link or not memory.parts:
        return None
    parts = [
        TimePart("arithmetic", f"{flops:,.0f} FLOP in {dtype}", flops, chip.peak(dtype))
        for dtype, flops in arithmetic.flops.items()
    ]
    moved = memory.parts["arguments"] + memory.parts["results that take no argument's place"]
    words = f"{size(moved)} of arguments and results, each moved once (at least)"
    parts.append(TimePart("memory", words, moved, chip.bandwidth / chip.devices))
    wire, late = Counter[float](), 0.0  # bytes by rate, and bytes not hidden
    for got in walked.collectives:
        if got.group > 1:
            wire[link_rate(got.members, topology)] += got.total
            late += got.total * (1 - got.hidden)
    by = f"XLA's own cycles at {chip.clock / 1e9:.2f} GHz" if chip.clock else "the peaks of their products and bytes"
    parts.append(TimePart("work", f"of instructions, by {by}", walked.work, 1))
    parts += [
        TimePart("work", f"{flops:,.0f} FLOP in {dtype}, in kernels", flops, chip.peak(dtype))
        for dtype, flops in arithmetic.in_kernels.items()
    ]
    kernels = Counter[float]()
    for line in asked.lines:
        if line.declared is not None:
            rate = link_rate(range(line.group), topology)
            wire[rate] += line.total
            kernels[rate] += line.total
    slow = chip.between_hosts / chip.devices if topology.slices > 1 else 0.0
    where = {rate: "between slices" if rate == slow else "on the wire" for rate in wire}
    parts += [TimePart("wire", f"{size(total)} {where[rate]}", total, rate) for rate, total in sorted((+wire).items())]
    parts.append(TimePart("wait", f"{size(late)} that nothing hides", walked.wait, 1))
    parts += [
        TimePart("wait", f"{size(total)} that a kernel sends", total, rate)
        for rate, total in sorted((+kernels).items())
    ]
    return Estimate(tuple(parts), chip.source, arithmetic.at_most, arithmetic.unknown)


def in_words(seconds: float) -> str:
    """Return a time with its unit: us, ms or s."""
    return three_digits(1e6 * seconds, 1000, ("us", "ms", "s"))
