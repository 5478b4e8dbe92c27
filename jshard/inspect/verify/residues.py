"""Arithmetic modulo a prime in place of floating point: sums are exact in any order, and so on every mesh.

Every floating-point array becomes whole numbers modulo a prime, each the residue of least magnitude.

- Sums, products, differences and quotients are taken modulo the prime, and keep every law of arithmetic. The terms of a sum
  may be multiplied, divided or added to on their way: a mean of means is the mean.
- Any other function of one element (exp, rsqrt, a power) becomes a number scrambled from the bits of its argument. It need
  only be a *function*: equal arguments give equal results on every device, and any change of the argument shows.
- Maxima and sorting follow the order of these whole numbers, comparisons the order of a difference and zero. Moves of
  elements stay moves.

Equations also run here in 64 bits, in place of the dtypes they ask for: the remaining rounding hides no fault.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.lax import GatherScatterMode
from jax.typing import DTypeLike

from jshard.layouts.primitives import ELEMENTWISE, MATRICES
from jshard.programs.jaxprs import Eqn, bound, equations
from jshard.signals.active_config import mesh

PRIMES = (2039, 1021, 509, 251, 127, 61, 31)
MOST = 2**31 - 2**12  # int32, with room for another modulus
ENDLESS = 2.0**60  # larger constants count as infinity

COLLECTIVE_SUMS = frozenset(
    "one_device_sum psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter".split()
)
PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
SUMS = PRODUCTS | COLLECTIVE_SUMS | frozenset(
    "reduce_sum cumsum scatter-add scatter_add add_any reduce_window_sum select_and_scatter_add".split()
)  # fmt: skip
LINEAR = SUMS | frozenset("add sub neg mul div square integer_pow convert_element_type reduce_precision".split())
ORDERED = frozenset(
    "abs sign max min clamp select_n eq ne ge gt le lt eq_to le_to lt_to argmax argmin reduce_max reduce_min cummax cummin "
    "reduce_window_max reduce_window_min sort top_k pmax pmin scatter-max scatter-min scatter_max scatter_min".split()
)
MOVED = frozenset(
    "copy copy_p name stop_gradient broadcast_in_dim reshape squeeze expand_dims transpose rev concatenate stack unstack pad "
    "slice split dynamic_slice dynamic_update_slice gather scatter iota tile empty empty2 reshard mesh_cast "
    "sharding_constraint pvary "
    "invariant_cast one_device_cast one_device_sum pipeline_slot "
    "pcast preduced vary_unreduced_cast optimization_barrier all_gather all_gather_invariant all_gather_reduced ppermute "
    "pbroadcast pbroadcast_dynamic all_to_all ragged_all_to_all device_put bitcast_convert_type is_finite".split()
)
SCATTERS = {
    f"scatter{mark}{name}": getattr(lax, f"scatter_{name}") for mark in "-_" for name in ("add", "max", "min")
} | {"scatter": lax.scatter}
DTYPES = frozenset(("dtype", "new_dtype", "preferred_element_type"))  # parameters of equations
SCRAMBLED = ELEMENTWISE - LINEAR - ORDERED - MOVED
PROVABLE = LINEAR | ORDERED | MOVED | SCRAMBLED
# Primitives with a meaning in 64 bits. Others, such as kernels, run in their own dtypes.
WIDENED = PROVABLE - {"bitcast_convert_type"} | {"fft", "cumprod", "cumlogsumexp", "reduce_prod", *MATRICES.split()}


def is_float(x: jax.Array | np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def touches_floats(eqn: Any) -> bool:
    """Return True if an operand or a result of an equation is floating-point or complex."""
    avals = (variable.aval for variable in (*eqn.invars, *eqn.outvars))
    return any(hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)


def is_scrambled(eqn: Any) -> bool:
    return eqn.primitive.name in SCRAMBLED and is_float(eqn.outvars[0].aval)


def is_opaque(eqn: Eqn, platform: str) -> bool:
    """Return True if an equation has no exact stand-in on devices of `platform`."""
    name = eqn.primitive.name
    if name == "while":  # stand-ins would decide its number of trips
        return any(map(touches_floats, equations(eqn.params["cond_jaxpr"])))
    if name == "conv_general_dilated" and platform == "gpu" and touches_floats(eqn):  # cuDNN has no integer convolution
        return True
    dtypes = (getattr(variable.aval, "dtype", jnp.int32) for variable in (*eqn.invars, *eqn.outvars))
    return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes) or (
        touches_floats(eqn) and name not in PROVABLE
    )


def modulus_for(eqns: Sequence[Any]) -> int | None:
    """Return the largest prime with every sum of these equations within 32 bits; None if there is none."""

    def fits(prime: int) -> bool:
        sizes = ((_terms(eqn), 2 if eqn.primitive.name in PRODUCTS else 1) for eqn in eqns)
        return all(terms * (prime // 2) ** power < MOST for terms, power in sizes)

    return next(filter(fits, PRIMES), None)


def _terms(eqn: Eqn) -> int:
    """Return the largest number of terms in a sum of an equation."""
    name, params = eqn.primitive.name, eqn.params
    shapes: list[Any] = [getattr(variable.aval, "shape", ()) for variable in eqn.invars]
    if name == "dot_general":
        return math.prod(shapes[0][axis] for axis in params["dimension_numbers"][0][0])
    if name == "conv_general_dilated":
        return math.prod(shapes[1]) // max(1, shapes[1][params["dimension_numbers"].rhs_spec[0]])
    if name == "reduce_sum":
        return math.prod(shapes[0][axis] for axis in params["axes"])
    if name == "cumsum":
        return shapes[0][params["axis"]]
    if name in ("reduce_window_sum", "select_and_scatter_add"):
        return math.prod(params["window_dimensions"])
    return math.prod(shapes[1][:-1]) + 1 if name in ("scatter-add", "scatter_add") else 2


# -- numbers --


def centered(x: np.ndarray, prime: int) -> np.ndarray:
    """Return the residues of least magnitude."""
    return (x + prime // 2) % prime - prime // 2


def embedded(x: object, prime: int) -> np.ndarray:
    """Return constants modulo the prime: an array by its binary fractions, a scalar as the fraction it approximates."""
    x = np.asarray(x, np.float64)
    if not x.ndim and np.isfinite(x) and (fraction := _fraction(abs(float(x)))) is not None:
        residue = fraction.numerator * pow(fraction.denominator, -1, prime) if fraction.denominator % prime else 0
        return np.asarray(centered(np.asarray(residue % prime * (-1 if x < 0 else 1)), prime), np.int32)
    ends = np.where(np.isfinite(x), np.abs(x) >= ENDLESS, ~np.isnan(x))
    significand, exponent = np.frexp(np.where(ends | np.isnan(x), 0.0, x))
    powers = np.array([pow(2, n, prime) for n in range(prime - 1)])
    numbers = (significand * 2.0**53).astype(np.int64) % prime * powers[(exponent - 53) % (prime - 1)]
    return np.where(ends, np.sign(x) * (prime // 2), centered(numbers, prime)).astype(np.int32)


@functools.lru_cache(maxsize=4096)
def _fraction(size: float) -> Fraction | None:
    """Return the fraction of small numbers behind a rounded constant: a third for 0.333..."""
    if size >= ENDLESS:
        return None
    fractions = [Fraction(size).limit_denominator(limit) for limit in (1, 64, 4096)]
    fractions += [Fraction(1, round(1 / size))] if 2.0**-1000 < size < 1 else []
    return next((each for each in fractions if abs(each - Fraction(size)) <= Fraction(size) / 2**22), None)


@functools.partial(jax.jit, static_argnums=1)
def reduced(x: jax.Array | np.ndarray, prime: int) -> Any:
    """Return the residue of least magnitude. It takes a single operation on unsigned numbers."""
    shifted = x.astype(jnp.uint32) + jnp.uint32(2**31 // prime * prime + prime // 2)
    return lax.rem(shifted, jnp.uint32(prime)).astype(jnp.int32) - prime // 2


@functools.partial(jax.jit, static_argnums=1)
def inverse(x: object, prime: int) -> Any:
    """Return the inverse of x: x to the power of the prime less two. The inverse of 0 is 0."""
    bits = jnp.asarray([bit == "1" for bit in bin(prime - 2)[2:]])

    def step(n: object, power: Any) -> Any:
        squared = reduced(power * power, prime)
        return jnp.where(bits[n], reduced(squared * x, prime), squared)

    return lax.fori_loop(1, len(bits), step, x)


@functools.partial(jax.jit, static_argnums=(0, 2))
def scrambled(name: str, x: Sequence[Any], prime: int) -> Any:
    """Return a number for each element, a hash of all bits of all arguments."""
    bits: Any = jnp.uint32(zlib.crc32(name.encode()))
    for each in x:
        bits = mixed(bits + each.astype(jnp.uint32))
    return lax.rem(bits, jnp.uint32(prime)).astype(jnp.int32) - prime // 2


def mixed(bits: Any) -> Any:
    """Spread every bit of a number over all bits of the result."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ lax.shift_right_logical(bits, jnp.uint32(shift))) * jnp.uint32(factor)
    return bits ^ lax.shift_right_logical(bits, jnp.uint32(16))


@functools.partial(jax.jit, static_argnums=1)
def coarse(x: jax.Array | np.ndarray, prime: int) -> Any:
    """Round as a dtype of fewer bits would: the sum of such numbers is not the rounded sum."""
    return reduced((x + 4) // 8 * 8, prime)


# -- equations --


def results_of(eqn: Any, x: list[Any], prime: int) -> list[Any]:
    """Return the results of an equation on floating-point numbers, here whole numbers modulo the prime."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name in SCRAMBLED:
        result = scrambled(name, jnp.broadcast_arrays(*x), prime)
        result = jnp.where(x[0] == 0, 1, result) if name == "exp" else result
        return [result if is_float(out) else result.astype(out.dtype)]
    if name in ("lt", "le", "gt", "ge"):  # by the sign of the difference: residues have no order of their own
        return [eqn.primitive.bind(reduced(x[0] - x[1], prime), jnp.zeros_like(x[0]), **eqn.params)]
    if name == "is_finite":
        return [x[0] == x[0]]
    if name in ("convert_element_type", "reduce_precision"):  # jax.checkpoint puts the latter on residuals
        return [_converted(x[0], eqn.invars[0].aval, out, prime)]
    if name == "bitcast_convert_type":
        bits = scrambled(name, x, prime)
        return [bits if is_float(out) else mixed(bits.astype(jnp.uint32)).astype(out.dtype)]
    if name == "div":
        by = eqn.invars[1]
        constant = pow(int(embedded(by.val, prime)), prime - 2, prime) if isinstance(by, Literal) else None
        return [reduced(x[0] * (inverse(x[1], prime) if constant is None else jnp.int32(constant)), prime)]
    if name in ("square", "integer_pow"):
        return [_power(x[0], eqn.params.get("y", 2), prime)]
    results = retyped(eqn, x, np.int32)
    return [reduced(each, prime) for each in results] if name in LINEAR or name == "iota" else results


def opaque(eqn: Any, x: Sequence[Any], prime: int) -> list[Any]:
    """Run an operation without an exact stand-in in floating point. The results are whole numbers without a meaning."""
    if eqn.primitive.name == "while":  # it might not end
        return list(x[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :])
    given = [jnp.asarray(each, v.aval.dtype) for each, v in zip(x, eqn.invars, strict=True)]
    whole = lambda each: lax.rem(jnp.nan_to_num(jnp.real(each).astype(jnp.float32)), jnp.float32(prime)).astype(
        jnp.int32
    )
    return [whole(each) if jnp.issubdtype(each.dtype, jnp.inexact) else each for each in bound(eqn, given)]


def retyped(eqn: Eqn, x: Sequence[Any], dtype: Any) -> list[Any]:
    """Run the primitive on numbers of `dtype` in place of floating-point numbers."""
    primitive, params = eqn.primitive, dict(eqn.params)
    if primitive.name == "sharding_constraint" and params["sharding"].num_devices != mesh().size:
        return list(x)  # on another mesh than the user's it constrains nothing
    if "precision" in params:
        params["precision"] = None
    if dtype is np.int32 and params.get("mode") == GatherScatterMode.FILL_OR_DROP and "fill_value" in params:
        params["fill_value"] = 0
    for name in DTYPES & params.keys():
        if params[name] is not None and jnp.issubdtype(params[name], jnp.floating):
            params[name] = jnp.dtype(dtype)
    if (scatter := SCATTERS.get(primitive.name)) is not None:  # the primitive holds a jaxpr of floats
        return [scatter(*x, **{key: each for key, each in params.items() if not key.startswith("update_")})]
    results = primitive.bind(*x, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def _power(x: jax.Array | np.ndarray, exponent: int, prime: int) -> Any:
    if exponent < 0:
        x, exponent = inverse(x, prime), -exponent
    result = jnp.ones_like(x)
    for _ in range(exponent):
        result = reduced(result * x, prime)
    return result


def _converted(x: jax.Array | np.ndarray, before: Any, after: Any, prime: int) -> Any:
    if not is_float(after):
        return x != 0 if after.dtype == jnp.bool_ else x.astype(after.dtype)
    if is_float(before):
        return x
    small = lax.rem(x, jnp.asarray(prime, x.dtype)) if x.dtype.itemsize >= 4 else x
    return reduced(small.astype(jnp.int32), prime)


# -- in 64 bits --


def widened(dtype: DTypeLike) -> Any:
    """Return the 64-bit dtype for a floating-point or complex dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.float64
    return np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def keeps_its_dtypes(eqn: Eqn) -> bool:
    """Return True if an equation on floating-point numbers runs in its own dtypes."""
    return touches_floats(eqn) and eqn.primitive.name not in WIDENED


def wide_results(eqn: Any, x: Sequence[Any], *, rounds: bool) -> list[Any]:
    """Return the results of an equation on operands of 64 bits. With `rounds`, a cast keeps only the bits of its dtype."""
    if keeps_its_dtypes(eqn):
        results = bound(eqn, [jnp.asarray(each, v.aval.dtype) for each, v in zip(x, eqn.invars, strict=True)])
    elif eqn.primitive.name == "reduce_precision":
        results = x
    elif eqn.primitive.name == "convert_element_type" and rounds:
        results = bound(eqn, x)
    else:
        results = retyped(eqn, x, np.float64)
    return [jnp.asarray(each, widened(each.dtype)) for each in results]
