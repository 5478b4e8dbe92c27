"""The content of an `xplane.pb` of JAX's profiler: its events and its compiled programs. A file has planes
of lines of events; an event has a name, two times and its stats. The numbers of the fields are from XLA's
profiler/protobuf/xplane.proto. JAX reads the file too, but gives no access to the compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np

from jshard.inspect.compiled.hlo_text import KIND_OF
from jshard.programs.protobuf import Message
from jshard.programs.provenance import Cause, causes, latest

Stats = dict[str, int | str | memoryview]
PICO = 1000  # picoseconds of a nanosecond
AROUND = frozenset(("while", "call", "conditional"))  # the events of their contents lie inside theirs


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """An event: times in picoseconds of the capture's own clock."""

    name: str
    start: int
    duration: int
    stats: Stats

    @property
    def end(self) -> int:
        return self.start + self.duration


class Plane:
    """A device, the host, or the whole capture. `kinds` are the name and the common stats of each kind of event."""

    def __init__(self, plane: Message):
        self.name = plane.text(2)
        self._lines = plane.contents(3)
        words = [entry.message(2) for entry in plane.messages(5)]
        self._words = {word.number(1): word.text(2) for word in words}
        kinds = [entry.message(2) for entry in plane.messages(4)]
        self.kinds = {kind.number(1): (kind.text(4) or kind.text(2), self._stats(kind, 5)) for kind in kinds}
        self.stats = self._stats(plane, 6)

    def lines(self) -> Iterator[tuple[str, list[Mark]]]:
        """Yield the name of each line, a thread or a stream, and its events."""
        for line in map(Message, self._lines):
            begin, events = line.number(3) * PICO, map(Message, line.contents(4))
            yield line.text(11) or line.text(2), [self._mark(event, begin) for event in events]

    def _mark(self, event: Message, begin: int) -> Mark:
        name, common = self.kinds.get(event.number(1), ("", {}))
        stats = {**common, **self._stats(event, 4)}
        return Mark(name, begin + event.number(2), event.number(3), stats)

    def _stats(self, message: Message, field: int) -> Stats:
        return dict(self._stat(stat) for stat in message.messages(field))

    def _stat(self, stat: Message) -> tuple[str, int | str | memoryview]:
        value: int | str | memoryview = ""
        for field, values in stat.items():
            if field == 5:
                value = stat.text(5)
            elif field == 7:  # a shared text
                value = self._words.get(stat.number(7), "")
            elif field != 1:
                value = values[-1]
        return self._words.get(stat.number(1), ""), value


def planes(file: Path) -> list[Plane]:
    return [Plane(plane) for plane in Message(file.read_bytes()).messages(1)]


# -- the compiled programs --


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction of a compiled program. Its events share it, so its properties are computed once."""

    opcode: str = ""
    causes: tuple[Cause, ...] = ()  # several where XLA merged instructions
    within: str = ""  # the collective of a fusion, or of an asynchronous computation
    members: tuple[int, ...] = ()  # the devices of its first group, by their number in the mesh

    @functools.cached_property
    def collective(self) -> str:
        """The name of a collective, "all_reduce"; "" for an operation without traffic."""
        kind = KIND_OF.get(self.opcode.removesuffix("-start").removesuffix("-done"))
        return self.within if kind is None else kind.name

    @functools.cached_property
    def kind(self) -> str:
        """`collective`, `compute`, or `around` for a loop or a call with operations inside."""
        return "collective" if self.collective else "around" if self.opcode in AROUND else "compute"

    @functools.cached_property
    def signal(self) -> str:
        """The signal: `decoder/attn`, `layer1 + layer2`, or "-" outside every signal."""
        return " + ".join(dict.fromkeys(each.signal for each in self.causes if each.path)) or "-"

    @functools.cached_property
    def phase(self) -> str:
        return latest(each.phase for each in self.causes)


class Operations(dict[str, Operation]):
    """The operations of a program, by name."""

    @functools.cached_property
    def by_kernel(self) -> dict[str, str]:
        """The names of operations by the names of their kernels on a GPU, with `_` in place of dots."""
        return {re.sub(r"\W", "_", each): each for each in self}


class Programs:
    """The programs of a capture, by name and number."""

    def __init__(self, found: list[Plane]):
        self.by_number: dict[object, Operations] = {}
        self.by_name: dict[str, list[Operations]] = {}
        for plane in found:
            if plane.name == "/host:metadata":
                for identity, (_, stats) in plane.kinds.items():
                    proto = stats.get("Hlo Proto") or stats.get("hlo_proto")
                    if isinstance(proto, memoryview):
                        module, number = Message(proto).message(1), stats.get("program_id", identity)
                        self.by_number[number] = operations = _operations(module)
                        self.by_name.setdefault(module.text(1), []).append(operations)

    def that_ran(self, number: object, name: str, instructions: Set[str]) -> Found:
        """Return the program of a run, by its number, its name and the instructions seen in it. A program from
        JAX's compilation cache has a wrong number, maybe another program's; several functions may share a name."""
        named, numbered = self.by_name.get(name, []), self.by_number.get(number)
        if numbered is not None and (not named or any(each is numbered for each in named)):
            named = [numbered, *(each for each in named if each is not numbered)]
        known = [len(instructions & each.keys()) for each in named]
        likely = [each for each, count in zip(named, known, strict=True) if count == max(known)]
        return Found(likely[:1] if likely and likely[0] is numbered else likely)


class Found(list[Operations]):
    """The program of a run; several if nothing tells them apart."""

    def operation(self, instruction: str, kernel: str = "") -> tuple[str, Operation | None]:
        """Return an operation and its name; from several programs only if they agree on it. Kernels in
        a CUDA graph of a GPU name the graph as their instruction, but keep their own kernel names."""
        if kernel and not any(instruction in each for each in self):
            instruction = next((each.by_kernel[kernel] for each in self if kernel in each.by_kernel), instruction)
        said = [each.get(instruction) for each in self]
        return instruction, said[0] if said and all(each == said[0] for each in said) else None


def _operations(module: Message) -> Operations:
    operations = Operations()
    callers: list[tuple[str, list[int]]] = []
    collectives: dict[int, str] = {}  # of each computation
    for computation in module.messages(3):
        for instruction in computation.messages(2):
            name, operation = instruction.text(1), _operation(instruction)
            operations[name] = operation
            if operation.collective:
                collectives[computation.number(5)] = operation.collective
            if operation.opcode == "fusion" or operation.opcode.startswith("async-"):
                callers.append((name, instruction.numbers(38)))
    for name, called in callers:
        within = next((collectives[each] for each in called if each in collectives), "")
        operations[name] = dataclasses.replace(operations[name], within=within)
    return operations


def _operation(instruction: Message) -> Operation:
    listed, along = instruction.message(87), instruction.message(93)  # groups in a list, or along mesh axes
    members = _along(along) if along else tuple(listed.message(1).numbers(1))
    return Operation(instruction.text(2), causes(instruction.message(7).text(2)), members=members)


def _along(groups: Message) -> tuple[int, ...]:
    """Return the devices of the first group; () for XLA's spellings on other hardware."""
    mesh, along = groups.message(1), groups.messages(2)
    if mesh.keys() - {1} or any(each.keys() - {1} for each in along):
        return ()  # devices in a custom order, or a part of an axis
    sizes = [axis.number(2) for axis in mesh.messages(1)]
    axes = {each.number(1) for each in along}
    places = np.arange(math.prod(sizes)).reshape(sizes)
    return tuple(places[tuple(slice(None) if n in axes else 0 for n in range(len(sizes)))].ravel().tolist())
