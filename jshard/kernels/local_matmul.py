"""Multiply matrices on one device, by XLA or by a kernel. XLA's is the specification."""

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
    """Compute `x[..., K] @ w[K, ...]`, the last axis of x against the first of w; compiles to what `x @ w` compiles to.

    `preferred_element_type` is the dtype to sum in and to return; None is the operands' own. With a `bias` or an `activation`
    the sum stays in float32 until they are applied, and is rounded once to `out_dtype`. "pallas" always sums in float32, and
    takes a w of two axes.
    """
    check_contraction("matmul", x, w)
    if activation is not None and activation not in ACTIVATIONS:
        use = f"use {', '.join(ACTIVATIONS)}, or apply it to the product"
        raise JShardError(f'matmul has no activation "{activation}"', hint=did_you_mean(activation, ACTIVATIONS, use))
    if (
        algorithm != "xla"
        and resolve_algorithm("matmul", algorithm, x, (), lambda: unsupported_operands(x, w, precision)) == "pallas"
    ):
        out = jnp.result_type(x, w) if out_dtype is None else out_dtype
        out = out if preferred_element_type is None else preferred_element_type
        return _pallas(x, w, bias, activation, jnp.dtype(out))
    return _xla(x, w, bias, activation, out_dtype, precision, preferred_element_type)


def check_contraction(op_name: str, x: Array, w: Array) -> None:
    """Raise unless the last axis of `x` and the first of `w` have one size."""
    if not x.ndim or not w.ndim or x.shape[-1] != w.shape[0]:
        raise JShardError(
            f"{op_name} of x{x.shape} and w{w.shape}: the last axis of x does not match the first of w",
            hint="use a w with as many rows as x has columns",
        )


def _xla(x, w, bias, activation, out_dtype, precision, preferred) -> Array:
    out = out_dtype
    if bias is not None or activation is not None:
        out = jnp.result_type(x, w) if out is None else out
        preferred = jnp.float32 if preferred is None and jnp.issubdtype(out, jnp.floating) else preferred
    contract = ((x.ndim - 1,), (0,)), ((), ())
    y = lax.dot_general(x, w, contract, precision=precision, preferred_element_type=preferred)
    y = y if bias is None else y + bias.astype(y.dtype)
    y = y if activation is None else ACTIVATIONS[activation](y)
    return y if out is None else y.astype(out)


def unsupported_operands(x: Array, w: Array, precision: lax.PrecisionLike = None) -> tuple[str, str] | None:
    """Say why no kernel multiplies `x` by `w`, and what to type instead; None if one does."""
    use_auto = 'use algorithm="auto"'
    if w.ndim != 2:
        return f"its kernel takes a w of two axes, and w is {w.shape}", use_auto
    if w.dtype != x.dtype:
        return f"its kernel takes operands of one dtype, and x is {x.dtype} and w {w.dtype}", "cast one of them"
    if precision is not None:
        return "its kernel has no precision to choose", use_auto
    if not (x.size and w.size):
        return f"x{x.shape} and w{w.shape} hold nothing to multiply", use_auto
    return None


def _pallas(x: Array, w: Array, bias: Array | None, activation: str | None, out_dtype) -> Array:
    """Multiply x of any number of axes by the kernel."""
    x_mk, w, *bias_ = collectives.pvary_alike(x.reshape(-1, x.shape[-1]), w, *([] if bias is None else [bias]))
    y: Array = _product(x_mk, w, bias_[0] if bias_ else None, activation, out_dtype)
    return y.reshape(*x.shape[:-1], w.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x: Array, w: Array, bias: Array | None, activation: str | None, out_dtype) -> Array:
    return _kernel(x, w, bias, activation, out_dtype)


def _product_bwd(activation: str | None, out_dtype, residuals, cotangent: Array):
    """Differentiate by two products of the same kernel, and one more that recomputes the operand of an activation."""
    x, w, bias = residuals
    if activation is not None:
        pre_activation = _kernel(x, w, bias, None, jnp.dtype(jnp.float32))
        cotangent = jax.vjp(ACTIVATIONS[activation], pre_activation)[1](cotangent.astype(jnp.float32))[0]
    narrow = cotangent.astype(x.dtype)  # the kernel takes operands of one dtype
    return (
        _kernel(narrow, w.T, None, None, x.dtype),
        _kernel(x.T, narrow, None, None, w.dtype),
        None if bias is None else cotangent.astype(jnp.float32).sum(0).astype(bias.dtype),
    )


_product.defvjp(lambda x, w, bias, *static: (_product(x, w, bias, *static), (x, w, bias)), _product_bwd)


@functools.partial(jax.jit, static_argnums=(3, 4))  # equal calls share one trace
def _kernel(x: Array, w: Array, bias: Array | None, activation: str | None, out_dtype) -> Array:
    if present_chip().platform == "gpu":
        return _on_gpu(x, w, bias, activation, out_dtype)
    from jshard.kernels.tpu import matmul as tpu

    return tpu.matmul(x, w, bias, None if activation is None else ACTIVATIONS[activation], out_dtype)


def _on_gpu(x: Array, w: Array, bias: Array | None, activation: str | None, out_dtype) -> Array:
    """Multiply on a GPU. Under vmap over x alone it is one product of more rows; else one product after the other, as
    Mosaic has no batching rule."""
    from jshard.kernels.gpu import matmul as gpu

    def product(x: Array, w: Array, *bias: Array) -> Array:
        return gpu.matmul(x, w, bias[0] if bias else None, activation, out_dtype)

    run = jax.custom_batching.custom_vmap(product)

    def batch(size: int, batched: list[bool], *operands: Array) -> tuple[Array, bool]:
        x, *others = operands
        if not any(batched[1:]):  # only x has a batch: its examples are more rows
            return run(x.reshape(-1, x.shape[-1]), *others).reshape(*x.shape[:-1], -1), True
        full = [
            operand if has_batch else jnp.broadcast_to(operand, (size, *operand.shape))
            for operand, has_batch in zip(operands, batched, strict=True)
        ]
        return lax.map(lambda each: run(*each), tuple(full)), True

    run.def_vmap(batch)
    return run(x, w) if bias is None else run(x, w, bias)
