"""The matrix product of one TPU: tiles streamed through VMEM, summed in float32, bias and activation in the epilogue."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jshard.kernels.pallas_call import Shape, Told, launch
from jshard.kernels.tiles import LANES, padded, sublanes, up
from jshard.kernels.tpu.dma import wide

TILE = (512, 1024, 512)  # of m, n, k: 5 MiB of VMEM for bfloat16, two of each in flight


def tiling(size: int, most: int, unit: int) -> tuple[int, int]:
    """Tile and whole size: one tile if it fits, else tiles of `most`."""
    tile = min(up(size, unit), most)
    return tile, up(size, tile)


def matmul(
    x_mk: Array, w_kn: Array, bias: Array | None, activation: Callable[[Array], Array] | None, out_dtype: Any
) -> Array:
    """`activation(x @ w + bias)`, rounded once to `out_dtype`; any sizes, padded with zeros to whole tiles."""
    (m, k), n = x_mk.shape, w_kn.shape[1]
    (bm, mm), (bn, nn), (bk, kk) = (
        tiling(m, TILE[0], sublanes(x_mk.dtype)),
        tiling(n, TILE[1], LANES),
        tiling(k, TILE[2], LANES),
    )
    adds = wide(jnp.result_type(x_mk.dtype, w_kn.dtype))
    operands = [padded(x_mk, mm, kk), padded(w_kn, kk, nn)]
    specs = [pl.BlockSpec((bm, bk), lambda i, j, s: (i, s)), pl.BlockSpec((bk, bn), lambda i, j, s: (s, j))]
    if bias is not None:
        operands.append(jnp.pad(bias.astype(adds), (0, nn - n))[None])
        specs.append(pl.BlockSpec((1, bn), lambda i, j, s: (0, j)))
    size = x_mk.dtype.itemsize
    (y,) = launch(
        functools.partial(_matmul, activation=activation, biased=bias is not None, last=kk // bk - 1),
        operands,
        [Shape((mm, nn), out_dtype)],
        told=Told("matmul", "pallas"),
        in_specs=specs,
        out_specs=[pl.BlockSpec((bm, bn), lambda i, j, s: (i, j))],
        scratch=[pltpu.VMEM((bm, bn), adds)],
        grid=(mm // bm, nn // bn, kk // bk),
        parallel=2,
        flops=2 * m * n * k,
        vmem=2 * size * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn,
    )
    return y[:m, :n]


def _matmul(x_ref, w_ref, *rest, activation: Any, biased: bool, last: int) -> None:
    (b_ref, y_ref, total) = rest if biased else (None, *rest)
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=total.dtype)

    @pl.when(step == last)
    def _() -> None:
        y = total[...] if b_ref is None else total[...] + b_ref[...]
        y_ref[...] = (y if activation is None else activation(y)).astype(y_ref.dtype)
