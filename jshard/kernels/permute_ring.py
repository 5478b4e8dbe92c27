"""Gather and scatter by permutes, both ways round a ring, in plain JAX: alone, or around the pieces of a product.

Any backend runs them. XLA for TPUs sends a permute while it computes, which it does of no reduce-scatter. To the right a number
passes n // 2 devices, to the left (n - 1) // 2. What is scattered is added where it passes, and rounded to its dtype there: the
order is the same in every run, but another than XLA's, and another for each device that keeps a part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels.collectives import axis_index, axis_size, permute, pvary
from jshard.kernels.local_matmul import matmul

Names = tuple[str, ...]


def all_gather(x: Array, names: Names, use: Callable[[Array, Array], None] = lambda part, device: None) -> Array:
    """Gather `x` of all devices, `[n, ...]`. Each part is used, `use(part, its device)`, while others travel."""
    n, to_right, to_left, arrived = axis_size(names), x, x, [(x, 0)]
    full = pvary(jnp.zeros((n, *x.shape), x.dtype), tuple(jnp.asarray(x).aval.mat.varying))
    for hop in range(1, n // 2 + 2):
        underway = []
        if hop <= n // 2:
            to_right = permute(to_right, names, shift=1)
            underway.append((to_right, -hop))
        if hop <= (n - 1) // 2:
            to_left = permute(to_left, names, shift=-1)
            underway.append((to_left, hop))
        for part, away in arrived:
            device = _device(names, away)
            use(part, device)
            full = lax.dynamic_update_index_in_dim(full, part, device, 0)
        arrived = underway
    return full


def reduce_scatter(part: Callable[[Array], Array], names: Names, dtype: Any) -> Array:
    """Sum what the devices have for each of them; each keeps its own sum. `part(device)` is what this one has for that,
    made while sums travel; it may be wider than `dtype`, in which they do."""
    n = axis_size(names)
    right = left = None
    for hop in range(n // 2, 0, -1):
        right = permute(_plus(right, part(_device(names, hop)), dtype), names, shift=1)
        if hop <= (n - 1) // 2:
            left = permute(_plus(left, part(_device(names, -hop)), dtype), names, shift=-1)
    mine = part(_device(names, 0))
    return _plus(right, mine if left is None else mine + left, dtype)


def all_gather_matmul(x: Array, w: Array, names: Names, out: Any) -> tuple[Array, Array]:
    """Return `all_gather(x) @ w`, `[n, ..., N]`, and the gathered x."""
    y = []

    def multiply(part: Array, device: Array) -> None:
        product = matmul(part, w, out_dtype=out, algorithm="xla")
        if not y:
            zeros = jnp.zeros((axis_size(names), *product.shape), product.dtype)
            y.append(pvary(zeros, tuple(product.aval.mat.varying)))
        y[0] = lax.dynamic_update_index_in_dim(y[0], product, device, 0)

    gathered = all_gather(x, names, multiply)
    return y[0], gathered


def matmul_reduce_scatter(x: Array, w: Array, names: Names, out: Any) -> Array:
    """Return this device's part of the sum over devices of `x[n, ..., K] @ w`."""
    wide = jnp.float32 if jnp.issubdtype(out, jnp.floating) else out
    piece = functools.partial(lax.dynamic_index_in_dim, x, keepdims=False)
    return reduce_scatter(lambda device: matmul(piece(device), w, out_dtype=wide, algorithm="xla"), names, out)


def _device(names: Names, away: int) -> Array:
    """The device that is so many places to the right of this one."""
    n = axis_size(names)
    return lax.rem(axis_index(names) + away % n, n)


def _plus(total: Array | None, part: Array, dtype: Any) -> Array:
    return (part if total is None else total + part).astype(dtype)
