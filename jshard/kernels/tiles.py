"""Padding of arrays to whole tiles, flattened to `[parts, rows, 128]` for a TPU, and back."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

LANES = 128
BLOCK = 256  # rows in a kernel's addition


def sublanes(dtype: DTypeLike) -> int:
    """Return the rows of a TPU tile: 8 of 32 bits, 16 of 16, 32 of 8."""
    return 32 // jnp.dtype(dtype).itemsize


def rows_for(size: int, dtype: DTypeLike) -> int:
    """Return the rows of 128 for `size` numbers, in whole tiles, and in whole blocks if there are several."""
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
    """Return the array of `shape` packed in `tiles` by `pack`."""
    return unpack_each(tiles[None], shape)[0]


def unpack_each(tiles: Array, shape: tuple[int, ...]) -> Array:
    """Return the array `[n, *shape]` packed in `tiles` by `pack_each`."""
    n = tiles.shape[0]
    return tiles.reshape(n, -1)[:, : math.prod(shape)].reshape(n, *shape)


def in_pieces(x: Array, pieces: int, body: Callable[[Array], Array]) -> Array:
    """Run `body` on `pieces` of `x[n, ...]` in turn, `[n, length]` each, and join its results, `[length]`."""
    n, shape, size = x.shape[0], x.shape[1:], math.prod(x.shape[1:])
    length = -(-size // pieces)
    flat = pad_to(x.reshape(n, size), n, pieces * length)
    if pieces == 1:
        return body(flat).reshape(shape)
    results = lax.map(body, jnp.moveaxis(flat.reshape(n, pieces, length), 1, 0))
    return results.reshape(-1)[:size].reshape(shape)


def round_up(size: int, unit: int) -> int:
    """Return the least positive multiple of `unit` that is at least `size`."""
    return max(-(-size // unit) * unit, unit)


def pad_to(x: Array, *shape: int) -> Array:
    """Pad `x` to `shape`, with zeros at the end of each axis."""
    return x if x.shape == shape else jnp.pad(x, [(0, most - size) for most, size in zip(shape, x.shape, strict=True)])
