"""Arithmetic that is exact on small integers: stand-ins for the operations that are not, and what it takes for a sum to be.

A sum of numbers that are all multiples of one power of two, and of magnitudes that add up to less than that times 2^24
(in float32), is the same in every order, and so on every mesh. Sums and products keep to that by themselves. The rest
does by stand-ins, which need only be *functions*: equal arguments give equal results, wherever they are computed.

- A function of one element (exp, tanh, rsqrt, a power) becomes a small integer scrambled out of the bits of its argument,
  so that any change of the argument shows. So does a product or sum of two such elements, lest numbers grow.
- Division and multiplication by a number stay linear, because partial sums may go through them: the number becomes a
  power of two. For constants that is a product over their prime factors, so that a mean of means stays a mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

POSITIVE = frozenset("exp exp2 logistic sqrt rsqrt erfc pow square integer_pow cosh acosh lgamma acos".split())
SIGNED = frozenset(
    "log log1p expm1 tanh erf erf_inv sin cos tan asin atan sinh asinh atanh cbrt atan2 digamma polygamma igamma igammac "
    "igamma_grad_a random_gamma_grad regularized_incomplete_beta bessel_i0e bessel_i1e zeta".split()
)
ZERO_AT_ZERO = frozenset("sqrt square integer_pow log1p expm1 tanh erf sin tan asin atan sinh asinh atanh cbrt".split())
# What has no stand-in, and is not exact on integers.
OPAQUE = frozenset(
    "cumprod cumlogsumexp reduce_prod fft cholesky eig eigh lu qr svd schur hessenberg triangular_solve householder_product "
    "tridiagonal_solve tridiagonal geqrf ormqr custom_linear_solve custom_call ffi_call pure_callback io_callback approx_top_k "
    "pallas_call ragged_dot_general reduce_precision".split()
)
COLLECTIVE_SUMS = frozenset("psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter".split())
PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
SUMS = PRODUCTS | COLLECTIVE_SUMS | frozenset(
    "reduce_sum cumsum scatter-add add_any reduce_window_sum select_and_scatter_add".split()
)  # fmt: skip
# An operand of these is a number that is all there, and no term of a sum over devices: so says whoever wrote them.
NONLINEAR = POSITIVE | SIGNED | frozenset("max min abs sign clamp gt lt ge le eq ne is_finite".split())
KEEPS_WHOLE = frozenset(
    "neg abs sign max min clamp select_n convert_element_type broadcast_in_dim reshape squeeze transpose pvary copy mul add "
    "sub stop_gradient reshard sharding_constraint".split()
)
SCALAR_PASSES = frozenset("broadcast_in_dim convert_element_type pvary reshape squeeze copy".split())

NEGLIGIBLE = 2.0**-8  # a constant added that is smaller is an epsilon against division by zero: left out
MASK = 2.0**20  # a constant that is larger stands for infinity: kept


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def stand_in(name: str, x: Sequence[Any], known: Sequence[float | None], complete: Sequence[bool]) -> Any | None:
    """The result of elementwise operation `name` on `x` (scalar constants among them: `known`; no terms of a sum:
    `complete`), where the operation has a stand-in, else None."""
    if name in POSITIVE or name in SIGNED:
        return _scrambled(name, x)
    if name == "div":
        return _divided(x[0], x[1], known=known[1], near=not complete[1])
    if name == "mul" and (known[0] is None) != (known[1] is None):
        constant, other = (known[0], x[1]) if known[1] is None else (known[1], x[0])
        return other * jnp.asarray(as_power_of_two(constant), other.dtype)
    if name in ("add", "sub") and (known[0] is None) != (known[1] is None):
        operation = lax.add if name == "add" else lax.sub
        left, right = (
            each if number is None else jnp.full_like(each, _shift(number))
            for each, number in zip(x, known, strict=True)
        )
        return operation(left, right)
    return None


def _shift(number: float) -> float:
    """A constant to add: nothing for an epsilon, else the nearest sixteenth."""
    if abs(number) < NEGLIGIBLE:
        return 0.0
    return number if abs(number) >= MASK or not math.isfinite(number) else round(16 * number) / 16


@functools.partial(jax.jit, static_argnums=0)
def _scrambled(name: str, x: Sequence[Any]) -> Any:
    floats = [each for each in x if is_float(each)]
    shape = jnp.broadcast_shapes(*(each.shape for each in x))
    bits: Any = jnp.uint32(0)
    for each in x:
        bits = mixed(bits + _bits(each))
    if name in POSITIVE:
        small = (bits % jnp.uint32(4)).astype(jnp.int32) + 1
    else:
        small = (bits % jnp.uint32(7)).astype(jnp.int32) - 3
    result = jnp.broadcast_to(small, shape).astype(floats[0].dtype)
    if name in ZERO_AT_ZERO:
        result = jnp.where(x[0] == 0, jnp.zeros_like(result), result)
    return result


def _bits(x: Any) -> Any:
    """A number for each element that tells it from others; 0 and -0 are one, and so are all that are not finite."""
    if not is_float(x):
        return x.astype(jnp.uint32)
    single = x.astype(jnp.float32)
    return lax.bitcast_convert_type(jnp.where((single == 0) | ~jnp.isfinite(single), 0.0, single), jnp.uint32)


@jax.jit
def folded(x: Any) -> Any:
    """Small whole numbers as they are, others scrambled into small ones."""
    if not x.size:
        return x
    small = (mixed(_bits(x)) % jnp.uint32(7)).astype(jnp.int32) - 3
    return jnp.where((jnp.abs(x) <= 4) & (jnp.round(x) == x), x, small.astype(x.dtype))


def mixed(bits: Any) -> Any:
    """Every bit of a number spread over all bits of the result. The low ones of a small whole number in float32 are zero."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ lax.shift_right_logical(bits, jnp.uint32(shift))) * jnp.uint32(factor)
    return bits ^ lax.shift_right_logical(bits, jnp.uint32(16))


@functools.partial(jax.jit, static_argnames=("known", "near"))
def _divided(x: Any, y: Any, *, known: float | None, near: bool) -> Any:
    """`x` over the power of two that is `near` y, as counts of devices and elements need it, or over 1 or 2."""
    if known is not None:
        return x / jnp.asarray(as_power_of_two(known), x.dtype)
    if not near:
        halves = (mixed(_bits(y)) % jnp.uint32(2)).astype(x.dtype) + 1
        return x / jnp.where(y < 0, -halves, halves)
    bits = lax.bitcast_convert_type(y.astype(jnp.float32), jnp.int32)
    exponent = ((bits >> 23) & 255) - 127 + ((bits & 0x7FFFFF) >= 0x3504F3).astype(jnp.int32)  # 1.414: the nearer power
    limit = 8 if y.dtype == jnp.float16 else 32
    exponent = jnp.where(y == 0, 0, jnp.clip(exponent, -limit, limit))
    power = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    return x / jnp.where(y < 0, -power, power).astype(x.dtype)


@functools.lru_cache(maxsize=4096)
def as_power_of_two(constant: float) -> float:
    """Each prime factor of a fraction becomes the power of two nearest to it. It is multiplicative: dividing by 3 and then
    by 7 is dividing by 21."""
    size = abs(constant)
    if constant == 0 or not math.isfinite(constant) or size >= 2.0**60:
        return constant
    fractions = [Fraction(size).limit_denominator(limit) for limit in (1, 64, 4096)]
    fractions += [Fraction(1, round(1 / size))] if size < 1 else []
    for each in fractions:
        if each and abs(float(each) / size - 1) < 2.0**-22 and max(each.numerator, each.denominator) <= 2**40:
            return math.copysign(2.0 ** (_exponent(each.numerator) - _exponent(each.denominator)), constant)
    return math.copysign(2.0 ** round(math.log2(size)), constant)


def _exponent(number: int) -> int:
    """The exponent of the power of two that stands for a whole number."""
    total, prime = 0, 2
    while prime * prime <= number:
        while number % prime == 0:
            number //= prime
            total += round(math.log2(prime))
        prime += 1
    return total + (round(math.log2(number)) if number > 1 else 0)


# -- whether a sum is exact --


def precision(dtype: Any) -> int:
    """How many bits a sum in `dtype` may need, with a few to spare for what is added to it on its way."""
    bits = jnp.finfo(dtype).nmant + 1
    return bits - 3 if bits > 16 else bits - 1


def bits_needed(primitive: Any, x: Sequence[Any], parameters: dict[str, Any]) -> Any:
    """The bits that a number must have to hold every partial sum that `primitive` could make of `x`."""
    floats = [index for index, each in enumerate(x) if is_float(each)]
    if not floats or not all(each.size for each in x):
        return jnp.float32(0)
    magnitudes = [jnp.abs(each) if index in floats else each for index, each in enumerate(x)]
    sums = primitive.bind(*magnitudes, **parameters)
    largest = [
        jnp.max(each.astype(jnp.float32)) for each in (sums if primitive.multiple_results else [sums]) if each.size
    ]
    if not largest:
        return jnp.float32(0)
    steps = [_step(x[index]) for index in floats]
    step = functools.reduce(jnp.add if primitive.name in PRODUCTS else jnp.minimum, steps)
    return jnp.log2(functools.reduce(jnp.maximum, largest)) - step.astype(jnp.float32)


@jax.jit
def _step(x: Any) -> Any:
    """The exponent of the largest power of two that all elements are multiples of."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    significand = jnp.where((bits & 0x7F800000) != 0, (bits & 0x7FFFFF) | 0x800000, bits & 0x7FFFFF)
    lowest = lax.population_count((significand & -significand) - 1)
    exponents = jnp.maximum((bits >> 23) & 255, 1) - 150 + lowest
    return jnp.min(jnp.where(significand == 0, 60, exponents))


def is_kept(x: Any, dtype: Any) -> Any:
    """Whether a narrower dtype holds every element exactly."""
    kind = jnp.finfo(dtype)
    return jnp.all(lax.reduce_precision(x, kind.nexp, kind.nmant) == x)
