"""How long a device works at an instruction of a compiled program: XLA's own estimate for a TPU, peak figures elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from jshard.hardware.chips import Chip
from jshard.inspect.compiled.hlo_text import ARRAY, NOTHING, Computation, HloProgram, Instruction, bytes_of
from jshard.inspect.compiled.schedule import Work
from jshard.inspect.plan.comparison import DTYPES

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')  # of a dot, of a call of cuBLAS
SLICES = ("dynamic-slice", "slice", "gather")
WRITES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written into the first, in its place


def seconds_by(program: HloProgram, chip: Chip) -> Callable[[Work], float]:
    """Say of each piece of work how many seconds it takes on `chip`."""
    known: dict[int, float] = {}

    def seconds(work: Work) -> float:
        if id(work) not in known:
            known[id(work)] = cycles(work) / chip.clock if chip.clock else at_peak(work)
        return known[id(work)]

    def cycles(work: Work) -> int:
        found = CYCLES.search(work.instruction.rest)
        return (
            int(found[1]) if found else 0
        )  # copies that run beside, scalars; kernels are counted by what they declare

    def at_peak(work: Work) -> float:
        if work.instruction.opcode.endswith(("-start", "custom-call")) and not CONTRACTED.search(work.instruction.rest):
            return 0.0
        products = sum(
            flops / chip.peak(dtype) for dtype, flops in _products(program, work.computation, work.instruction)
        )
        return max(products, bytes_moved(program, work.computation, work.instruction) * chip.devices / chip.bandwidth)

    return seconds


def _products(program: HloProgram, computation: Computation, each: Instruction) -> list[tuple[str, float]]:
    """The products that an instruction does, itself or in what it fuses: dtype of the operands and FLOPs."""
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
    """The bytes that an instruction reads and writes: of an array that it only slices, or writes a slice of, the slice."""
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
