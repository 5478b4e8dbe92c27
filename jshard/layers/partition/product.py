"""Rules of products: a parameter lies as its signal's words say, and a sum over devices is scattered where `sequence` asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels.chip import present_chip
from jshard.kernels.gather_scatter import reduce_scatter
from jshard.layers.partition.choice import choose
from jshard.layers.partition.lazy_product import leaves_in_slices, product_scattered, product_scattered_first
from jshard.layers.partition.local_sizes import Choice, axes_of, local_shape
from jshard.layers.partition.part import Here, Part, moving_as
from jshard.layers.partition.plan import Step, key_of, without
from jshard.layers.partition.planner import Planned, Planner, PlanRule, known
from jshard.layers.partition.prefetch import is_smooth
from jshard.layers.partition.run import Rule, Run, shape_of
from jshard.layers.partition.value import L, Unplaced, Value, claim_of
from jshard.layouts.axes import Factors
from jshard.layouts.primitives import FIXED, KEPT, LOOKUP
from jshard.programs.jaxprs import Eqn, OpenJaxpr, uses
from jshard.programs.provenance import scope, source_of
from jshard.signals.signal import Signal


def settle(values: list[Value], found: Factors, eqn: Eqn) -> None:
    """Decide the layout of parameters at their first use: summed axes are `reduction`, kept ones `column`."""
    for number, value in enumerate(values):
        if isinstance(value, Unplaced) and value.is_undecided:
            others = {f for other, of in enumerate(found.operands) if other != number for each in of for f in each}
            roles: list[str | None] = []
            for of in found.operands[number]:
                kinds = {found.kinds[factor] for factor in of}
                kept = "batch" if others & set(of) else "column"
                is_kept = kinds.isdisjoint({"sum", LOOKUP, FIXED})
                roles.append("reduction" if kinds.isdisjoint({KEPT, FIXED}) else kept if is_kept else None)
            value.decide(roles, eqn)


# -- plans --


def _plan_product(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    found = known(eqn)
    settle(values, found, eqn)
    choice = choose(found, values, plan.sizes)
    claim = claim_of(values)
    plan.placed(_in_dtypes(eqn, values, _dtypes_of(eqn, claim)), found, choice)
    if eqn.primitive is not lax.dot_general_p:
        return plan.results(eqn, found, choice), Step(choice=choice)
    once = next((at for at, value in enumerate(values) if value.regathers and value.reader == "dot_general"), None)
    shape, axes, scattered = shape_of(eqn), list(axes_of(found.results[0], choice)), list[str]()
    for factor in summed(found, choice):
        scattered += scatters(plan, eqn, axes, choice[factor], claim)
    result = Value(shape, tuple(axes), eqn.outvars[0].aval.dtype)
    step = Step(choice=choice, scattered=tuple(scattered), once=once)
    if claim is None or claim.output != "gather":
        return [result], step
    if (addition := _of_bias(plan.jaxpr, eqn.outvars[0])) is not None:
        plan.gathered_behind[key_of(addition)] = claim
        return [result], step
    return [_whole_columns(plan, result, claim)], dataclasses.replace(step, gathers=claim)


def _plan_add(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """Add a bias to a product before its columns are gathered: so it is split as they are."""
    results, step = plan.by_table(eqn, values)
    claim = plan.gathered_behind.pop(key_of(eqn), None)
    if claim is None:
        return results, step
    return [_whole_columns(plan, each, claim) for each in results], dataclasses.replace(step, gathers=claim)


def _of_bias(jaxpr: OpenJaxpr, product: Any) -> Any:
    """Return the addition of a vector to a product without other readers."""
    readers = uses(jaxpr)[product]
    if len(readers) != 1 or readers[0] is None or readers[0].primitive is not lax.add_p:
        return None
    shapes = [atom.aval.shape for atom in readers[0].invars if atom is not product]
    return readers[0] if any(shape and {*shape[:-1]}.issubset({1}) for shape in shapes) else None


def _whole_columns(plan: Planner, value: Value, claim: Signal) -> Value:
    axes = without(value.axes, claim.column)
    plan.have(value, axes)
    return Value(value.shape, axes, value.dtype)


def scatters(
    plan: Planner, eqn: Eqn, axes: list[tuple[str, ...]], names: tuple[str, ...], claim: Signal | None
) -> list[str]:
    """Return the mesh axes of `sequence` for scattering a sum along axis 1, and split `axes` by them."""
    shape, scattered = shape_of(eqn), list[str]()
    at = 1 if len(shape) > 2 else 0
    for name in names if claim is not None else ():
        if claim is None or name not in claim.sequence:
            continue
        places = local_shape(shape, tuple(axes), plan.sizes)[at]
        left = places % plan.sizes[name]
        fault = f"{places} places do not divide by {plan.sizes[name]} ({source_of(eqn)})" if left else ""
        plan.scattered[claim.name, name] = plan.scattered.get((claim.name, name)) or fault
        if not fault:
            axes[at] = (*axes[at], name)
            scattered.append(name)
    return scattered


# -- runs --


def _dot_general(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    found, claim = known(eqn), claim_of(parts)
    out = _product(run, eqn, parts, found, step, claim)
    axes = list(axes_of(found.results[0], step.choice))
    for factor in summed(found, step.choice):
        out = sum_or_scatter(run, out, axes, step.choice[factor], step, claim)
    result = Here(shape_of(eqn), tuple(axes), out.astype(eqn.outvars[0].aval.dtype))
    return [result if step.gathers is None else _gathered(result, step.gathers)]


def summed(found: Factors, choice: Choice) -> list[int]:
    """Return the factors summed over devices."""
    return [factor for factor, kind in enumerate(found.kinds) if kind == "sum" and factor in choice]


def _add(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    results = run.by_table(eqn, parts, step)
    return results if step.gathers is None else [_gathered(each, step.gathers) for each in results]


def _gathered(part: Part, claim: Signal) -> Here:
    """Gather columns, as `output: gather` asks."""
    axes = without(part.axes, claim.column)
    return Here(part.shape, axes, part.local(axes, frozenset(), lambda _: moving_as(claim.kernel, key="output")))


def _dtypes_of(eqn: Eqn, claim: Signal | None) -> tuple[Any, Any] | None:
    """Return the dtypes for multiplying and summing a product; None without a claim."""
    dtypes = None if claim is None or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else claim.dtype
    if dtypes is None or not (dtypes.compute or dtypes.reduce):
        return None
    compute = jnp.dtype(dtypes.compute or jnp.result_type(*(each.aval for each in eqn.invars[:2])))
    return compute, dtypes.reduce or compute


def _product(run: Run, eqn: Eqn, parts: list[Part], found: Factors, step: Step, claim: Signal | None) -> Array:
    """Multiply shards in the dtypes of the claim: a parameter at rest is cast at its use, and x with it. The reduce
    dtype holds for gradients of operands that begin to vary, and for sums over devices."""
    dtypes = _dtypes_of(eqn, claim)
    if dtypes is None:
        return _multiplied(run, eqn, parts, found, step)
    compute, wide = dtypes
    xs = run.placed(_in_dtypes(eqn, parts, dtypes), found, step)
    xs = [x.astype(compute) if is_smooth(atom.aval) else x for x, atom in zip(xs, eqn.invars, strict=True)]
    out_dtype = jnp.dtype(wide if summed(found, step.choice) else compute)
    # a convolution of another dtype than its operands has no gradient
    accumulated = out_dtype if eqn.primitive is lax.dot_general_p else compute
    (out,) = run.bind(eqn, xs, found, step.choice, preferred_element_type=accumulated)
    return out.astype(out_dtype)


def _in_dtypes(eqn: Eqn, each: Sequence[L], dtypes: tuple[Any, Any] | None) -> list[L]:
    """Return the operands, except sizes of groups, in the dtype of their gradient sums."""
    if dtypes is None:
        return list(each)
    compute, wide = dtypes
    return [x.summed_in(wide, compute) if is_smooth(atom.aval) else x for x, atom in zip(each, eqn.invars, strict=True)]


def _multiplied(run: Run, eqn: Eqn, parts: list[Part], found: Factors, step: Step) -> Array:
    """Multiply as the operands are. Of a stored kernel a part of the gradient is made at a time, where parts are sent."""

    def product(*xs: Array) -> Array:
        return run.bind(eqn, xs, found, step.choice)[0]

    xs = run.placed(parts, found, step)
    if step.once is None:
        return product(*xs)
    at, part = step.once, run.array(parts[step.once], step.claim)
    x, kernel = xs[1 - at], lax.stop_gradient(xs[at])

    def gather(shard: Array) -> Array:
        axes = axes_of(found.operands[at], step.choice)
        return part.renewed(x=shard).local(axes, frozenset(jax.typeof(kernel).mat.varying), run.moving(step.claim))

    multiply = lambda x, kernel: product(x, kernel) if at else product(kernel, x)
    if leaves_in_slices(gather, part.x, kernel):
        return product_scattered(multiply, x, kernel, part.x, jnp.zeros(()), gather)[0]
    # XLA for TPU computes nothing while it scatters, so it does that last of all, and the whole gradient stands until then
    if present_chip().platform == "tpu" and kernel.size > x.size:
        return product_scattered_first(multiply, x, kernel, part.x, gather)
    return product(*xs)


def sum_or_scatter(
    run: Run, out: Array, axes: list[tuple[str, ...]], names: tuple[str, ...], step: Step, claim: Signal | None
) -> Array:
    """Sum a product over devices; over mesh axes of its signal's `sequence` each device keeps its part of axis 1."""
    at = 1 if out.ndim > 2 else 0
    for name in names:
        if claim is not None and name in step.scattered:
            with scope(key="sequence"):
                by: Any = dict(claim.kernel).get("reduce_scatter", "auto")
                out = reduce_scatter(out, name, axis=at, algorithm=by)
            axes[at] = (*axes[at], name)
    rest = tuple(name for name in names if name not in step.scattered)
    return run.reduce(out, rest, "sum", step.claim, key="reduction" if claim is not None else "") if rest else out


def _convolution(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    found = known(eqn)
    (result,) = run.results(eqn, [_product(run, eqn, parts, found, step, claim_of(parts))], found, step)
    result.x = result.x.astype(eqn.outvars[0].aval.dtype)
    return [result]


PRODUCTS = ("dot_general", "conv_general_dilated")
PLANS: dict[str, PlanRule] = {
    **dict.fromkeys((*PRODUCTS, "ragged_dot_general"), _plan_product), "add": _plan_add,
}  # fmt: skip
RULES: dict[str, Rule] = {
    "dot_general": _dot_general, "add": _add, **dict.fromkeys(("conv_general_dilated", "ragged_dot_general"), _convolution),
}  # fmt: skip
