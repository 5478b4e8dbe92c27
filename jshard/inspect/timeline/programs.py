"""The compiled programs that a capture holds: what each operation is, and under which signal it stands."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jshard.inspect.compiled.hlo_text import KIND_OF
from jshard.inspect.timeline.wire import Value, fields, inside, numbers, text, whole
from jshard.inspect.timeline.xplane import Plane
from jshard.provenance import Cause, causes, latest

AROUND = frozenset(("while", "call", "conditional"))  # they run others, whose events lie inside theirs


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction of a compiled program."""

    opcode: str = ""
    causes: tuple[Cause, ...] = ()  # several where XLA made one instruction of several
    within: str = ""  # the collective of a fusion, or of an asynchronous computation
    members: tuple[int, ...] = ()  # the devices of its first group, by their number in the mesh

    @property
    def collective(self) -> str:
        """The name of a collective, "all_reduce"; "" for what moves nothing between devices."""
        kind = KIND_OF.get(self.opcode.removesuffix("-start").removesuffix("-done"))
        return self.within if kind is None else kind.name

    @property
    def kind(self) -> str:
        return "collective" if self.collective else "around" if self.opcode in AROUND else "compute"

    @property
    def signal(self) -> str:
        """`decoder/attn`, `layer1 + layer2`, or "-" when it stands under none."""
        return " + ".join(dict.fromkeys(each.signal for each in self.causes if each.path)) or "-"

    @property
    def phase(self) -> str:
        return latest(each.phase for each in self.causes)


Operations = dict[str, Operation]


class Programs:
    """The operations of all programs of a capture, each found by the program and its own name."""

    def __init__(self, found: list[Plane]):
        self.by_number: dict[int, Operations] = {}
        self.by_name: dict[str, Operations] = {}
        for plane in found:
            if plane.name == "/host:metadata":
                for kind in plane.kinds.values():
                    proto = kind.stats.get("Hlo Proto") or kind.stats.get("hlo_proto")
                    if isinstance(proto, memoryview):
                        module = inside(dict(fields(proto)).get(1, memoryview(b"")))
                        name, operations = _module(module)
                        number = kind.stats.get("program_id", kind.identity)
                        self.by_name[name] = self.by_number[number if isinstance(number, int) else -1] = operations

    def operation(self, program: object, name: str, instruction: str) -> Operation | None:
        """By the program's number, or by its name where the capture does not number them."""
        known = self.by_number.get(program) if isinstance(program, int) else None
        return (self.by_name.get(name, {}) if known is None else known).get(instruction)


def _module(message: memoryview) -> tuple[str, Operations]:
    name = ""
    bodies: dict[int, list[memoryview]] = {}
    for number, value in fields(message):
        if number == 1:
            name = text(value)
        elif number == 3:
            identity, body = 0, []
            for inner, each in fields(inside(value)):
                if inner == 2:
                    body.append(inside(each))
                elif inner == 5:
                    identity = whole(each)
            bodies[identity] = body
    operations: Operations = {}
    callers: list[tuple[str, list[int]]] = []
    collectives: dict[int, str] = {}  # of each computation
    for identity, body in bodies.items():
        for message in body:
            instruction, operation, called = _instruction(message)
            operations[instruction] = operation
            if operation.collective:
                collectives[identity] = operation.collective
            if called and (operation.opcode == "fusion" or operation.opcode.startswith("async-")):
                callers.append((instruction, called))
    for instruction, called in callers:
        within = next((collectives[each] for each in called if each in collectives), "")
        if within:
            operations[instruction] = dataclasses.replace(operations[instruction], within=within)
    return name, operations


def _instruction(message: memoryview) -> tuple[str, Operation, list[int]]:
    name = opcode = stack = ""
    called: list[int] = []
    members: tuple[int, ...] = ()
    for number, value in fields(message):
        if number == 1:
            name = text(value)
        elif number == 2:
            opcode = text(value)
        elif number == 7:
            stack = text(dict(fields(inside(value))).get(2, memoryview(b"")))
        elif number == 38:
            called += numbers(value)
        elif number in (LISTED, MESHED):
            members = _listed(inside(value)) if number == LISTED else _along(inside(value))
    return name, Operation(opcode, causes(stack), members=members), called


# -- the devices of a collective's first group; () for the spellings that XLA has for other hardware --

LISTED, MESHED = 87, 93  # fields of an instruction: groups one by one, or the axes of a mesh that they lie along


def _listed(message: memoryview) -> tuple[int, ...]:
    first = next((inside(value) for number, value in fields(message) if number == 1), memoryview(b""))
    return tuple(each for number, value in fields(first) if number == 1 for each in numbers(value))


def _along(message: memoryview) -> tuple[int, ...]:
    found: dict[int, list[dict[int, Value]]] = {1: [], 2: []}
    for number, value in fields(message):
        parts = fields(inside(value))
        if number == 1:  # the mesh: its axes, each a name and a size
            found[1] += [dict(fields(inside(axis))) for _, axis in parts]
        elif number == 2:
            found[2].append(dict(parts))
    if any(each.keys() - {1} for each in found[2]) or any(2 not in each for each in found[1]):
        return ()  # a part of an axis, or devices in an order of their own
    sizes = [whole(axis[2]) for axis in found[1]]
    axes = {whole(each.get(1, 0)) for each in found[2]}
    places = np.arange(math.prod(sizes)).reshape(sizes)[
        tuple(slice(None) if n in axes else 0 for n in range(len(sizes)))
    ]
    return tuple(places.ravel().tolist())
