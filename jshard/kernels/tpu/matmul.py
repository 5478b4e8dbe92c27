"""Matrix products on a single TPU: tiles streamed through VMEM, sums in float32, rounded once."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jshard.kernels.pallas_call import KernelCost, Result, launch
from jshard.kernels.tiles import LANES, pad_to, round_up, sublanes
from jshard.kernels.tpu.dma import accumulator_dtype

TILE = (512, 1024, 512)  # of m, n, k: 5 MiB of VMEM for bfloat16, as Pallas keeps two of each tile to hide their copies


def tiling(size: int, largest: int, unit: int) -> tuple[int, int]:
    """Return the tile and the padded size of an axis: a single tile if it fits, else tiles of `largest`."""
    tile = min(round_up(size, unit), largest)
    return tile, round_up(size, tile)


def matmul(x_mk: Array, w_kn: Array, out_dtype: jnp.dtype) -> Array:
    """Compute `x @ w` of any sizes. Zeros pad operands to whole tiles."""
    (m, k), n = x_mk.shape, w_kn.shape[1]
    tile_m, padded_m = tiling(m, TILE[0], sublanes(x_mk.dtype))
    tile_n, padded_n = tiling(n, TILE[1], LANES)
    tile_k, padded_k = tiling(k, TILE[2], LANES)
    accumulator = accumulator_dtype(jnp.result_type(x_mk.dtype, w_kn.dtype))
    operands = [pad_to(x_mk, padded_m, padded_k), pad_to(w_kn, padded_k, padded_n)]
    specs = [
        pl.BlockSpec((tile_m, tile_k), lambda i, j, s: (i, s)),
        pl.BlockSpec((tile_k, tile_n), lambda i, j, s: (s, j)),
    ]
    tiles = tile_m * tile_k + tile_k * tile_n + tile_m * tile_n
    y = launch(
        functools.partial(_matmul, last=padded_k // tile_k - 1),
        operands,
        Result((padded_m, padded_n), out_dtype),
        pl.GridSpec(
            grid=(padded_m // tile_m, padded_n // tile_n, padded_k // tile_k),
            in_specs=specs,
            out_specs=pl.BlockSpec((tile_m, tile_n), lambda i, j, s: (i, j)),
            scratch_shapes=[pltpu.VMEM((tile_m, tile_n), accumulator)],
        ),
        parallel=2,  # k comes last and in order: it is summed over
        cost=KernelCost(
            "matmul", "pallas", flops=2 * m * n * k, vmem=2 * x_mk.dtype.itemsize * tiles + 4 * tile_m * tile_n
        ),
    )
    return y[:m, :n]


def _matmul(x_ref, w_ref, y_ref, total, *, last: int) -> None:
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=total.dtype)

    @pl.when(step == last)
    def _() -> None:
        y_ref[...] = total[...].astype(y_ref.dtype)
