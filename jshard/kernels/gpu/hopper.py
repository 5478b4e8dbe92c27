"""Multiply matrices on one Hopper GPU (sm_90), with bias and activation before the one rounding.

A block has three warpgroups: one loads tiles of x and w to shared memory, two multiply, each its half of the columns.
Blocks are persistent: each core goes on to the next tile of the result, neighbours first, as the cache has what they share.
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
    cores = min(cores, out.shape[0] // tile.rows * (out.shape[1] // tile.columns))
    wide = chunk(out.dtype)
    outgoing = plgpu.SMEM((2, 2, tile.rows, wide), out.dtype, transforms=swizzled(wide, out.dtype))
    body = functools.partial(_matmul, epilogue=epilogue, tile=tile)
    return launch(body, (x_mk, w_kn, bias), out, blocks=cores, warpgroups=3, scratch=[outgoing])


def _matmul(x_ref, w_ref, *refs, epilogue: Epilogue, biased: bool, tile: Tile) -> None:
    b_ref, y_ref, outgoing = refs if biased else (None, *refs)
    (m, k), n = x_ref.shape, w_ref.shape[1]
    half, wide = tile.columns // 2, chunk(y_ref.dtype)
    in_shared: Any = {"transforms": swizzled(tile.depth, x_ref.dtype), "memory_space": plgpu.SMEM}

    def pipeline(step: Any, context: Any) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // tile.depth,),
            in_specs=[
                plgpu.BlockSpec((tile.rows, tile.depth), lambda s: (0, s), **in_shared),
                plgpu.BlockSpec((tile.depth, tile.columns), lambda s: (s, 0), **in_shared),
            ],
            memory_registers=40,  # the warpgroup that loads computes nothing: the others get its registers
            max_concurrent_steps=tile.stages,
            num_compute_wgs=2,
            wg_axis="group",
            compute_context=context,
        )

    # The pipeline's buffers are allocated once, outside the loop over tiles. What it computes makes no difference to them.
    nothing = lambda *_, **__: None
    buffers = pipeline(nothing, nothing).get_allocations(x_ref, w_ref)

    @functools.partial(pl.run_scoped, buffers=buffers, collective_axes="group")
    def _(buffers: Any) -> None:
        group = lax.axis_index("group")

        @plgpu.nd_loop((m // tile.rows * (n // tile.columns),), collective_axes="block")
        def _(turn: Any) -> None:
            i, j = plgpu.planar_snake(turn.index[0], (m // tile.rows, n // tile.columns), 1, tile.band)
            rows, columns = pl.ds(i * tile.rows, tile.rows), pl.ds(j * tile.columns, tile.columns)
            mine = pl.ds(group * half, half)

            def multiply(_: object, x_tile: Any, w_tile: Any, total: Any) -> Any:
                plgpu.wgmma(total, x_tile, w_tile.at[:, mine])
                plgpu.wgmma_wait(0)  # the pipeline refills the slot that was read
                return total

            def sum_and_write(products: Any) -> None:
                @functools.partial(pl.run_scoped, total=plgpu.WGMMAAccumulatorRef((tile.rows, half), jnp.float32))
                def _(total: Any) -> None:
                    products(total)
                    y = total[...]
                    for piece in range(half // wide):
                        sums = y[:, piece * wide : (piece + 1) * wide]
                        start = j * tile.columns + group * half + piece * wide
                        write_out(sums, b_ref, epilogue, outgoing.at[group, piece % 2], y_ref, rows, start)

            pipeline(multiply, sum_and_write)(x_ref.at[rows, :], w_ref.at[:, columns], allocations=buffers)

    plgpu.wait_smem_to_gmem(0)  # a block that ends gives up its shared memory
