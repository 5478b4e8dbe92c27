"""Rules of products: a parameter lies as its signal's words say, and a sum over devices is scattered where `sequence` asks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels.chip import present_chip
from jshard.kernels.gather_scatter import reduce_scatter
from jshard.layers.partition.engine import Partition, Rule, known, shape_of
from jshard.layers.partition.lazy_product import leaves_in_slices, product_scattered, product_scattered_first
from jshard.layers.partition.local_sizes import Choice, axes_of
from jshard.layers.partition.part import Part, moving_as
from jshard.layouts.axes import Factors
from jshard.layouts.primitives import FIXED, KEPT, LOOKUP
from jshard.programs.provenance import scope, source_of
from jshard.signals.signal import Signal


def settle(parts: list[Part], found: Factors) -> None:
    """Decide how parameters lie whose first use this is: summed axes are `reduction`, kept ones `column`."""
    for number, part in enumerate(parts):
        if part.is_undecided and part.make is None:
            others = {f for other, of in enumerate(found.operands) if other != number for each in of for f in each}
            assert part.parameter is not None
            roles: list[str | None] = [None] * len(part.parameter.shape)
            for at, of in zip(part.of, found.operands[number], strict=True):
                kinds = {found.kinds[factor] for factor in of}
                if at is not None:
                    kept = "batch" if others & set(of) else "column"
                    is_kept = kinds.isdisjoint({"sum", LOOKUP, FIXED})
                    roles[at] = "reduction" if kinds.isdisjoint({KEPT, FIXED}) else kept if is_kept else None
            part.parameter.decide(roles)
            part.settle()


def _dot_general(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    found = known(eqn)
    settle(parts, found)
    choice = run.choose(found, parts)
    claim = next((part.signal for part in parts if part.signal is not None), None)
    out = _product(run, eqn, parts, found, choice, claim)
    axes = list(axes_of(found.results[0], choice))
    for factor in _summed(found, choice):
        out = sum_or_scatter(run, out, axes, choice[factor], claim)
    result = Part(shape_of(eqn), tuple(axes), out.astype(eqn.outvars[0].aval.dtype))
    if claim is None or claim.output != "gather":
        return [result]
    if (addition := _of_bias(run.jaxpr, eqn.outvars[0])) is not None:
        run.gathered_behind[id(addition)] = claim
        return [result]
    return [_gathered(result, claim)]


def _summed(found: Factors, choice: Choice) -> list[int]:
    """Return the factors that are summed over devices."""
    return [factor for factor, kind in enumerate(found.kinds) if kind == "sum" and factor in choice]


def _of_bias(jaxpr: Any, product: Any) -> Any:
    """Return the addition of a vector to a product that nothing else reads."""
    readers = [eqn for eqn in jaxpr.eqns if product in eqn.invars]
    if len(readers) != 1 or readers[0].primitive is not lax.add_p or product in jaxpr.outvars:
        return None
    shapes = [atom.aval.shape for atom in readers[0].invars if atom is not product]
    return readers[0] if any(shape and {*shape[:-1]}.issubset({1}) for shape in shapes) else None


def _add(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """Add a bias to a product before its columns are gathered: so it is split as they are."""
    results, claim = run.by_table(eqn, parts), run.gathered_behind.pop(id(eqn), None)
    return results if claim is None else [_gathered(each, claim) for each in results]


def _gathered(part: Part, claim: Signal) -> Part:
    """Gather columns, as `output: gather` asks."""
    axes = tuple(tuple(name for name in names if name not in claim.column) for names in part.axes)
    return Part(part.shape, axes, part.local(axes, frozenset(), lambda _: moving_as(claim.kernel, key="output")))


def _product(
    run: Partition, eqn: Any, parts: list[Part], found: Factors, choice: Choice, claim: Signal | None
) -> Array:
    """The product of parts, in the dtypes that the claim says: a parameter at rest is cast where it is used, and x with it.
    Where an operand starts to vary its gradient is summed, in the reduce dtype; so is what is summed over devices."""
    dtypes = None if claim is None or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else claim.dtype
    if dtypes is None or not (dtypes.compute or dtypes.reduce):
        return _multiplied(run, eqn, parts, found, choice)
    compute = jnp.dtype(dtypes.compute or jnp.result_type(*(each.aval for each in eqn.invars[:2])))
    wide = dtypes.reduce or compute
    cast = [jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in eqn.invars]  # all but the sizes of groups
    operands = [part.summed_in(wide, compute) if c else part for part, c in zip(parts, cast, strict=True)]
    xs = [x.astype(compute) if c else x for x, c in zip(run.placed(operands, found, choice), cast, strict=True)]
    out_dtype = jnp.dtype(wide if _summed(found, choice) else compute)
    # a convolution of another dtype than its operands has no gradient
    accumulated = out_dtype if eqn.primitive is lax.dot_general_p else compute
    (out,) = run.bind(eqn, xs, found, choice, preferred_element_type=accumulated)
    return out.astype(out_dtype)


def _multiplied(run: Partition, eqn: Any, parts: list[Part], found: Factors, choice: Choice) -> Array:
    """Multiply as the operands are. Of a stored kernel a part of the gradient is made at a time, where parts are sent."""

    def product(*xs: Array) -> Array:
        return run.bind(eqn, xs, found, choice)[0]

    xs = run.placed(parts, found, choice)
    at = next((n for n, part in enumerate(parts) if part.is_multiplied_once and part.regathers), None)
    if at is None or run.only_axes:
        return product(*xs)
    part, x, kernel = parts[at], xs[1 - at], lax.stop_gradient(xs[at])

    def gather(shard: Array) -> Array:
        axes = axes_of(found.operands[at], choice)
        return part.renewed(shard).local(axes, frozenset(jax.typeof(kernel).mat.varying), run.moving)

    multiply = lambda x, kernel: product(x, kernel) if at else product(kernel, x)
    if leaves_in_slices(gather, part.x, kernel):
        return product_scattered(multiply, x, kernel, part.x, jnp.zeros(()), gather)[0]
    # XLA for TPU computes nothing while it scatters, so it does that last of all, and the whole gradient stands until then
    if present_chip().platform == "tpu" and kernel.size > x.size:
        return product_scattered_first(multiply, x, kernel, part.x, gather)
    return product(*xs)


def sum_or_scatter(
    run: Partition, out: Array, axes: list[tuple[str, ...]], names: tuple[str, ...], claim: Signal | None
) -> Array:
    """Sum a product over devices; over mesh axes of its signal's `sequence` each device keeps its part of axis 1."""
    at = 1 if out.ndim > 2 else 0
    rest = []
    for name in names:
        if claim is None or name not in claim.sequence:
            rest.append(name)
            continue
        left = out.shape[at] % run.sizes[name]
        fault = f"{out.shape[at]} places do not divide by {run.sizes[name]} ({source_of(run.eqn)})" if left else ""
        run.scattered[claim.name, name] = run.scattered.get((claim.name, name)) or fault
        if fault:
            rest.append(name)
            continue
        with scope(key="sequence"):
            by: Any = dict(claim.kernel).get("reduce_scatter", "auto")
            out = reduce_scatter(out, name, axis=at, algorithm=by)
        axes[at] = (*axes[at], name)
    return run.reduce(out, tuple(rest), "sum", key="reduction" if claim is not None else "") if rest else out


def _convolution(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    found = known(eqn)
    settle(parts, found)
    choice = run.choose(found, parts)
    claim = next((part.signal for part in parts if part.signal is not None), None)
    (result,) = run.results(eqn, [_product(run, eqn, parts, found, choice, claim)], found, choice)
    result.x = result.x.astype(eqn.outvars[0].aval.dtype)
    return [result]


PRODUCTS: dict[str, Rule] = {"dot_general": _dot_general, "conv_general_dilated": _convolution}
RULES: dict[str, Rule] = {**PRODUCTS, "add": _add, "ragged_dot_general": _convolution}
