"""How a product is cut for a GPU, and the few words that its kernels share."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Epilogue = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one block multiplies at a time: `rows` x `depth` of x by `depth` x `columns` of w, `stages` of them on the way.
    Blocks go through the result in bands of `band` tiles, so that neighbours find in cache what they share."""

    rows: int
    columns: int
    depth: int = 64  # 128 bytes: the widest swizzle
    stages: int = 4
    band: int = 8


def tile_for(m: int, n: int, cores: int, rows: tuple[int, ...]) -> Tile:
    """The largest tile, of at most `rows`, that still gives every core one; of a small product the smallest. Not tuned: no
    GPU was at hand."""
    tiles = [Tile(most, columns) for most in rows for columns in (256, 128) if columns >= most]
    busy = [tile for tile in tiles if -(-m // tile.rows) * -(-n // tile.columns) >= cores]
    return (busy or tiles[-1:])[0]


def chunk(dtype: Any) -> int:
    """Columns of the result that leave together: 64 bytes."""
    return 64 // jnp.dtype(dtype).itemsize


def swizzled(columns: int, dtype: Any) -> tuple[Any, Any]:
    """How a tile lies in shared memory, for copies and tensor cores to read it without conflicts."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def row(ref: Any, start: Any, size: int) -> Array:
    """So many numbers of a vector in the GPU's memory."""
    load: Any = plgpu.load
    if "idx" in inspect.signature(load).parameters:  # until jax 0.11
        return load(ref, pl.ds(start, size), optimized=False)
    return load(ref.at[pl.ds(start, size)], optimized=False)
