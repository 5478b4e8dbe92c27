"""The text of a compiled program by structure: computations of instructions, `%name = type opcode(operands), attributes`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jshard.inspect.compiled.collective import CompiledCollective, itemsize
from jshard.kernels.collectives import COLLECTIVES
from jshard.programs.provenance import Cause, StackFrames, cause, op_name, operation, split

KIND_OF = {collective.opcode: collective for collective in COLLECTIVES.values()}

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
CALLED_MANY = re.compile(r"\bcalled_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
DEVICES = 100_000  # the step of a TPU's device numbers from slice to slice
NO_RESULT = frozenset(
    "parameter constant get-tuple-element tuple bitcast broadcast iota partition-id after-all".split()
)
BETWEEN_SLICES = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)".*_xla_megascale_transfer_type="(\w+)"')
CHAIN = re.compile(r'frontend_attributes=\{[^}]*chain_id="(\d+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation. `rest` is the text after the opening bracket: operands and attributes."""

    name: str
    type: str
    opcode: str
    rest: str

    @classmethod
    def of(cls, name: str, text: str) -> Instruction:
        """Read the text after `%name = `."""
        depth = 0
        for place, character in enumerate(text):
            depth += (character in "({[") - (character in ")}]")
            if depth == 0 and character == " ":
                opcode, _, rest = text[place + 1 :].partition("(")
                return cls(name, text[:place], opcode, rest)
        raise AssertionError(f"an instruction that jshard can't read: {text}")

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def constant(self) -> int | None:
        """The integer of a constant, else None."""
        found = re.match(r"(-?\d+)\)", self.rest)
        return int(found[1]) if found and self.opcode == "constant" else None

    @property
    def index(self) -> int | None:
        """The index of a get-tuple-element, else None."""
        found = re.search(r"\), index=(\d+)", self.rest)
        return int(found[1]) if found and self.opcode == "get-tuple-element" else None

    @property
    def between_slices(self) -> tuple[str, str] | None:
        """The rendezvous name and the collective of a send or recv between slices, else None."""
        found = BETWEEN_SLICES.search(self.rest) if self.opcode in ("send", "recv") else None
        return None if found is None else (found[1], {"ONE_TO_ONE": "permute"}.get(found[2], found[2].lower()))

    @property
    def called(self) -> list[str]:
        """The computations it runs."""
        names = [found[1] for found in CALLED.findall(self.rest)]
        for found in (*BRANCHES.findall(self.rest), *CALLED_MANY.findall(self.rest)):
            names += [name.strip().lstrip("%") for name in found.split(",")]
        return names


NOTHING = Instruction("", "", "unknown", "")
Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Site:
    """The context of a computation: its number of runs."""

    count: int = 1
    turns: int = 1  # runs on any device, while others wait
    before: int = 1  # runs of the loop around it
    count_known: bool = True
    around: str = ""  # attributes of the calling instruction
    is_async: bool = False


class HloProgram:
    """A compiled program, read from its text."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.frames = StackFrames(text)
        inside: Computation = {}
        for line in text.splitlines():
            if found := COMPUTATION.match(line):
                inside = self.computations[found[2]] = {}
                self.entry = found[2] if found[1] else self.entry
            elif found := INSTRUCTION.match(line):
                inside[found[1]] = Instruction.of(found[1], found[2])
        head = text.partition("\n")[0]
        # the devices of one slice
        self.devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head))

    def trips(self, name: str, loop: Instruction) -> int | None:
        """Return the trips of a loop: XLA's own count, or that of an index counted up to a constant; None if unknown."""
        if stated := TRIPS.search(loop.rest):
            return int(stated[1])
        called = dict(CALLED.findall(loop.rest))
        condition, body = self.computations[called["condition"]], self.computations[called["body"]]
        last = list(condition.values())[-1]
        if last.opcode != "compare" or "direction=LT" not in last.rest or len(last.operands) != 2:
            return None
        index, end = (condition.get(operand, NOTHING) for operand in last.operands)
        if index.index is None or end.constant is None:
            return None
        start = _element(self.computations[name], self.computations[name].get(loop.operands[0], NOTHING), index.index)
        add = _element(body, list(body.values())[-1], index.index)
        steps = [body[operand].constant for operand in add.operands if operand in body] if add.opcode == "add" else []
        step = next(filter(None, steps), None)
        return None if start.constant is None or not step else max(0, -(-(end.constant - start.constant) // step))

    def results(self, name: str) -> Iterator[tuple[int, str, str]]:
        """Yield the arrays a computation and its callees write to memory: bytes,
        `f32[8,4]`, name stack. Values inside a fusion stay in registers."""
        for each in self.computations[name].values():
            if each.opcode in ("while", "call", "conditional"):
                for called in each.called:
                    yield from self.results(called)
            elif each.opcode not in NO_RESULT and "S(" not in each.type:  # S(1): a fast memory of its own
                if found := ARRAY.match(each.type):
                    yield _bytes(found[1], found[2]), found[0], op_name(each.rest)

    def chain(self, name: str) -> str | None:
        """Return the chain of a fusion that is a piece of a collective, else None. A TPU runs a
        collective in pieces, inside the fusions that hide it, and every piece repeats the instruction."""
        rests = (each.rest for each in self.computations[name].values())
        return next((found[1] for rest in rests if (found := CHAIN.search(rest))), None)

    def collective(self, name: str, each: Instruction, site: Site) -> CompiledCollective:
        """Read the collective of an instruction."""
        kind, is_start = KIND_OF[each.opcode.removesuffix("-start")], each.opcode.endswith("-start")
        joined = members(each.rest, self.devices)
        arrays = _payload_arrays(each.type, each.opcode)
        if kind.name == "all_reduce" and name.startswith("all-reduce-scatter"):
            # A TPU writes a reduce-scatter as an all-reduce and a slice with padding; the operand is the full array.
            kind = COLLECTIVES["reduce_scatter"]
            arrays = _arrays(" ".join(e.type for e in self.computations[name].values() if e.opcode == "parameter"))
        elif kind.name == "reduce_scatter" and not is_start:  # its result is one shard
            arrays = [(dtype, size * len(joined)) for dtype, size in arrays]
        payloads = tuple(size for _, size in arrays)
        if kind.name == "all_to_all":  # its arrays are parts of one array
            payloads = (sum(payloads),)
        names = self._names(name, each, site.around, len(payloads))
        sources = self._sources(name, each, site.around, len(payloads))
        return CompiledCollective(
            collective=kind.name,
            opcode=each.opcode,
            group=len(joined),
            payloads=payloads,
            dtypes=tuple(dtype for dtype, _ in arrays),
            count=site.count,
            count_known=site.count_known,
            causes=tuple(
                dataclasses.replace(cause(own), source=source) for own, source in zip(names, sources, strict=True)
            ),
            operations=tuple(map(operation, names)),
            asynchronous=(site.is_async or is_start) and '"is_sync":true' not in each.rest,
            members=joined,
        )

    def across(self, send: Instruction, receive: Instruction, site: Site) -> CompiledCollective:
        """Read a transfer between slices. XLA keeps no name stack of it."""
        assert send.between_slices is not None
        _, kind = send.between_slices
        assert kind in COLLECTIVES, f"a transfer between slices that jshard does not know: {kind}"
        joined = slices(send.rest)
        whole = receive if COLLECTIVES[kind].payload == "result" else send
        ((dtype, size),) = _arrays(_elements(whole.type)[0])
        return CompiledCollective(
            collective=kind,
            opcode=send.opcode,
            group=len(joined),
            payloads=(size,),
            dtypes=(dtype,),
            count=site.count,
            count_known=site.count_known,
            causes=(Cause(),),
            operations=("",),
            asynchronous=True,
            members=tuple(each * self.devices for each in joined),
        )

    def _names(self, name: str, collective: Instruction, around: str, arrays: int) -> tuple[str, ...]:
        """Return the name stack of each array of a collective. XLA keeps a single stack of a combined
        collective, or joins them, but the readers of its results still have theirs. Of a rewritten
        collective the surrounding fusion, or the computation of its sum, may have the rest."""
        own = op_name(collective.rest) or op_name(around)
        parts = split(own)
        if len(parts) == arrays:
            return parts
        taken: dict[int, str] = {}
        if arrays > 1:
            holders = {collective.name}
            for each in self.computations[name].values():
                if each.index is not None and each.operands[0] in holders and op_name(each.rest):
                    taken.setdefault(each.index, op_name(each.rest))
                elif each.opcode.endswith("-done") and each.operands[0] in holders:
                    holders.add(each.name)
        if not own and not taken:
            adds = re.search(r"\bto_apply=%?([\w.\-]+)", collective.rest)
            inside = [op_name(each.rest) for each in self.computations.get(adds[1], {}).values()] if adds else []
            own = next((each for each in inside if "/" in each), "")
        return tuple(taken.get(number, own) for number in range(arrays))

    def _sources(self, name: str, collective: Instruction, around: str, arrays: int) -> tuple[str, ...]:
        """Return the program line of each array; of a combined collective, the line that makes each operand."""
        own = self.frames.source(collective.rest) or self.frames.source(around)
        makers = [self.computations[name].get(operand, NOTHING) for operand in collective.operands]
        if arrays == 1 or len(makers) != arrays:
            return (own,) * arrays
        return tuple(self.frames.source(maker.rest) or own for maker in makers)


def _element(computation: Computation, holder: Instruction, index: int) -> Instruction:
    """Return the instruction that makes an element of a tuple, through copies."""
    found = computation.get(holder.operands[index], NOTHING) if holder.opcode == "tuple" else NOTHING
    while found.opcode in ("copy", "bitcast"):
        found = computation.get(found.operands[0], NOTHING)
    return found


def _payload_arrays(result: str, opcode: str) -> list[tuple[str, int]]:
    """Return the arrays (dtype, bytes) in the price of a collective. A start's type holds operands and results."""
    has_two = ("all-gather-start", "collective-permute-start", "collective-broadcast-start")
    if opcode in has_two or (opcode == "all-reduce-start" and result.startswith("((")):
        result = _elements(result)[1]
    elif opcode == "reduce-scatter-start":
        result = _elements(result)[0]
    return _arrays(result)


def _arrays(type_: str) -> list[tuple[str, int]]:
    """Return the arrays (dtype, bytes) of a type."""
    return [(dtype, _bytes(dtype, shape)) for dtype, shape in ARRAY.findall(type_)]


def _elements(result: str) -> list[str]:
    """Return the members of a tuple type."""
    members, depth, start = [], 0, 1
    for place, character in enumerate(result):
        depth += (character in "({[") - (character in ")}]")
        if (depth == 1 and character == ",") or depth == 0:
            members.append(result[start:place].strip())
            start = place + 1
    return members


def bytes_of(type_: str) -> int:
    """Return the bytes of all arrays of a type."""
    return sum(size for _, size in _arrays(type_))


def _bytes(dtype: str, shape: str) -> int:
    return math.prod(int(size) for size in shape.split(",") if size) * itemsize(dtype)


# -- the devices of a collective --


def members(rest: str, devices: int) -> tuple[int, ...]:
    """Return the devices in the first group of a collective, for any spelling of `replica_groups`."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest):
        return _ring([(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return tuple(map(int, listed[1].split(",")))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return tuple(_numbered(iota[2], iota[3]).ravel()[: int(iota[1])].tolist())
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", rest):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", meshed[1])}
        order = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", meshed[2])
        numbers = _numbered(order[1], order[2]) if order else np.arange(math.prod(sizes.values()))
        named = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", meshed[3])
        return tuple(_along(numbers.reshape(tuple(sizes.values())), list(sizes), named).ravel().tolist())
    assert "replica_groups={}" in rest, f"a spelling of replica_groups that jshard does not know: {rest}"
    return tuple(range(devices))


def slices(rest: str) -> tuple[int, ...]:
    """Return the slices, from 0, in the first group of a transfer between slices. XLA lists
    devices, by numbers that begin with the slice's, or slices for the devices of each."""
    found = re.search(r'_xla_megascale_target="?\{((?:\{[^}]*\},?)+|[\d,]+)\}', rest)
    assert found, f"a target of a transfer between slices that jshard does not know: {rest}"
    if not found[1].startswith("{"):
        return tuple(int(number) - 1 for number in found[1].split(","))
    pairs = [(int(a) // DEVICES - 1, int(b) // DEVICES - 1) for a, b in re.findall(r"\{(\d+)->(\d+)\}", found[1])]
    return _ring(pairs) if pairs else tuple(int(n) // DEVICES - 1 for n in found[1][1:].split("}")[0].split(","))


def _numbered(shape: str, order: str | None) -> np.ndarray:
    """Return the devices in the order of `[2,4]T(1,0)`."""
    numbers = np.arange(math.prod(map(int, shape.split(",")))).reshape(tuple(map(int, shape.split(","))))
    return numbers.transpose(tuple(map(int, order.split(",")))) if order else numbers


def _along(devices: np.ndarray, axes: list[str], named: list[tuple[str, str, str]]) -> np.ndarray:
    """Return the devices of the first group over the named axes of a mesh. An axis is 'data', or a
    part of it: 'data':(1)2 is two of its devices, as far apart as the rest of the axis is long."""
    index: list[Any] = [slice(0, 1)] * devices.ndim
    for axis, before, part in named:
        size = devices.shape[axes.index(axis)]
        step = size // (int(before) * int(part)) if part else 1
        index[axes.index(axis)] = slice(0, step * int(part) if part else size, step)
    return devices[tuple(index)]


def _ring(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """Return the devices that send to each other, directly or not; of several separate rings, the first."""
    moving = [pair for pair in pairs if pair[0] != pair[1]]
    joined = set(moving[0]) if moving else {0}
    while more := {device for pair in moving if joined & set(pair) for device in pair} - joined:
        joined |= more
    return tuple(sorted(joined))
