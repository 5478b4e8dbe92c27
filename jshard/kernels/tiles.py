"""Pad arrays to whole tiles: for a TPU flattened to `[parts, rows, 128]`; and back."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

LANES = 128
BLOCK = 256  # rows that a kernel adds at a time


def sublanes(dtype: DTypeLike) -> int:
    """Return the rows of one TPU tile: 8 of 32 bits, 16 of 16, 32 of 8."""
    return 32 // jnp.dtype(dtype).itemsize


def rows_for(size: int, dtype: DTypeLike) -> int:
    """Return the rows of 128 that hold `size` numbers, in whole tiles, and in whole blocks where there are several."""
    rows = -(-size // LANES)
    return round_up(rows, sublanes(dtype) if rows <= BLOCK else BLOCK)


def pack(x: Array, parts: int) -> Array:
    """Flatten `x`, cut it into `parts` and pad each to whole tiles: `[parts, rows, 128]`."""
    return pack_each(x[None], parts)[0]


def pack_each(x: Array, parts: int) -> Array:
    """Pack each of the n arrays of `x[n, ...]`: `[n, parts, rows, 128]`."""
    n, size = x.shape[0], math.prod(x.shape[1:])
    rows = rows_for(-(-size // parts), x.dtype)
    return pad_to(x.reshape(n, size), n, parts * rows * LANES).reshape(n, parts, rows, LANES)


def unpack(tiles: Array, shape: tuple[int, ...]) -> Array:
    """Return the array of `shape` that `pack` made `tiles` of."""
    return unpack_each(tiles[None], shape)[0]


def unpack_each(tiles: Array, shape: tuple[int, ...]) -> Array:
    """Return the array `[n, *shape]` that `pack_each` made `tiles` of."""
    n = tiles.shape[0]
    return tiles.reshape(n, -1)[:, : math.prod(shape)].reshape(n, *shape)


def in_pieces(x: Array, pieces: int, body: Callable[[Array], Array]) -> Array:
    """Run `body` on `pieces` of `x[n, ...]`, `[n, length]` each, one after the other, and join its results, `[length]`."""
    n, shape, size = x.shape[0], x.shape[1:], math.prod(x.shape[1:])
    length = -(-size // pieces)
    flat = pad_to(x.reshape(n, size), n, pieces * length)
    if pieces == 1:
        return body(flat).reshape(shape)
    results = lax.map(body, jnp.moveaxis(flat.reshape(n, pieces, length), 1, 0))
    return results.reshape(-1)[:size].reshape(shape)


def round_up(size: int, unit: int) -> int:
    """Return the least multiple of `unit` that is not below `size`, and at least one unit."""
    return max(-(-size // unit) * unit, unit)


def pad_to(x: Array, *shape: int) -> Array:
    """Pad `x` to `shape`, with zeros behind it along each axis."""
    return x if x.shape == shape else jnp.pad(x, [(0, most - size) for most, size in zip(shape, x.shape, strict=True)])
