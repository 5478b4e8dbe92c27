"""The compiled programs that a capture holds: what each operation is, and under which signal it stands."""

from __future__ import annotations

import dataclasses
import functools

from jshard.inspect.compiled.hlo_text import KIND_OF, apart
from jshard.inspect.plan.match import path_of
from jshard.inspect.timeline.wire import fields, inside, numbers, text, whole
from jshard.inspect.timeline.xplane import Plane
from jshard.signals.scope import UPDATE

AROUND = frozenset(("while", "call", "conditional"))  # they run others, whose events lie inside theirs


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One instruction of a compiled program. `stack` is the name stack that it was written under."""

    opcode: str = ""
    stack: str = ""
    within: str = ""  # the collective of a fusion, or of an asynchronous computation

    @property
    def collective(self) -> str:
        """The name of a collective, "all_reduce"; "" for what moves nothing between devices."""
        kind = KIND_OF.get(self.opcode.removesuffix("-start").removesuffix("-done"))
        return self.within if kind is None else kind.name

    @property
    def kind(self) -> str:
        return "collective" if self.collective else "around" if self.opcode in AROUND else "compute"

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """The nesting of signals around it; several where XLA made one of several."""
        return _paths(self.stack)

    @property
    def signal(self) -> str:
        """`decoder/attn`, `layer1 + layer2`, or "-" when it stands under none."""
        return " + ".join("/".join(path) for path in self.paths) or "-"

    @property
    def phase(self) -> str:
        if UPDATE in self.stack:
            return "update"
        return "backward" if path_of(self.stack)[1] else "forward"


@functools.cache
def _paths(stack: str) -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(path for each in apart(stack) if (path := path_of(each)[0])))


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
    for number, value in fields(message):
        if number == 1:
            name = text(value)
        elif number == 2:
            opcode = text(value)
        elif number == 7:
            stack = text(dict(fields(inside(value))).get(2, memoryview(b"")))
        elif number == 38:
            called += numbers(value)
    return name, Operation(opcode, stack), called
