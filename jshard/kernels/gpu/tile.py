"""Choose the tiles of a matrix product on a GPU, launch, and write tiles out: what the kernels of both families share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

Epilogue = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one block multiplies at a time: `rows` x `depth` of x by `depth` x `columns` of w, `stages` of them in flight.

    Blocks go through the result in bands of `band` tiles, so that what two neighbours share is still in cache.
    """

    rows: int
    columns: int
    depth: int = 64  # 128 bytes: the widest swizzle
    stages: int = 4
    band: int = 8


def tile_for(m: int, n: int, cores: int, rows: tuple[int, ...]) -> Tile:
    """Return the largest tile with one of `rows` that still gives every core one, for a small product the smallest.

    Not tuned: no GPU was at hand.
    """
    tiles = [Tile(height, columns) for height in rows for columns in (256, 128) if columns >= height]
    busy = [tile for tile in tiles if -(-m // tile.rows) * -(-n // tile.columns) >= cores]
    return (busy or tiles[-1:])[0]


def chunk(dtype: DTypeLike) -> int:
    """Return how many columns of the result are written out together: 64 bytes."""
    return 64 // jnp.dtype(dtype).itemsize


def swizzled(columns: int, dtype: DTypeLike) -> tuple[Any, Any]:
    """Return the layout of a tile in shared memory that copies and tensor cores read without bank conflicts."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def launch(
    body: Callable[..., None], operands: Sequence[Array | None], out: Any, *, blocks: int, warpgroups: int, scratch: Any
) -> Array:
    """Run a kernel on `blocks`. Its references are x, w, the bias if it is `biased`, the result and `scratch`."""
    given = [x for x in operands if x is not None]
    return plgpu.kernel(
        functools.partial(body, biased=len(given) > 2),
        out_type=out,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="group",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*given)


def write_out(sums: Array, bias_ref: Any, epilogue: Epilogue, slot: Any, y_ref: Any, rows: object, start: Any) -> None:
    """Add the bias to `sums`, apply `epilogue`, round, and copy to `y_ref` by way of `slot`, one of two in shared memory."""
    size = sums.shape[1]
    if bias_ref is not None:
        sums += lax.broadcast_in_dim(_load(bias_ref, start, size), sums.shape, (1,))
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before last is done: it was from this slot
    slot[...] = epilogue(sums).astype(y_ref.dtype)
    plgpu.commit_smem()  # what threads wrote is visible to the copy
    plgpu.copy_smem_to_gmem(slot, y_ref.at[rows, pl.ds(start, size)])


def _load(ref: Any, start: Any, size: int) -> Array:
    load: Any = plgpu.load
    index = inspect.signature(load).parameters.get("idx")
    if index is not None and index.default is index.empty:  # jax 0.10; jax 0.11 warns of it, and jax 0.12 has none
        return load(ref, pl.ds(start, size), optimized=False)
    return load(ref.at[pl.ds(start, size)], optimized=False)
