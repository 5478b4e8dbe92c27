"""Matrix products on a single GPU by JAX's own Mosaic kernels, padded to whole tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jshard.kernels.chip import present_chip
from jshard.kernels.collectives import pvary
from jshard.kernels.invariant_cast import invariant_cast_p
from jshard.kernels.select_algorithm import GPU_GENERATIONS
from jshard.kernels.tiles import pad_to, round_up

# The identity. Its `flops` are those of the next product, as a plan can't see into a GPU kernel.
multiplied_p = Primitive("multiplied")
multiplied_p.def_abstract_eval(lambda x, *, flops: x)
multiplied_p.def_impl(lambda x, *, flops: x)
mlir.register_lowering(multiplied_p, lambda _, x, *, flops: [x])

# Rows and columns of a tile of the result, the largest first. Two cores of a Blackwell share a tile of 256 x 256.
TILES = {"hopper": ((128, 256), (128, 128), (64, 128)), "blackwell": ((256, 256), (128, 128))}
DEPTH = 64  # of a tile, along the contracted axis: 128 bytes, the widest swizzle
STAGES = 4  # tiles in flight
BAND = 8  # tiles side by side in the order of blocks, so that neighbours find shared operands in cache


def matmul(x_mk: Array, w_kn: Array, out_dtype: jnp.dtype) -> Array:
    """Compute `x @ w` of 16-bit operands of any size, summed in float32.

    A Hopper rounds once, to `out_dtype`. A Blackwell's kernel returns the operands' dtype, also where `out_dtype` is wider.
    """
    (m, k), n, chip = x_mk.shape, w_kn.shape[1], present_chip()
    generation = GPU_GENERATIONS[chip.gpu["major"]]
    rows, columns = tile_for(m, n, chip.gpu["cores"], generation)
    x = pad_to(x_mk, round_up(m, rows), round_up(k, DEPTH))
    w = pad_to(w_kn, round_up(k, DEPTH), round_up(n, columns))
    varying = jax.typeof(x).mat.varying | jax.typeof(w).mat.varying
    x = multiplied_p.bind(x, flops=2 * m * n * k)
    x, w = invariant_cast_p.bind(x), invariant_cast_p.bind(w)  # the kernels know no check_vma
    y = _hopper(x, w, rows, columns, out_dtype) if generation == "hopper" else _blackwell(x, w, rows)
    return pvary(y, tuple(sorted(varying)))[:m, :n].astype(out_dtype)


def tile_for(m: int, n: int, cores: int, generation: str) -> tuple[int, int]:
    """Return the largest tile with at least a tile for every core, for a small product the smallest. Not tuned."""
    tiles = TILES[generation]
    busy = [(rows, columns) for rows, columns in tiles if -(-m // rows) * -(-n // columns) >= cores]
    return (busy or tiles[-1:])[0]


def _hopper(x: Array, w: Array, rows: int, columns: int, out_dtype: jnp.dtype) -> Array:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as kernel

    is_wide = out_dtype != x.dtype
    config = kernel.TuningConfig(
        rows, columns // 2, DEPTH, STAGES, epi_tile_n=32 if is_wide else 64, grid_tile_width=BAND,
        grid_minor_dim=kernel.MatmulDimension.N, wg_dimension=kernel.MatmulDimension.N,
    )  # fmt: skip
    # The kernel adds a third operand, and returns its dtype.
    return kernel.matmul(x, w, jnp.zeros((x.shape[0], w.shape[1]), jnp.float32) if is_wide else None, config)


def _blackwell(x: Array, w: Array, rows: int) -> Array:
    from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu as kernel

    config = kernel.TuningConfig(128, 128, DEPTH, STAGES, rows == 256, epilogue_tile_n=32, grid_tile_width=BAND)
    return kernel.matmul_kernel(x, w, config)
