"""Any array as whole tiles: padded; of a TPU, flattened, padded with zeros, `[parts, rows, 128]`; and back."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

LANES = 128
BLOCK = 256  # rows that a kernel adds at a time


def sublanes(dtype: Any) -> int:
    """Rows of one tile: 8 of 32 bits, 16 of 16, 32 of 8."""
    return 32 // jnp.dtype(dtype).itemsize


def rows_for(size: int, dtype: Any) -> int:
    """Rows of 128 that hold `size` numbers, in whole tiles, and in whole blocks where there are several."""
    rows = -(-size // LANES)
    unit = sublanes(dtype) if rows <= BLOCK else BLOCK
    return max(-(-rows // unit) * unit, unit)


def pack(x: Array, parts: int) -> Array:
    """`x` cut along its flattened self into `parts` of whole tiles: `[parts, rows, 128]`."""
    rows = rows_for(-(-x.size // parts), x.dtype)
    return padded(x.reshape(-1), parts * rows * LANES).reshape(parts, rows, LANES)


def pack_each(x: Array, parts: int) -> Array:
    """`x[n, ...]` with each of its n cut into `parts`: `[n, parts, rows, 128]`."""
    n, size = x.shape[0], math.prod(x.shape[1:])
    rows = rows_for(-(-size // parts), x.dtype)
    flat = x.reshape(n, size)
    return jnp.pad(flat, ((0, 0), (0, parts * rows * LANES - size))).reshape(n, parts, rows, LANES)


def unpack(tiles: Array, shape: tuple[int, ...]) -> Array:
    """The array of `shape` that `pack` made `tiles` of."""
    return tiles.reshape(-1)[: math.prod(shape)].reshape(shape)


def unpack_each(tiles: Array, shape: tuple[int, ...]) -> Array:
    """The array `[n, *shape]` that `pack_each` made `tiles` of."""
    n = tiles.shape[0]
    return tiles.reshape(n, -1)[:, : math.prod(shape)].reshape(n, *shape)


def up(size: int, unit: int) -> int:
    """The least multiple of `unit` that holds `size`; of nothing, one."""
    return max(-(-size // unit) * unit, unit)


def padded(x: Array, *shape: int) -> Array:
    """`x` with zeros after it along each axis, to `shape`."""
    return x if x.shape == shape else jnp.pad(x, [(0, most - size) for most, size in zip(shape, x.shape, strict=True)])
