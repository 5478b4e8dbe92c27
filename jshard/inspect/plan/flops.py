"""How many floating-point operations each device does in products, counted in the jaxpr."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import AxisType

from jshard.jaxprs import bare, inner


@dataclasses.dataclass
class Arithmetic:
    """FLOPs of one device by dtype of the operands. `at_most` where the layout of some array can't be seen, and it was
    taken to be whole on every device; `unknown` products stand in a loop whose trips no program text tells."""

    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    at_most: bool = False
    unknown: bool = False

    @property
    def total(self) -> float:
        return sum(self.flops.values())


def arithmetic_of(jaxpr: Any) -> Arithmetic:
    """Of products and convolutions; of a kernel what it declares."""
    found = Arithmetic()
    _walk(bare(jaxpr), 1, found, manual=False)
    return found


def _walk(jaxpr: Any, times: int, found: Arithmetic, *, manual: bool) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (left, _), _ = eqn.params["dimension_numbers"]
            contracted = math.prod(_shape(eqn.invars[0].aval, found, manual)[axis] for axis in left)
            _add(found, eqn, 2.0 * times * contracted * math.prod(_shape(eqn.outvars[0].aval, found, manual)))
        elif name == "conv_general_dilated":
            kernel = _shape(eqn.invars[1].aval, found, manual)
            outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            result = math.prod(_shape(eqn.outvars[0].aval, found, manual))
            _add(found, eqn, 2.0 * times * result * math.prod(kernel) / outputs)
        elif name == "pallas_call":
            estimate = eqn.params.get("cost_estimate")
            largest = max(range(len(eqn.invars)), key=lambda number: eqn.invars[number].aval.size, default=0)
            _add(found, eqn, float(times * (estimate.flops if estimate else 0)), largest)
        elif name == "multiplied":  # said beside a kernel of a GPU
            _add(found, eqn, float(times * eqn.params["flops"]))
        elif name == "scan":
            _walk(bare(eqn.params["jaxpr"]), times * eqn.params["length"], found, manual=manual)
        elif name == "while":
            found.unknown = True
            _walk(bare(eqn.params["body_jaxpr"]), times, found, manual=manual)
        elif name == "cond":
            branches = [_branch(bare(branch), times, manual) for branch in eqn.params["branches"]]
            _most(found, branches)
        else:
            for each in inner(eqn):
                _walk(each, times, found, manual=manual or name == "shard_map")


def _branch(jaxpr: Any, times: int, manual: bool) -> Arithmetic:
    found = Arithmetic()
    _walk(jaxpr, times, found, manual=manual)
    return found


def _most(found: Arithmetic, branches: list[Arithmetic]) -> None:
    most = max(branches, key=lambda each: each.total)
    for dtype, flops in most.flops.items():
        found.flops[dtype] = found.flops.get(dtype, 0.0) + flops
    found.at_most |= any(each.at_most for each in branches)
    found.unknown |= any(each.unknown for each in branches)


def _add(found: Arithmetic, eqn: Any, flops: float, operand: int = 0) -> None:
    dtype = str(eqn.invars[operand].aval.dtype)
    if flops:
        found.flops[dtype] = found.flops.get(dtype, 0.0) + flops


def _shape(aval: Any, found: Arithmetic, manual: bool) -> tuple[int, ...]:
    """The shape on one device: inside a shard_map shapes are those already."""
    if manual:
        return aval.shape
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return aval.shape
    if AxisType.Explicit not in sharding.mesh.axis_types:
        found.at_most |= math.prod(sharding.mesh.axis_sizes) > 1
        return aval.shape
    return sharding.shard_shape(aval.shape)
