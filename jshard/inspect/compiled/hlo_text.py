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
DEVICES = 100_000  # by which a TPU's device numbers differ from one slice to the next
NO_RESULT = frozenset(
    "parameter constant get-tuple-element tuple bitcast broadcast iota partition-id after-all".split()
)
BETWEEN_SLICES = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)".*_xla_megascale_transfer_type="(\w+)"')
CHAIN = re.compile(r'frontend_attributes=\{[^}]*chain_id="(\d+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `rest` is what follows the opening bracket: operands and attributes."""

    name: str
    type: str
    opcode: str
    rest: str

    @classmethod
    def of(cls, name: str, text: str) -> Instruction:
        """Read what stands behind `%name = `."""
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
        """The whole number that it is."""
        found = re.match(r"(-?\d+)\)", self.rest)
        return int(found[1]) if found and self.opcode == "constant" else None

    @property
    def index(self) -> int | None:
        """Which element of a tuple it takes."""
        found = re.search(r"\), index=(\d+)", self.rest)
        return int(found[1]) if found and self.opcode == "get-tuple-element" else None

    @property
    def between_slices(self) -> tuple[str, str] | None:
        """Of a send to other slices, or of what comes from there: the name that both have, and the collective."""
        found = BETWEEN_SLICES.search(self.rest) if self.opcode in ("send", "recv") else None
        return None if found is None else (found[1], {"ONE_TO_ONE": "permute"}.get(found[2], found[2].lower()))

    @property
    def called(self) -> list[str]:
        """The computations that it runs."""
        names = [found[1] for found in CALLED.findall(self.rest)]
        for found in (*BRANCHES.findall(self.rest), *CALLED_MANY.findall(self.rest)):
            names += [name.strip().lstrip("%") for name in found.split(",")]
        return names


NOTHING = Instruction("", "", "unknown", "")
Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Site:
    """How a computation is run."""

    count: int = 1
    turns: int = 1  # how often any device runs it, while others wait
    before: int = 1  # how often the loop runs that it is in
    count_known: bool = True
    around: str = ""  # attributes of the instruction that calls it
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
        head = text.partition("\n")[0]  # long, where it lays out many arguments
        # Of one slice, where there are several.
        self.devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head))

    def trips(self, name: str, loop: Instruction) -> int | None:
        """How often a loop runs: XLA says so, or it counts one of its values from a constant up to a constant by one."""
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
        """The arrays that one computation and those it runs put into memory: bytes, `f32[8,4]`, name stack. What a
        fusion computes on its way stays in registers."""
        for each in self.computations[name].values():
            if each.opcode in ("while", "call", "conditional"):
                for called in each.called:
                    yield from self.results(called)
            elif each.opcode not in NO_RESULT and "S(" not in each.type:  # S(1): a fast memory of its own
                if found := ARRAY.match(each.type):
                    yield _bytes(found[1], found[2]), found[0], op_name(each.rest)

    def chain(self, name: str) -> str | None:
        """The chain that a fusion is a piece of: a TPU runs one collective in pieces, inside the fusions that it hides
        behind, and every piece repeats the instruction."""
        rests = (each.rest for each in self.computations[name].values())
        return next((found[1] for rest in rests if (found := CHAIN.search(rest))), None)

    def collective(self, name: str, each: Instruction, site: Site) -> CompiledCollective:
        """Read the collective that an instruction of a computation is."""
        kind, is_start = KIND_OF[each.opcode.removesuffix("-start")], each.opcode.endswith("-start")
        joined = members(each.rest, self.devices)
        arrays = _payload_arrays(each.type, each.opcode)
        if kind.name == "all_reduce" and name.startswith("all-reduce-scatter"):
            # a TPU's, which it writes as an all-reduce and a slice of its own padding: what goes in is the full array
            kind = COLLECTIVES["reduce_scatter"]
            arrays = _arrays(" ".join(e.type for e in self.computations[name].values() if e.opcode == "parameter"))
        elif kind.name == "reduce_scatter" and not is_start:  # its result is one part
            arrays = [(dtype, size * len(joined)) for dtype, size in arrays]
        payloads = tuple(size for _, size in arrays)
        if kind.name == "all_to_all":  # one array, in parts
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
        """Read a transfer between slices, of which XLA keeps no name stack."""
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
        """The name stack of each array that a collective carries. Of a combined one XLA keeps one, or joins them, but
        those who take the results apart still carry theirs; of a rewritten one the fusion around it, or the
        computation that adds two numbers, may have what is left."""
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
        """The line of the program behind each array: of a combined collective, behind what makes each of its operands."""
        own = self.frames.source(collective.rest) or self.frames.source(around)
        makers = [self.computations[name].get(operand, NOTHING) for operand in collective.operands]
        if arrays == 1 or len(makers) != arrays:
            return (own,) * arrays
        return tuple(self.frames.source(maker.rest) or own for maker in makers)


def _element(computation: Computation, holder: Instruction, index: int) -> Instruction:
    """Find the instruction that makes one element of a tuple, through copies."""
    found = computation.get(holder.operands[index], NOTHING) if holder.opcode == "tuple" else NOTHING
    while found.opcode in ("copy", "bitcast"):
        found = computation.get(found.operands[0], NOTHING)
    return found


def _payload_arrays(result: str, opcode: str) -> list[tuple[str, int]]:
    """The arrays (dtype, bytes) that a collective's price counts. A start's result holds operands and results."""
    if opcode in ("all-gather-start", "collective-permute-start", "collective-broadcast-start"):
        result = _elements(result)[1]
    elif opcode == "all-reduce-start" and result.startswith("(("):
        result = _elements(result)[1]
    elif opcode == "reduce-scatter-start":
        result = _elements(result)[0]
    return _arrays(result)


def _arrays(type_: str) -> list[tuple[str, int]]:
    """The arrays (dtype, bytes) of a type."""
    return [(dtype, _bytes(dtype, shape)) for dtype, shape in ARRAY.findall(type_)]


def _elements(result: str) -> list[str]:
    """The members of a tuple type."""
    members, depth, start = [], 0, 1
    for place, character in enumerate(result):
        depth += (character in "({[") - (character in ")}]")
        if (depth == 1 and character == ",") or depth == 0:
            members.append(result[start:place].strip())
            start = place + 1
    return members


def bytes_of(type_: str) -> int:
    """The bytes of all arrays of a type."""
    return sum(size for _, size in _arrays(type_))


def _bytes(dtype: str, shape: str) -> int:
    return math.prod(int(size) for size in shape.split(",") if size) * itemsize(dtype)


# -- the devices that a collective joins --


def members(rest: str, devices: int) -> tuple[int, ...]:
    """The devices that a collective joins in its first group, from any of the spellings of `replica_groups`."""
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
    """The slices, from 0, that a transfer between slices joins in its first group: of devices by their number, which begins
    with that of the slice, or of slices for devices of each."""
    found = re.search(r'_xla_megascale_target="?\{((?:\{[^}]*\},?)+|[\d,]+)\}', rest)
    assert found, f"a target of a transfer between slices that jshard does not know: {rest}"
    if not found[1].startswith("{"):
        return tuple(int(number) - 1 for number in found[1].split(","))
    pairs = [(int(a) // DEVICES - 1, int(b) // DEVICES - 1) for a, b in re.findall(r"\{(\d+)->(\d+)\}", found[1])]
    return _ring(pairs) if pairs else tuple(int(n) // DEVICES - 1 for n in found[1][1:].split("}")[0].split(","))


def _numbered(shape: str, order: str | None) -> np.ndarray:
    """Devices as `[2,4]T(1,0)` numbers them."""
    numbers = np.arange(math.prod(map(int, shape.split(",")))).reshape(tuple(map(int, shape.split(","))))
    return numbers.transpose(tuple(map(int, order.split(",")))) if order else numbers


def _along(devices: np.ndarray, axes: list[str], named: list[tuple[str, str, str]]) -> np.ndarray:
    """The devices of the first group over the named axes of a mesh: 'data', or a part of it: 'data':(1)2, two of its
    devices that lie as far apart as the devices of what follows in it."""
    index: list[Any] = [slice(0, 1)] * devices.ndim
    for axis, before, part in named:
        size = devices.shape[axes.index(axis)]
        step = size // (int(before) * int(part)) if part else 1
        index[axes.index(axis)] = slice(0, step * int(part) if part else size, step)
    return devices[tuple(index)]


def _ring(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """The devices that send to each other, directly or not: of several separate rings, those of the first."""
    moving = [pair for pair in pairs if pair[0] != pair[1]]
    joined = set(moving[0]) if moving else {0}
    while more := {device for pair in moving if joined & set(pair) for device in pair} - joined:
        joined |= more
    return tuple(sorted(joined))
