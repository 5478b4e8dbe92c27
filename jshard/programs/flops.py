"""Floating-point operations of each device in products, counted in the jaxpr."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import AxisType
from jax.typing import DTypeLike

from jshard.programs.jaxprs import Jaxpr, inner, level, pruned
from jshard.programs.provenance import Cause, often, said


@dataclasses.dataclass
class Flops:
    """The FLOPs of a device, by dtype of the operands. `at_most` is True if some layout is unknown and
    counted as replicated. `unknown` is True for products in a loop with an unknown number of trips."""

    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    in_kernels: dict[str, float] = dataclasses.field(default_factory=dict)  # the part declared by kernels
    at_most: bool = False
    unknown: bool = False
    remat: bool = True  # count recomputation of jax.checkpoint
    stage: int = 0  # the counted stage of a pipeline
    stages: int = 1  # the number of stages with different programs

    @property
    def total(self) -> float:
        return sum(self.flops.values())

    def add(self, dtype: DTypeLike, flops: float, *, in_kernel: bool = False) -> None:
        for sums in (self.flops, self.in_kernels) if in_kernel else (self.flops,):
            if flops:
                sums[str(dtype)] = sums.get(str(dtype), 0.0) + flops


def arithmetic_of(jaxpr: Jaxpr, *, remat: bool = True) -> Flops:
    """Count the FLOPs of products and convolutions, and FLOPs declared by kernels. Recomputation by
    `jax.checkpoint` counts only with `remat`. Of a pipeline's stages, the largest count is returned."""
    live = pruned(jaxpr).jaxpr  # a derivative may hold products that nothing reads

    def counted(stage: int) -> Flops:
        found = Flops(remat=remat, stage=stage)
        _walk(live, 1, found, manual=False)
        return found

    first = counted(0)
    return max((first, *map(counted, range(1, first.stages))), key=lambda each: each.total)


def _walk(jaxpr: Any, times: int, found: Flops, *, manual: bool, before: int = 1) -> None:
    """Count the equations of a jaxpr that runs `times` times, in a loop that runs `before` times."""
    for eqn in level(jaxpr):
        name, stack = eqn.primitive.name, eqn.source_info.name_stack
        if not found.remat and ("rematted_computation" in str(stack) or Cause().inside(stack.stack).remat):
            continue
        if name == "dot_general":
            (left, _), _ = eqn.params["dimension_numbers"]
            contracted = math.prod(_shape(eqn.invars[0].aval, found, manual)[axis] for axis in left)
            result = math.prod(_shape(eqn.outvars[0].aval, found, manual))
            found.add(eqn.invars[0].aval.dtype, 2.0 * times * contracted * result)
        elif name == "conv_general_dilated":
            kernel = _shape(eqn.invars[1].aval, found, manual)
            outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            result = math.prod(_shape(eqn.outvars[0].aval, found, manual))
            found.add(eqn.invars[0].aval.dtype, 2.0 * times * result * math.prod(kernel) / outputs)
        elif name == "pallas_call":
            estimate = eqn.params.get("cost_estimate")
            largest = max((operand.aval for operand in eqn.invars), key=lambda aval: aval.size, default=None)
            if estimate and largest is not None:
                found.add(largest.dtype, float(times * estimate.flops), in_kernel=True)
        elif name == "multiplied":  # beside a GPU kernel, with its count
            found.add(eqn.invars[0].aval.dtype, float(times * eqn.params["flops"]), in_kernel=True)
        elif name == "scan":
            _walk(eqn.params["jaxpr"], times * eqn.params["length"], found, manual=manual, before=times)
        elif name == "while":
            found.unknown = True
            _walk(eqn.params["body_jaxpr"], times, found, manual=manual)
        elif name == "cond":
            branches = [Flops(remat=found.remat, stage=found.stage) for _ in eqn.params["branches"]]
            counts = often(said(stack.stack, "times"))
            count = int(before * counts[found.stage if len(counts) > 1 else 0]) if counts else times
            for each, branch in zip(branches, eqn.params["branches"], strict=True):
                _walk(branch, count, each, manual=manual, before=before)
            longest = max(branches, key=lambda each: each.total)
            for dtype, flops in longest.flops.items():
                found.add(dtype, flops - longest.in_kernels.get(dtype, 0.0))
            for dtype, flops in longest.in_kernels.items():
                found.add(dtype, flops, in_kernel=True)
            found.stages = max(found.stages, len(counts), *(each.stages for each in branches))
            found.at_most |= any(each.at_most for each in branches)
            found.unknown |= any(each.unknown for each in branches)
        else:
            for each in inner(eqn):
                _walk(each, times, found, manual=manual or name == "shard_map", before=before)


def _shape(aval: Any, found: Flops, manual: bool) -> tuple[int, ...]:
    """Return the shape on one device; inside a shard_map, shapes are such already."""
    if manual:
        return aval.shape
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return aval.shape
    if AxisType.Explicit not in sharding.mesh.axis_types:
        found.at_most |= math.prod(sharding.mesh.axis_sizes) > 1
        return aval.shape
    return sharding.shard_shape(aval.shape)
