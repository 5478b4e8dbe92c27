"""How long a step might take, as a stated model: each part is a count over a peak that a maker states. Never measured."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from jshard.inspect.compiled.traffic import CompiledCollective
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.plan.comparison import hidden_in_kernel
from jshard.inspect.plan.flops import Arithmetic
from jshard.inspect.plan.memory import Memory
from jshard.inspect.plan.topology import Topology
from jshard.units import size, three_digits

MODEL = "max(arithmetic, memory, wire that may hide) + wire that can't hide"


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the estimate: `amount` over `rate` a second."""

    name: str  # arithmetic, memory, wire that may hide, wire that can't hide
    words: str
    amount: float
    rate: float

    @property
    def seconds(self) -> float:
        return self.amount / self.rate

    @property
    def peak(self) -> str:
        """The rate in words."""
        return f"{self.rate / 1e12:,.0f} TFLOP/s" if self.name == "arithmetic" else f"{self.rate / 1e9:,.0f} GB/s"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A model of one step's time. It knows nothing of latency, of contention, or of what kernels reach of their peaks."""

    parts: tuple[Part, ...]
    source: str
    at_most: bool = False  # some layouts can't be seen, and the arithmetic is counted as if whole on every device
    unknown: bool = False  # a while loop is counted as one trip

    @property
    def remarks(self) -> list[str]:
        """What to keep in mind of the numbers."""
        found = ["a model, nothing was measured"]
        found += ["arithmetic at most, where layouts can't be seen"] * self.at_most
        return [*found, *["a while loop counts one trip"] * self.unknown]

    def seconds_of(self, name: str) -> float:
        return sum(part.seconds for part in self.parts if part.name == name)

    @property
    def seconds(self) -> float:
        hidden = [self.seconds_of(name) for name in ("arithmetic", "memory", "wire that may hide")]
        return max(hidden) + self.seconds_of("wire that can't hide")


def estimate(
    asked: Ledger, found: list[CompiledCollective], arithmetic: Arithmetic, memory: Memory, topology: Topology
) -> Estimate | None:
    """None where the table has no figures, as for pretended devices, and where nothing was compiled. Of what was asked only
    the kernels count, whose wire no compiled text shows."""
    chip = topology.chip
    if not chip.link or not memory.parts:
        return None
    parts = [
        Part("arithmetic", f"{flops:,.0f} FLOP in {dtype}", flops, chip.peak(dtype))
        for dtype, flops in arithmetic.flops.items()
    ]
    moved = memory.parts["arguments"] + memory.parts["results that take no argument's place"]
    words = f"{size(moved)} of arguments and results, each moved once (at least)"
    parts.append(Part("memory", words, moved, chip.bandwidth / chip.devices))
    may_hide, can_not = Counter[float](), Counter[float]()  # bytes by rate
    for got in found:
        if got.group > 1:
            (may_hide if got.asynchronous else can_not)[link_rate(got.members, topology)] += got.total
    for line in asked.lines:
        if line.declared is not None:
            rate, hidden = link_rate(range(line.group), topology), hidden_in_kernel(line, chip)
            may_hide[rate] += hidden
            can_not[rate] += line.total - hidden
    for name, rates in (("wire that may hide", may_hide), ("wire that can't hide", can_not)):
        totals = sorted((+rates).items())
        parts += [Part(name, f"{size(total)} on the wire", total, rate) for rate, total in totals]
    return Estimate(tuple(parts), chip.source, arithmetic.at_most, arithmetic.unknown)


def link_rate(members: Iterable[int], topology: Topology) -> float:
    """Bytes a second that a device can send in a collective. A TPU: a ring along one axis of the torus, both ways, shared
    by the devices of a chip. A GPU: NVLink within a host, the network between hosts."""
    chip = topology.chip
    if chip.axes:
        return 2 * chip.link / chip.devices
    hosts = {member // chip.host for member in members}
    return chip.link if len(hosts) <= 1 else chip.between_hosts


def in_words(seconds: float) -> str:
    return three_digits(1e6 * seconds, 1000, ("us", "ms", "s"))
