"""The schedule of a compiled program: its work in order of time, and the starts and ends of its collectives."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jshard.inspect.compiled.collective import CompiledCollective
from jshard.inspect.compiled.hlo_text import KIND_OF, Computation, HloProgram, Instruction, Site
from jshard.programs.provenance import op_name, taken

FREE = frozenset("parameter constant get-tuple-element tuple bitcast partition-id replica-id after-all".split())


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """An instruction on the device's own time, and the computation with its operands."""

    instruction: Instruction
    computation: Computation


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """The start of a collective. `name` is also that of its `Done`; a synchronous collective is waited for at once."""

    name: str
    collective: CompiledCollective


@dataclasses.dataclass(frozen=True, eq=False)
class Done:
    """The point where the device waits for a collective. For copies and other transfers it means nothing."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    trips: int  # 1 if unknown
    body: tuple[Event, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Branches:
    """Branches of a conditional: this device takes them in the share `own` of a loop's turns, any device in `shared`."""

    branches: tuple[tuple[Event, ...], ...]
    own: float = 1.0
    shared: float = 1.0


Event = Work | Start | Done | Loop | Branches


def collectives_in(compiled: Any) -> list[CompiledCollective]:
    """Return the collectives of a compiled program, or of its text, in the order of the
    text's calls. Loops count by their trips, and every branch of a conditional counts."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    return list(collectives_of(schedule_of(HloProgram(text))))


def wire_bytes(compiled: object) -> int:
    """Return the bytes on the wire per device, in a run of a compiled program (or of its text)."""
    return sum(got.total for got in collectives_in(compiled))


def schedule_of(program: HloProgram) -> tuple[Event, ...]:
    """Read the schedule. A collective in a computation without a known caller is an assertion."""
    reader = _ScheduleReader(program)
    events = tuple(reader.events(program.entry, Site()))
    for name, instructions in program.computations.items():
        if name not in reader.read and program.chain(name) is None:
            kinds = {each.opcode.removesuffix("-start") for each in instructions.values()} & KIND_OF.keys()
            assert not kinds, f"jshard can't see who calls {name}, which holds {kinds}"
    return events


def collectives_of(events: Iterable[Event]) -> Iterator[CompiledCollective]:
    """Yield every collective of a schedule once, whatever its count."""
    for event in events:
        match event:
            case Start():
                yield event.collective
            case Loop():
                yield from collectives_of(event.body)
            case Branches():
                for branch in event.branches:
                    yield from collectives_of(branch)


class _ScheduleReader:
    def __init__(self, program: HloProgram):
        self.program = program
        self.read: set[str] = set()
        self.chains: set[str] = set()  # chains of asynchronous fusions that have started, maybe outside the loop
        self.updates: dict[str, str] = {}  # the name of a start, by another name its `Done` waits for

    def events(self, name: str, site: Site) -> Iterator[Event]:
        """Yield the schedule of a computation, its callees' included."""
        self.read.add(name)
        computation = self.program.computations[name]
        for each in computation.values():
            if each.opcode.removesuffix("-start") in KIND_OF:
                collective = self.program.collective(name, each, site)
                yield Start(each.name, collective)
                if not collective.asynchronous:
                    yield Done(each.name)
            elif (between := each.between_slices) is not None:  # a send and its recv have one name
                rendezvous, _ = between
                if each.opcode == "send":
                    receives = (i for i in computation.values() if i.opcode == "recv" and i.between_slices == between)
                    yield Start(rendezvous, self.program.across(each, next(receives), site))
                else:
                    self.updates[each.name] = rendezvous
            elif each.opcode.endswith("-update"):
                self.updates[each.name] = self.updates.get(each.operands[0], each.operands[0])
            elif each.opcode.endswith("-done"):
                yield Done(self.updates.get(each.operands[0], each.operands[0]))
            elif each.opcode == "while":
                trips = self.program.trips(name, each)
                known = site.count_known and trips is not None
                inside = Site(site.count * (trips or 1), site.turns * (trips or 1), site.count, known)
                yield Loop(trips or 1, tuple(event for called in each.called for event in self.events(called, inside)))
            elif each.opcode == "fusion" and (chain := self.program.chain(each.called[0])) is not None:
                yield from self._piece(each, computation, chain, site)
            elif each.opcode in ("call", "conditional"):
                inside = dataclasses.replace(site, around=each.rest)
                if each.opcode == "conditional" and (often := taken(op_name(each.rest))) is not None:
                    count, turns = (int(site.before * each) for each in often)
                    inside = dataclasses.replace(inside, count=count, turns=turns)
                branches = tuple(tuple(self.events(called, inside)) for called in each.called)
                shares = inside.count / site.count, inside.turns / site.turns
                yield from branches[0] if each.opcode == "call" else (Branches(branches, *shares),)
            elif each.opcode not in FREE:
                yield Work(each, computation)
                yield from self._inside(each, site)

    def _inside(self, each: Instruction, site: Site) -> Iterator[Event]:
        """Yield the collectives inside an instruction. They start with it, and end with it or with its done."""
        is_start = each.opcode.endswith("-start")
        inside = dataclasses.replace(site, around=each.rest, is_async=site.is_async or is_start)
        for called in each.called:
            for collective in collectives_of(self.events(called, inside)):
                yield Start(each.name, collective)
        if not is_start:
            yield Done(each.name)

    def _piece(self, each: Instruction, computation: Computation, chain: str, site: Site) -> Iterator[Event]:
        """Yield the work of a fusion with a piece of a TPU's collective inside. The
        pieces of a chain are one collective, though each repeats the instruction."""
        (called,) = each.called
        rests = " ".join(inner.rest for inner in self.program.computations[called].values())
        targets = re.findall(r'custom_call_target="AsyncCollective(Start|Done)', rests)
        if "Start" in targets or chain not in self.chains:
            self.chains.add(chain)
            inside = dataclasses.replace(site, around=each.rest, is_async=True)
            for collective in collectives_of(self.events(called, inside)):
                yield Start(f"chain {chain}", collective)
        yield Work(each, computation)
        if "Done" in targets:
            yield Done(f"chain {chain}")
