"""Rules of operations making or reshaping arrays, and of extremes, with a gradient shared by equal elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal

from jshard.layers.partition.local_sizes import axes_of, local_shape
from jshard.layers.partition.part import Deferred, Here, Moving, Part, vary
from jshard.layers.partition.plan import PUT_OFF, Names, Step
from jshard.layers.partition.planner import Planned, Planner, PlanRule, known, whole
from jshard.layers.partition.run import Rule, Run, shape_of
from jshard.layers.partition.value import Later, Value
from jshard.layers.reduce import ReductionBody
from jshard.layouts.axes import REDUCTIONS
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import Eqn


def _plan_broadcast(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """Put off: where it is needed is how its operand is split."""
    return plan.later(eqn, values, known(eqn))


def _plan_made(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """Defer an array made of nothing, or of a key: every device can make it."""
    shape = shape_of(eqn)

    def recipe(axes: Axes, names: Names) -> None:
        for value in values:
            plan.need(value, whole(len(value.shape)))

    return [Later(shape, whole(len(shape)), eqn.outvars[0].aval.dtype, recipe)], Step(PUT_OFF)


def _iota(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    shape, dtype, along = shape_of(eqn), eqn.params["dtype"], eqn.params["dimension"]

    def make(axes: Axes, names: Names, moving: Moving) -> Array:
        local = local_shape(shape, axes, run.sizes)
        places = lax.broadcasted_iota(dtype, local, along)
        return vary(places + first(axes[along], local[along], run.sizes, dtype), names)

    return [Deferred(shape, whole(len(shape)), make)]


def first(names: tuple[str, ...], size: int, sizes: dict[str, int], dtype: Any) -> Any:
    """Return the index of this device's first element along an axis split by `names`."""
    index: Any = 0
    for name in names:
        index = index * sizes[name] + lax.axis_index(name)
    return jnp.asarray(index * size, dtype)


def _drawn(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    """Cut random bits from the bits of the whole array: the same numbers on every mesh."""
    shape = shape_of(eqn)

    def make(axes: Axes, names: Names, moving: Moving) -> Array:
        key = parts[0].local(whole(len(parts[0].shape)), frozenset(), moving)
        bits = vary(run.bind(eqn, [key])[0], names)
        for axis, each in enumerate(axes):
            if each:
                size = local_shape(shape, axes, run.sizes)[axis]
                bits = lax.dynamic_slice_in_dim(bits, first(each, size, run.sizes, jnp.int32), size, axis)
        return bits

    return [Deferred(shape, whole(len(shape)), make)]


def _plan_ordered(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    return [Value(value.shape, value.axes, value.dtype) for value in map(plan.force, values)], Step()


def _ordered(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    """A barrier leaves each array split as it is: by the table they are operands of one operation, in which a mesh axis splits
    one of them only. An array that is equal on all devices can't wait for one that is not, so only those that vary over the
    same mesh axes wait for each other."""
    forced = [run.force(part, step.claim) for part in parts]
    alike: dict[Names, list[Here]] = {}
    for part in forced:
        alike.setdefault(jax.typeof(part.x).mat.varying, []).append(part)
    done = {id(p): x for some in alike.values() for p, x in zip(some, run.bind(eqn, [p.x for p in some]), strict=True)}
    return [Here(part.shape, part.axes, done[id(part)]) for part in forced]


def _clamped(eqn: Eqn, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Return the starts of a slice among the operands, possibly outside its array, and the last valid start."""
    count = len(eqn.invars) - len(shapes[0])
    sizes = eqn.params["slice_sizes"] if count == 1 else shapes[1]
    last = [(at, n - size) for at, (n, size) in enumerate(zip(shapes[0], sizes, strict=True), count)]
    inside = lambda atom, end: isinstance(atom, Literal) and 0 <= atom.val <= end
    return [(at, end) for at, end in last if not inside(eqn.invars[at], end)]


def _plan_inside(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    values = list(values)
    for at, _ in _clamped(eqn, [value.shape for value in values]):
        values[at] = Value((), (), plan.force(values[at]).dtype)
    return plan.by_table(eqn, values)


def _inside(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    """Clamp the places of a dynamic slice first, as it does itself. Of a device's slice of the result, or of its gradient, XLA
    adds both places before it clamps them."""
    parts = list(parts)
    for at, end in _clamped(eqn, [part.shape for part in parts]):
        place = run.force(parts[at], step.claim).x
        zero, last = (np.asarray(min(each, np.iinfo(place.dtype).max), place.dtype) for each in (0, end))
        parts[at] = Here((), (), lax.clamp(zero, place, last))
    return run.by_table(eqn, parts, step)


def _extreme(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    """Reduce over elements and devices in a single step: two steps would share the gradient among devices wrongly."""
    found = known(eqn)
    kind: Any = REDUCTIONS[eqn.primitive.name]
    names = [name for factor, some in step.choice.items() if found.kinds[factor] == kind for name in some]
    if not names or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return run.by_table(eqn, parts, step)
    (x,) = run.placed(parts, found, step)
    over = tuple(name for name in names if run.sizes[name] >= 2)
    out = ReductionBody(kind, tuple(eqn.params["axes"]), keepdims=False, mesh_axes=over)(x)
    out = run.reduce(out, tuple(name for name in names if name not in over), kind, step.claim)
    return [Here(shape_of(eqn), axes_of(found.results[0], step.choice), out)]


PLANS: dict[str, PlanRule] = {
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), _plan_inside), "broadcast_in_dim": _plan_broadcast,
    **dict.fromkeys(("iota", "random_bits"), _plan_made), "optimization_barrier": _plan_ordered,
}  # fmt: skip
RULES: dict[str, Rule] = {
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), _inside),
    **dict.fromkeys(("reduce_max", "reduce_min"), _extreme),
    "iota": _iota, "optimization_barrier": _ordered, "random_bits": _drawn,
}  # fmt: skip
