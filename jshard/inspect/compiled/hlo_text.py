"""The text of a compiled program by structure: computations of instructions, `%name = type opcode(operands), attributes`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from jshard.inspect.compiled.collective import CompiledCollective
from jshard.inspect.compiled.replica_groups import members
from jshard.kernels.collectives import COLLECTIVES, Collective
from jshard.provenance import cause, op_name, split

KIND_OF = {collective.opcode: collective for collective in COLLECTIVES.values()}


COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
CALLED_MANY = re.compile(r"\bcalled_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
NO_RESULT = frozenset(
    "parameter constant get-tuple-element tuple bitcast broadcast iota partition-id after-all".split()
)
CHAIN = re.compile(r'frontend_attributes=\{[^}]*chain_id="(\d+)"')


class Program:
    def __init__(self, text: str):
        self.computations: dict[str, dict[str, str]] = {}
        self.entry = ""
        self.read: set[str] = set()
        inside: dict[str, str] = {}
        for line in text.splitlines():
            if found := COMPUTATION.match(line):
                inside = self.computations[found[2]] = {}
                self.entry = found[2] if found[1] else self.entry
            elif found := INSTRUCTION.match(line):
                inside[found[1]] = found[2]
        self.devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text[:5000]))

    def collectives(
        self, name: str, count: int, known: bool, around: str = "", is_async: bool = False
    ) -> Iterator[CompiledCollective]:
        """Of one computation and of those it calls. `around` is the metadata of the fusion that calls it."""
        self.read.add(name)
        chains: set[str] = set()  # the asynchronous fusions that have begun in this computation
        for instruction, written in self.computations[name].items():
            result, opcode, rest = _parts(written)
            kind = KIND_OF.get(opcode.removesuffix("-start"))
            if kind is not None:
                yield self._got(name, instruction, kind, result, opcode, rest, count, known, around, is_async)
            elif opcode == "while":
                trips = self._trips(name, rest)
                for called in _called(rest):
                    yield from self.collectives(called, count * (trips or 1), known and trips is not None)
            elif opcode == "fusion":
                for called in _called(rest):
                    if self._begins(called, chains):
                        chained = self._chain(called) is not None
                        yield from self.collectives(called, count, known, rest, is_async or chained)
            elif not opcode.endswith(("-done", "-update")):
                for called in _called(rest):
                    yield from self.collectives(called, count, known, rest, is_async or opcode.endswith("-start"))

    def _trips(self, name: str, rest: str) -> int | None:
        """How often a loop runs: XLA says so, or it counts one of its values from a constant up to a constant by one."""
        if said := TRIPS.search(rest):
            return int(said[1])
        called = dict(found for found in CALLED.findall(rest))
        condition, body = self.computations[called["condition"]], self.computations[called["body"]]
        compare = re.search(r" compare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT", list(condition.values())[-1])
        if compare is None:
            return None
        index = re.search(r" get-tuple-element\(.*\), index=(\d+)", condition.get(compare[1], ""))
        end = _constant(condition.get(compare[2], ""))
        if index is None or end is None:
            return None
        start = self._constant_of(self.computations[name], _operands(rest)[0], int(index[1]))
        step = self._step(body, int(index[1]))
        return None if start is None or not step else max(0, -(-(end - start) // step))

    def _constant_of(self, instructions: dict[str, str], holder: str, index: int) -> int | None:
        """The constant that is one element of a tuple, through copies."""
        _, opcode, rest = _parts(instructions.get(holder, "x unknown()"))
        if opcode != "tuple":
            return None
        element = _operands(rest)[index]
        while (found := _parts(instructions.get(element, "x unknown()")))[1] in ("copy", "bitcast"):
            element = _operands(found[2])[0]
        return _constant(instructions.get(element, ""))

    def _step(self, body: dict[str, str], index: int) -> int | None:
        """What one trip adds to an element of the loop's tuple."""
        _, opcode, rest = _parts(list(body.values())[-1])
        if opcode != "tuple":
            return None
        _, opcode, rest = _parts(body.get(_operands(rest)[index], "x unknown()"))
        if opcode != "add":
            return None
        steps = [_constant(body.get(operand, "")) for operand in _operands(rest)]
        return next((step for step in steps if step is not None), None)

    def results(self, name: str) -> Iterator[tuple[int, str, str]]:
        """The arrays that one computation and those it runs put into memory: bytes, `f32[8,4]`, name stack. What a
        fusion computes on its way stays in registers."""
        for written in self.computations[name].values():
            result, opcode, rest = _parts(written)
            if opcode in ("while", "call", "conditional"):
                for called in _called(rest):
                    yield from self.results(called)
            elif (
                opcode not in NO_RESULT and ARRAY.match(result) and "S(" not in result
            ):  # S(1): a fast memory of its own
                dtype, shape = ARRAY.findall(result)[0]
                yield _bytes(dtype, shape), f"{dtype}[{shape}]", op_name(rest)

    def check_all_read(self) -> None:
        """No collective may stand where nobody was seen to call it."""
        for name, instructions in self.computations.items():
            if name not in self.read and self._chain(name) is None:
                kinds = {_parts(written)[1].removesuffix("-start") for written in instructions.values()}
                assert not kinds & KIND_OF.keys(), (
                    f"jshard can't see who calls {name}, which holds {kinds & KIND_OF.keys()}"
                )

    def _chain(self, name: str) -> str | None:
        """The chain that a fusion is a piece of: a TPU runs one collective in pieces, inside the fusions that it hides
        behind, and every piece repeats the instruction."""
        return next((found[1] for text in self.computations[name].values() if (found := CHAIN.search(text))), None)

    def _begins(self, name: str, chains: set[str]) -> bool:
        """Whether a fusion is no later piece of a collective that has begun."""
        chain = self._chain(name)
        if chain is None:
            return True
        targets = [text for text in self.computations[name].values() if 'custom_call_target="AsyncCollective' in text]
        if any("AsyncCollectiveStart" in text for text in targets):
            chains.add(chain)
            return True
        begun = chain in chains
        if any("AsyncCollectiveDone" in text for text in targets):
            chains.discard(chain)
        else:
            chains.add(chain)
        return not begun

    def _got(
        self, name: str, instruction: str, kind: Collective, result: str, opcode: str, rest: str,
        count: int, known: bool, around: str, is_async: bool,
    ) -> CompiledCollective:  # fmt: skip
        joined = members(rest, self.devices)
        group = len(joined)
        arrays = _payload_arrays(result, opcode)
        is_start = opcode.endswith("-start")
        if kind.name == "all_reduce" and name.startswith("all-reduce-scatter"):
            kind = COLLECTIVES[
                "reduce_scatter"
            ]  # a TPU's, which it writes as an all-reduce and a slice of its own padding
            arrays, is_start = self._parameters(name), True
        grown = group if kind.name == "reduce_scatter" and not is_start else 1  # its result is one part
        names = self._names(name, instruction, rest, around, 1 if kind.name == "all_to_all" else len(arrays))
        return CompiledCollective(
            collective=kind.name,
            opcode=opcode,
            group=group,
            payloads=(
                (sum(size for _, size in arrays),)  # one array, in parts
                if kind.name == "all_to_all"
                else tuple(size * grown for _, size in arrays)
            ),
            dtypes=tuple(dtype for dtype, _ in arrays),
            count=count,
            count_known=known,
            causes=tuple(map(cause, names)),
            asynchronous=(is_async or opcode.endswith("-start")) and '"is_sync":true' not in rest,
            members=joined,
        )

    def _parameters(self, name: str) -> list[tuple[str, int]]:
        found = (text.partition(" parameter(")[0] for text in self.computations[name].values() if " parameter(" in text)
        return [(dtype, _bytes(dtype, shape)) for text in found for dtype, shape in ARRAY.findall(text)]

    def _names(self, name: str, instruction: str, rest: str, around: str, arrays: int) -> tuple[str, ...]:
        """The name stack of each array that a collective carries. Of a combined one XLA keeps one, or joins them, but
        those who take the results apart still carry theirs; of a rewritten one the fusion around it, or the
        computation that adds two numbers, may have what is left."""
        own = op_name(rest) or op_name(around)
        parts = split(own)
        if len(parts) == arrays:
            return parts
        taken: dict[int, str] = {}
        if arrays > 1:
            holders = {instruction}
            for other, text in self.computations[name].items():
                _, opcode, after = _parts(text)
                if opcode == "get-tuple-element" and _operands(after)[0] in holders and op_name(after):
                    index = re.search(r"\), index=(\d+)", after)
                    assert index, text
                    taken.setdefault(int(index[1]), op_name(after))
                elif opcode.endswith("-done") and _operands(after)[0] in holders:
                    holders.add(other)
        if not own and not taken:
            adds = re.search(r"\bto_apply=%?([\w.\-]+)", rest)
            inside = map(op_name, self.computations.get(adds[1], {}).values()) if adds else ()
            own = next((told for told in inside if "/" in told), "")
        return tuple(taken.get(number, own) for number in range(arrays))


def _parts(written: str) -> tuple[str, str, str]:
    """The type, the opcode and the rest of an instruction."""
    depth = 0
    for place, character in enumerate(written):
        depth += (character in "({[") - (character in ")}]")
        if depth == 0 and character == " ":
            opcode, _, rest = written[place + 1 :].partition("(")
            return written[:place], opcode, rest
    raise AssertionError(f"an instruction that jshard can't read: {written}")


def _operands(rest: str) -> list[str]:
    """The operands of an instruction, of which `rest` is what follows its opening bracket."""
    return re.findall(r"%([\w.\-]+)", rest.partition(")")[0])


def _constant(written: str) -> int | None:
    found = re.search(r" constant\((-?\d+)\)", written)
    return int(found[1]) if found else None


def _called(rest: str) -> list[str]:
    names = [found[1] for found in CALLED.findall(rest)]
    for found in (*BRANCHES.findall(rest), *CALLED_MANY.findall(rest)):
        names += [name.strip().lstrip("%") for name in found.split(",")]
    return names


def _payload_arrays(result: str, opcode: str) -> list[tuple[str, int]]:
    """The arrays (dtype, bytes) that a collective's price counts. A start's result holds operands and results."""
    if opcode in ("all-gather-start", "collective-permute-start", "collective-broadcast-start"):
        result = _elements(result)[1]
    elif opcode == "all-reduce-start" and result.startswith("(("):
        result = _elements(result)[1]
    elif opcode == "reduce-scatter-start":
        result = _elements(result)[0]
    return [(dtype, _bytes(dtype, shape)) for dtype, shape in ARRAY.findall(result)]


def _elements(result: str) -> list[str]:
    """The members of a tuple type."""
    members, depth, start = [], 0, 1
    for place, character in enumerate(result):
        depth += (character in "({[") - (character in ")}]")
        if (depth == 1 and character == ",") or depth == 0:
            members.append(result[start:place].strip())
            start = place + 1
    return members


def _bytes(dtype: str, shape: str) -> int:
    """Bytes of an array as a device holds it: `pred` and what is narrower than a byte take one."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    bits = int(digits[1]) if digits else 8
    return math.prod(int(size) for size in shape.split(",") if size) * max(1, bits // 8)
