"""Multiply matrices on one Blackwell GPU (sm_100), with bias and activation before the one rounding.

A block has one tile of the result, whose sums stay in tensor memory, and two warpgroups: one loads tiles of x and w to
shared memory, the other feeds them to the tensor core and, when all are summed, writes the result out.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jshard.kernels.gpu.tile import Epilogue, Tile, chunk, launch, swizzled, write_out


def matmul(x_mk: Array, w_kn: Array, bias: Array | None, epilogue: Epilogue, out: Any, tile: Tile, cores: int) -> Array:
    """Compute `epilogue(x @ w + bias)`, rounded once to `out.dtype`. Sizes are whole tiles; `bias` is float32."""
    del cores  # as many blocks as tiles: the GPU hands them out
    m, n = out.shape
    wide, pieces = chunk(out.dtype), swizzled(tile.depth, x_mk.dtype)
    scratch = [
        plgpu.SMEM((tile.stages, tile.rows, tile.depth), x_mk.dtype, transforms=pieces),
        plgpu.SMEM((tile.stages, tile.depth, tile.columns), x_mk.dtype, transforms=pieces),
        plgpu.TMEM((tile.rows, tile.columns), jnp.float32),
        plgpu.SMEM((2, tile.rows, wide), out.dtype, transforms=swizzled(wide, out.dtype)),
        plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),  # arrived: a tile of x and one of w
        plgpu.Barrier(num_barriers=tile.stages, orders_tensor_core=True),  # read: the slot may be loaded again
        plgpu.Barrier(orders_tensor_core=True),  # done: all is summed
    ]
    blocks = m // tile.rows * (n // tile.columns)
    body = functools.partial(_matmul, epilogue=epilogue, tile=tile)
    return launch(body, (x_mk, w_kn, bias), out, blocks=blocks, warpgroups=2, scratch=scratch)


def _matmul(x_ref, w_ref, *refs, epilogue: Epilogue, biased: bool, tile: Tile) -> None:
    b_ref, y_ref, xs, ws, total, outgoing, arrived, read, done = refs if biased else (None, *refs)
    (m, k), n = x_ref.shape, w_ref.shape[1]
    steps, wide = k // tile.depth, chunk(y_ref.dtype)
    i, j = plgpu.planar_snake(lax.axis_index("block"), (m // tile.rows, n // tile.columns), 1, tile.band)
    rows, columns = pl.ds(i * tile.rows, tile.rows), pl.ds(j * tile.columns, tile.columns)

    @pl.when(lax.axis_index("group") == 0)
    def _() -> None:
        def load(step: int | Array, _: None) -> None:
            slot, depth = lax.rem(step, tile.stages), pl.ds(step * tile.depth, tile.depth)

            @pl.when(step >= tile.stages)  # the slot has a tile that the tensor core may still read
            def _() -> None:
                plgpu.barrier_wait(read.at[slot])

            plgpu.copy_gmem_to_smem(x_ref.at[rows, depth], xs.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(w_ref.at[depth, columns], ws.at[slot], arrived.at[slot])

        lax.fori_loop(0, steps, load, None)

    @pl.when(lax.axis_index("group") == 1)
    def _() -> None:
        def multiply(step: int | Array, _: None) -> None:
            slot = lax.rem(step, tile.stages)
            plgpu.barrier_wait(arrived.at[slot])
            # the first product overwrites what tensor memory held
            plgpu.tcgen05_mma(total, xs.at[slot], ws.at[slot], read.at[slot], accumulate=step > 0)

        lax.fori_loop(0, steps, multiply, None)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        for piece in range(tile.columns // wide):
            sums = plgpu.async_load_tmem(total.at[:, pl.ds(piece * wide, wide)])
            write_out(sums, b_ref, epilogue, outgoing.at[piece % 2], y_ref, rows, j * tile.columns + piece * wide)
        plgpu.wait_smem_to_gmem(0)  # a block that ends gives up its shared memory
