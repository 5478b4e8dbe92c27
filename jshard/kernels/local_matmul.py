"""Matrix products on a single device, by XLA or by a kernel. XLA's product is the specification."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jshard.errors import JShardError, did_you_mean
from jshard.kernels import collectives
from jshard.kernels.chip import present_chip
from jshard.kernels.select_algorithm import resolve_algorithm

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
Activation = Literal["relu", "gelu", "silu", "tanh"]


def matmul(
    x: Array,
    w: Array,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    algorithm: Literal["auto", "pallas", "xla"] = "auto",
) -> Array:
    """Compute `x[..., K] @ w[K, ...]`, the last axis of x against the first of w. It compiles to the code of `x @ w`.

    `preferred_element_type` is the dtype to sum in and to return; None is the operands' own. With a `bias` or an
    `activation` the sum stays in float32 until they are applied, and is rounded once to `out_dtype`. "pallas" always
    sums in float32, and takes a w of two axes; on a Blackwell GPU it rounds the sum to the operands' dtype first.
    """
    check_contraction("matmul", x, w)
    if activation is not None and activation not in ACTIVATIONS:
        use = f"use {', '.join(ACTIVATIONS)}, or apply it to the product"
        raise JShardError(f'matmul has no activation "{activation}"', hint=did_you_mean(activation, ACTIVATIONS, use))
    out, wide = out_dtype, preferred_element_type
    if bias is not None or activation is not None:
        out = jnp.result_type(x, w) if out is None else out
        wide = jnp.float32 if wide is None and jnp.issubdtype(out, jnp.floating) else wide
    unsupported = lambda: _unsupported_operands(x, w, precision)
    if algorithm != "xla" and resolve_algorithm("matmul", algorithm, x, (), unsupported) == "pallas":
        y = _pallas(x, w, jnp.dtype(wide or out or jnp.result_type(x, w)))
    else:
        contract = ((x.ndim - 1,), (0,)), ((), ())
        y = lax.dot_general(x, w, contract, precision=precision, preferred_element_type=wide)
    y = y if bias is None else y + bias.astype(y.dtype)
    y = y if activation is None else ACTIVATIONS[activation](y)
    return y if out is None else y.astype(out)


def check_contraction(op_name: str, x: Array, w: Array) -> None:
    """Raise unless the last axis of `x` and the first of `w` are of equal size."""
    if not x.ndim or not w.ndim or x.shape[-1] != w.shape[0]:
        raise JShardError(
            f"{op_name} of x{x.shape} and w{w.shape}: the last axis of x does not match the first of w",
            hint="use a w with as many rows as x has columns",
        )


def _unsupported_operands(x: Array, w: Array, precision: lax.PrecisionLike) -> tuple[str, str] | None:
    """Return the reason why no kernel multiplies `x` by `w`, and a hint; None if a kernel can."""
    use_auto = 'use algorithm="auto"'
    if w.ndim != 2:
        return f"its kernel takes a w of two axes, and w is {w.shape}", use_auto
    if w.dtype != x.dtype:
        return f"its kernel takes operands of equal dtype, and x is {x.dtype} and w {w.dtype}", "cast one of them"
    if precision is not None:
        return "its kernel has no precision to choose", use_auto
    if not (x.size and w.size):
        return f"x{x.shape} or w{w.shape} is empty", use_auto
    return None


def _pallas(x: Array, w: Array, out_dtype: jnp.dtype) -> Array:
    """Multiply x of any number of axes by the kernel."""
    x_mk, w = collectives.pvary_alike(x.reshape(-1, x.shape[-1]), w)
    y: Array = _product(x_mk, w, out_dtype)
    return y.reshape(*x.shape[:-1], w.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, w: Array, out_dtype: jnp.dtype) -> Array:
    return _kernel(x, w, out_dtype)


def _product_bwd(out_dtype: jnp.dtype, operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, w = operands
    narrow = cotangent.astype(x.dtype)  # the kernel takes operands of equal dtype
    return _kernel(narrow, w.T, x.dtype), _kernel(x.T, narrow, w.dtype)


_product.defvjp(lambda x, w, out_dtype: (_product(x, w, out_dtype), (x, w)), _product_bwd)


@functools.partial(jax.jit, static_argnums=2)  # equal calls share one trace
def _kernel(x: Array, w: Array, out_dtype: jnp.dtype) -> Array:
    if present_chip().platform == "gpu":
        from jshard.kernels import gpu_matmul

        # Mosaic has no batching rule for GPUs
        return jax.custom_batching.sequential_vmap(lambda x, w: gpu_matmul.matmul(x, w, out_dtype))(x, w)
    from jshard.kernels.tpu import matmul as tpu

    return tpu.matmul(x, w, out_dtype)
