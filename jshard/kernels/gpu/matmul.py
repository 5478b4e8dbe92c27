"""Multiply matrices on one GPU, padded to whole tiles.

JAX's own Mosaic kernel computes the bare product. Ours is for a bias, an activation or another dtype of the result, which
must come before the rounding, and for interpret mode, which JAX's own is not made for.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jshard.errors import JShardError
from jshard.kernels.chip import interpretation, present_chip
from jshard.kernels.collectives import pvary
from jshard.kernels.gpu.tile import Epilogue, Tile, tile_for
from jshard.kernels.invariant_cast import invariant_cast_p
from jshard.kernels.select_algorithm import GPU_GENERATIONS
from jshard.kernels.tiles import pad_to, round_up

# Returns its operand. It tells a plan, which can't see into a GPU kernel, the operations of the product that follows.
multiplied_p = Primitive("multiplied")
multiplied_p.def_abstract_eval(lambda x, *, flops: x)
multiplied_p.def_impl(lambda x, *, flops: x)
mlir.register_lowering(multiplied_p, lambda _, x, *, flops: [x])

EPILOGUES: dict[str | None, Epilogue] = {
    None: lambda x: x,
    "relu": lambda x: jnp.maximum(x, 0),  # jax.nn.relu has a custom derivative, which Mosaic on jax 0.10 can't lower
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
STORED = ("float32", "bfloat16", "float16")


def matmul(x_mk: Array, w_kn: Array, bias: Array | None, activation: str | None, out_dtype: jnp.dtype) -> Array:
    """Compute `activation(x @ w + bias)` of 16-bit operands of any size, summed in float32, rounded once to `out_dtype`."""
    (m, k), n, chip = x_mk.shape, w_kn.shape[1], present_chip()
    generation, cores = GPU_GENERATIONS[chip.gpu["major"]], chip.gpu["cores"]
    dtype = jnp.dtype(out_dtype if str(out_dtype) in STORED else jnp.float32)
    tile = tile_for(m, n, cores, (128, 64) if generation == "hopper" else (128,))
    bare = bias is None and activation is None and dtype == x_mk.dtype and interpretation() is None
    rows, columns, run = _jax_kernel(generation, m, n, tile, cores) if bare else (tile.rows, tile.columns, None)
    padded_m, padded_n, padded_k = round_up(m, rows), round_up(n, columns), round_up(k, tile.depth)
    operands = [pad_to(x_mk, padded_m, padded_k), pad_to(w_kn, padded_k, padded_n)]
    if bias is not None:
        operands.append(pad_to(bias.astype(jnp.float32), padded_n))

    def ours(x: Array, w: Array, bias: Array | None = None) -> Array:
        kernel = importlib.import_module(f"jshard.kernels.gpu.{generation}").matmul
        out = jax.ShapeDtypeStruct((padded_m, padded_n), dtype)
        return kernel(x, w, bias, EPILOGUES[activation], out, tile, cores)

    operands[0] = multiplied_p.bind(operands[0], flops=2 * m * n * k)
    with _interpreted():
        y = (run or ours)(*(invariant_cast_p.bind(x) for x in operands))  # Mosaic GPU has no rule for check_vma
    varying = sorted(frozenset().union(*(jax.typeof(x).mat.varying for x in operands)))
    return pvary(y, tuple(varying))[:m, :n].astype(out_dtype)


def _jax_kernel(generation: str, m: int, n: int, tile: Tile, cores: int) -> tuple[int, int, Any]:
    """Return the rows and columns of the tiles of JAX's own kernel for the bare product, and the kernel."""
    module = importlib.import_module(f"jax.experimental.pallas.ops.gpu.{generation}_matmul_mgpu")
    if generation == "hopper":
        config = module.TuningConfig(
            tile.rows, tile.columns // 2, tile.depth, tile.stages, grid_minor_dim=module.MatmulDimension.N,
            grid_tile_width=tile.band, wg_dimension=module.MatmulDimension.N,
        )  # fmt: skip
        return tile.rows, tile.columns, lambda x, w: module.matmul(x, w, None, config)
    pairs = -(-m // 256) * -(-n // 256) * 2 >= cores  # two cores at one tile of 256 x 256, if that keeps all busy
    side = 256 if pairs else 128
    config = module.TuningConfig(128, 128, tile.depth, 4, pairs, epilogue_tile_n=32, grid_tile_width=tile.band)
    return side, side, lambda x, w: module.matmul_kernel(x, w, config)


def _interpreted() -> contextlib.AbstractContextManager[Any]:
    mode = interpretation()
    if mode is None:
        return contextlib.nullcontext()
    plgpu: Any = mosaic_gpu  # what interprets is public from jax 0.11.2 on
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise JShardError(
            f"jax {jax.__version__} interprets no kernels for GPUs", hint='type: pip install "jax>=0.11.2"'
        )
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=mode.races))
