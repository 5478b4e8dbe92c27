"""A walk through a compiled schedule: the hidden share of each collective and the
time of a step. It is a model, never a measurement (docs/design/0019-schedule.md)."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from jshard.hardware.chips import HOP, Chip
from jshard.inspect.compiled.collective import CompiledCollective
from jshard.inspect.compiled.hlo_text import ARRAY, NOTHING, Computation, HloProgram, Instruction, bytes_of
from jshard.inspect.compiled.schedule import Branches, Done, Event, Loop, Start, Work, collectives_of, schedule_of
from jshard.inspect.plan.comparison import DTYPES
from jshard.inspect.plan.topology import Topology
from jshard.kernels.collectives import COLLECTIVES

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')  # of a dot, of a call of cuBLAS
SLICES = ("dynamic-slice", "slice", "gather")
WRITES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is written into the first, in place


@dataclasses.dataclass(frozen=True)
class Walked:
    """The collectives of a program with their hidden shares, and the seconds of work and waiting on a device."""

    collectives: tuple[CompiledCollective, ...]
    work: float = 0.0
    wait: float = 0.0


def walked(text: str, topology: Topology) -> Walked:
    """Walk through a compiled program. On devices without figures nothing takes time, and nothing is hidden."""
    program = HloProgram(text)
    events = schedule_of(program)
    found = tuple(collectives_of(events))
    if not topology.chip.link:
        return Walked(found)
    walk = _StepClock(seconds_by(program, topology.chip), topology)
    walk.run(events)
    walk.wait(max((each.end for each in walk.flight), default=0.0))
    collectives = [
        dataclasses.replace(each, hidden=max(0.0, round(1 - walk.late[id(each)] / seconds, 6)))
        if (seconds := wire_seconds(each, topology) * each.count)
        else each
        for each in found
    ]
    return Walked(tuple(collectives), walk.work, walk.now - walk.work)


def wire_seconds(collective: CompiledCollective, topology: Topology) -> float:
    """Return the time of a run on free links, 0 for a group of 1; between slices each step adds a hop."""
    if not collective.count or not collective.total:
        return 0.0
    seconds = collective.total / collective.count / link_rate(collective.members, topology)
    hops = COLLECTIVES[collective.collective].hops(collective.group)
    return seconds + hops * HOP if topology.spans_slices(collective.members) else seconds


def link_rate(members: Sequence[int], topology: Topology) -> float:
    """Return the bytes a second of a device in a collective. A TPU sends both ways around a ring
    along one axis of the torus, whose links the devices of a chip share, and over the network
    between slices. A GPU sends by NVLink within a host, and over the network between hosts."""
    chip = topology.chip
    if topology.spans_slices(members):
        return chip.between_hosts / chip.devices
    if chip.axes:
        return 2 * chip.link / chip.devices
    hosts = {member // chip.host for member in members}
    return chip.link if len(hosts) <= 1 else chip.between_hosts


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """A run of a collective: the time of its bytes on the wire."""

    collective: CompiledCollective
    begin: float
    end: float

    def moved(self, seconds: float) -> _Transfer:
        """Return the transfer shifted by some seconds."""
        return dataclasses.replace(self, begin=self.begin + seconds, end=self.end + seconds)


class _StepClock:
    """A clock of a device: work and waiting advance it. A collective is on the wire from its start, or from the
    end of earlier ones on its links. Its seconds while the device waits, for any collective, are not hidden."""

    def __init__(self, seconds_of: Callable[[Work], float], topology: Topology):
        self.seconds_of, self.topology = seconds_of, topology
        self.now = self.work = 0.0
        self.flight: list[_Transfer] = []  # transfers on the wire
        self.open: dict[str, float] = {}  # the end of each started transfer not yet waited for, by name
        self.late: dict[int, float] = defaultdict(float)  # seconds not hidden, by the collective's identity

    def run(self, events: Iterable[Event]) -> None:
        """Advance the clock through events."""
        for event in events:
            match event:
                case Work():
                    seconds = self.seconds_of(event)
                    self.work += seconds
                    self._pass(self.now + seconds)
                case Start():
                    self._start(event.name, event.collective)
                case Done():
                    self.wait(self.open.pop(event.name, 0.0))
                case Loop():
                    self._loop(event)
                case Branches():
                    self._longest(event)

    def wait(self, until: float) -> None:
        """Advance to a time, and count the transfers until then as not hidden."""
        for each in self.flight:
            self.late[id(each.collective)] += max(0.0, min(each.end, until) - max(each.begin, self.now))
        self._pass(max(until, self.now))

    def _pass(self, now: float) -> None:
        self.now = now
        self.flight = [each for each in self.flight if each.end > now]

    def _start(self, name: str, collective: CompiledCollective) -> None:
        if seconds := wire_seconds(collective, self.topology):
            before = [each.end for each in self.flight if self._share_links(each.collective, collective)]
            begin = max([self.now, *before])
            self.flight.append(_Transfer(collective, begin, begin + seconds))
            self.open[name] = max(self.open.get(name, 0.0), begin + seconds)

    def _share_links(self, one: CompiledCollective, other: CompiledCollective) -> bool:
        """Return True if two collectives share links. Axes of a torus have links of their own,
        and slices a network. A GPU sends everything over one link, in its host or beyond."""
        if self.topology.chip.axes and not self.topology.spans_slices((*one.members, *other.members)):
            return len(set(one.members) & set(other.members)) > 1
        return link_rate(one.members, self.topology) == link_rate(other.members, self.topology)

    def _loop(self, loop: Loop) -> None:
        """Walk trip by trip until a trip ends in the state of the trip before; the others repeat it."""
        before = None
        for trip in range(loop.trips):
            now, work, late = self.now, self.work, dict(self.late)
            self.run(loop.body)
            if (state := self._state()) == before:
                rest = loop.trips - trip - 1
                seconds = rest * (self.now - now)
                self.work += rest * (self.work - work)
                for key, seconds_late in self.late.items():
                    self.late[key] += rest * (seconds_late - late.get(key, 0.0))
                self.flight = [each.moved(seconds) for each in self.flight]
                self.open = {name: end + seconds for name, end in self.open.items()}
                self.now += seconds
                return
            before = state

    def _state(self) -> object:
        """Return the state at the end of a trip, in picoseconds from now; it determines the next trip."""
        left = [
            (id(each.collective), round(1e12 * max(0, each.begin - self.now)), round(1e12 * (each.end - self.now)))
            for each in self.flight
        ]
        return left, {name: round(1e12 * (end - self.now)) for name, end in self.open.items() if end > self.now}

    def _longest(self, event: Branches) -> None:
        """Continue after the longest branch; seconds late in any branch are late. A branch taken in
        some turns of a loop gets the share of each turn: a device waits while others take it."""
        ends: list[_StepClock] = []
        late: dict[int, float] = defaultdict(float)
        for branch in event.branches:
            ends.append(copy.copy(self))
            ends[-1].flight, ends[-1].open, ends[-1].late = [*self.flight], dict(self.open), self.late.copy()
            ends[-1].run(branch)
            for key, seconds in ends[-1].late.items():
                late[key] = max(late[key], seconds)
        last = max(ends, key=lambda each: each.now)
        late = {key: (each := self.late.get(key, 0.0)) + event.own * (seconds - each) for key, seconds in late.items()}
        last.work = self.work + event.own * (last.work - self.work)
        last.now = self.now + event.shared * (last.now - self.now)
        vars(self).update(vars(last), late=defaultdict(float, late))


# -- the time of an instruction --


def seconds_by(program: HloProgram, chip: Chip) -> Callable[[Work], float]:
    """Return a function from a piece of work to its seconds on `chip`."""
    known: dict[int, float] = {}

    def seconds(work: Work) -> float:
        if id(work) not in known:
            known[id(work)] = cycles(work) / chip.clock if chip.clock else at_peak(work)
        return known[id(work)]

    def cycles(work: Work) -> int:
        found = CYCLES.search(work.instruction.rest)
        # Asynchronous copies and scalars have no estimate; kernels count as they declare.
        return int(found[1]) if found else 0

    def at_peak(work: Work) -> float:
        if work.instruction.opcode.endswith(("-start", "custom-call")) and not CONTRACTED.search(work.instruction.rest):
            return 0.0
        products = sum(
            flops / chip.peak(dtype) for dtype, flops in _products(program, work.computation, work.instruction)
        )
        return max(products, bytes_moved(program, work.computation, work.instruction) * chip.devices / chip.bandwidth)

    return seconds


def _products(program: HloProgram, computation: Computation, each: Instruction) -> list[tuple[str, float]]:
    """Return the products of an instruction, fused products included: dtype of the operands and FLOPs."""
    found = [
        product
        for called in each.called
        for inner in program.computations[called].values()
        for product in _products(program, program.computations[called], inner)
    ]
    if contracted := CONTRACTED.search(each.rest):
        left = ARRAY.search(computation.get(each.operands[0], NOTHING).type)
        result = ARRAY.search(each.type)
        if left and result:
            sizes = _sizes(left[2])
            along = math.prod(sizes[int(axis)] for axis in re.findall(r"\d+", contracted[1]))
            found.append((DTYPES.get(left[1], left[1]), 2.0 * along * math.prod(_sizes(result[2]))))
    return found


def bytes_moved(program: HloProgram, computation: Computation, each: Instruction) -> int:
    """Return the bytes an instruction reads and writes. Of an array it slices or updates, only the slice counts."""
    if each.opcode in WRITES:
        return 2 * _size(computation, each.operands[WRITES[each.opcode]])
    if each.opcode != "fusion":
        result = bytes_of(each.type)
        return result + (result if each.opcode in SLICES else sum(_size(computation, name) for name in each.operands))
    inside = program.computations[each.called[0]]
    moved = 0
    for parameter in [inner for inner in inside.values() if inner.opcode == "parameter"]:
        users = [inner for inner in inside.values() if parameter.name in inner.operands]
        if users and all(user.opcode in SLICES for user in users):
            moved += sum(bytes_of(user.type) for user in users)
        elif not all(user.opcode in WRITES and user.operands[0] == parameter.name for user in users):
            moved += bytes_of(parameter.type)
    updates = [inner for inner in inside.values() if inner.opcode in WRITES]
    slices = sum(_size(inside, update.operands[WRITES[update.opcode]]) for update in updates)
    return moved + bytes_of(each.type) - sum(bytes_of(update.type) for update in updates) + slices


def _size(computation: Computation, name: str) -> int:
    return bytes_of(computation.get(name, NOTHING).type)


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.split(",") if size]
