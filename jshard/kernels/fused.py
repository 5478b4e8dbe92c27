"""All-gather then matmul, matmul then reduce-scatter, whose wire runs under the products: one kernel, or permutes.

Each is the gradient of the other. Their specification is the two ops one after the other, by XLA.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jshard.errors import JShardError
from jshard.kernels import collectives, permute_ring
from jshard.kernels.collectives import MeshAxis
from jshard.kernels.gather_scatter import all_gather, reduce_scatter
from jshard.kernels.local_matmul import check_contraction, matmul, unsupported_operands
from jshard.kernels.select_algorithm import default_algorithm, resolve_algorithm, vmem_budget
from jshard.kernels.tiles import LANES, pad_to, round_up, sublanes
from jshard.kernels.vmap import call_batched

Algorithm = Literal["auto", "fused", "permute", "xla"]


def all_gather_matmul(
    x: Array,
    w: Array,
    mesh_axis: MeshAxis,
    *,
    axis: int = 0,
    out_dtype: DTypeLike | None = None,
    algorithm: Algorithm = "auto",
) -> Array:
    """Compute `all_gather(x, axis) @ w`: x[..., K] is sharded over `mesh_axis` along its array axis `axis`, not the last one.

    "fused", a kernel, multiplies the rows that have arrived while others travel, and sums in float32; so does "permute", by
    XLA's permutes and products. Both keep the gathered x for the gradient of w; that of x is one `matmul_reduce_scatter`.
    """
    mesh_axes, x, axis = collectives.canonicalize_gather("all_gather_matmul", x, mesh_axis, axis, "varying")
    _check_operands("all_gather_matmul", x, w, axis, "joins")
    chosen = _chosen("all_gather_matmul", algorithm, x, w, mesh_axes, 1)
    if chosen == "xla":
        full = all_gather(x, mesh_axes, axis=axis, algorithm=default_algorithm("all_gather"))
        return matmul(full, w, out_dtype=out_dtype, algorithm="xla")
    x, w = collectives.pvary_alike(x, w, mesh_axes=mesh_axes)
    return _all_gather_matmul(x, w, mesh_axes, axis, _dtype(x, w, out_dtype), chosen)


def matmul_reduce_scatter(
    x: Array,
    w: Array,
    mesh_axis: MeshAxis,
    *,
    axis: int = 0,
    out_dtype: DTypeLike | None = None,
    algorithm: Algorithm = "auto",
) -> Array:
    """Compute `reduce_scatter(x @ w, axis)`: K is sharded over `mesh_axis`; each device keeps its part of array axis `axis`.

    "fused" sends partial sums while the next are multiplied, in float32 and rounded once; "permute" sends them in `out_dtype`.
    The gradient of x is one `all_gather_matmul`, whose gathered rows the gradient of w takes too.
    """
    mesh_axes, x, axis = collectives.canonicalize_scatter("matmul_reduce_scatter", x, mesh_axis, axis)
    _check_operands("matmul_reduce_scatter", x, w, axis, "splits")
    chosen = _chosen("matmul_reduce_scatter", algorithm, x, w, mesh_axes, collectives.axis_size(mesh_axes))
    if chosen == "xla":
        partial = matmul(x, w, out_dtype=out_dtype, algorithm="xla")
        return reduce_scatter(partial, mesh_axes, axis=axis, algorithm=default_algorithm("reduce_scatter"))
    x, w = collectives.pvary_alike(x, w, mesh_axes=mesh_axes)
    return _matmul_reduce_scatter(x, w, mesh_axes, axis, _dtype(x, w, out_dtype), chosen)


def _chosen(op: str, algorithm: str, x: Array, w: Array, mesh_axes: tuple[str, ...], parts: int) -> str:
    """The algorithm to run; the kernels multiply on a TPU, in tiles, and permutes anywhere and anything."""
    unsupported = None if algorithm == "permute" else lambda: _unsupported(x, w, mesh_axes, parts)
    return resolve_algorithm(op, algorithm, x, mesh_axes, unsupported)


def _dtype(x: Array, w: Array, out_dtype: DTypeLike | None) -> Any:
    return jnp.dtype(jnp.result_type(x, w) if out_dtype is None else out_dtype)


def _check_operands(op: str, x: Array, w: Array, axis: int, verb: str) -> None:
    if axis == x.ndim - 1:
        raise JShardError(
            f"{op} {verb} axis {axis} of x{x.shape}, which is the one that is multiplied", hint="use axis=0"
        )
    check_contraction(op, x, w)


def _unsupported(x: Array, w: Array, mesh_axes: tuple[str, ...], parts: int) -> tuple[str, str] | None:
    """Say why the kernels can't take the operands, and what to type instead. Rows of x are made of `parts` devices' here."""
    rows = math.prod(x.shape[:-1]) // parts
    if (found := unsupported_operands(x, w)) is not None:
        return found
    if collectives.axis_size(mesh_axes) > 1 and not _tile(rows, w.shape[0], w.shape[1], x.dtype):
        fault = f"{rows} rows of {x.shape[-1]} numbers from each device do not fit {vmem_budget():,} bytes of VMEM"
        return fault, 'split the rows further, or use algorithm="auto"'
    return None


# -- gather, then multiply --


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _all_gather_matmul(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: object, how: str) -> Array:
    return _gather(x, w, mesh_axes, axis, out, how)[0]


def _all_gather_matmul_fwd(x, w, mesh_axes, axis, out, how):
    y, gathered = _gather(x, w, mesh_axes, axis, out, how)
    return y, (gathered, w)


def _all_gather_matmul_bwd(mesh_axes, axis, out, how, residuals, cotangent):
    gathered, w = residuals
    cotangent = cotangent.astype(gathered.dtype)
    gradient_of_x = _scatter(cotangent, w.T, mesh_axes, axis, gathered.dtype, how)
    return gradient_of_x, _gradient_of_w(gathered, cotangent, w.dtype)


_all_gather_matmul.defvjp(_all_gather_matmul_fwd, _all_gather_matmul_bwd)


# -- multiply, then scatter --


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _matmul_reduce_scatter(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: object, how: str) -> Array:
    return _scatter(x, w, mesh_axes, axis, out, how)


def _matmul_reduce_scatter_bwd(mesh_axes, axis, out, how, residuals, cotangent):
    x, w = residuals
    gradient_of_x, gathered = _gather(cotangent.astype(x.dtype), w.T, mesh_axes, axis, x.dtype, how)
    return gradient_of_x, _gradient_of_w(x, gathered, w.dtype)


_matmul_reduce_scatter.defvjp(
    lambda x, w, *static: (_matmul_reduce_scatter(x, w, *static), (x, w)), _matmul_reduce_scatter_bwd
)


def _gradient_of_w(x: Array, y: Array, dtype: DTypeLike) -> Array:
    rows = tuple(range(x.ndim - 1))  # contracted; both operands have all of them here, so nothing moves
    accumulator = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else None
    return jax.lax.dot_general(x, y, ((rows, rows), ((), ())), preferred_element_type=accumulator).astype(dtype)


# -- the kernels, on x[..., K] --


def _gather(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: object, how: str) -> tuple[Array, Array]:
    if how == "permute":
        return permute_ring.all_gather_matmul(x, w, mesh_axes, axis, out)
    run = lambda x, axis, w: _gather_kernel(x, w, mesh_axes, axis, out)
    return call_batched(run, x, axis, w, op="all_gather_matmul")


def _scatter(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: object, how: str) -> Array:
    if how == "permute":
        return permute_ring.matmul_reduce_scatter(x, w, mesh_axes, axis, out)
    run = lambda x, axis, w: _scatter_kernel(x, w, mesh_axes, axis, out)
    return call_batched(run, x, axis, w, op="matmul_reduce_scatter")


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _gather_kernel(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: Any) -> tuple[Array, Array]:
    from jshard.kernels.tpu import dma, fused

    group = dma.Group.of(mesh_axes)
    front = jnp.moveaxis(x, axis, 0)
    rows, inputs, outputs = math.prod(front.shape[:-1]), w.shape[0], w.shape[1]
    halves, padded_w, tile = _pad_to_tiles(front.reshape(1, rows, inputs), w)
    payload = jax.ShapeDtypeStruct((group.size * rows, inputs), x.dtype)
    y, gathered = fused.gather_matmul(halves[0], padded_w, group, payload, tile=tile, out_dtype=out)

    def unpad(array: Array, last: int) -> Array:
        array = array.reshape(group.size, -1, array.shape[-1])[:, :rows, :last]
        return jnp.moveaxis(array.reshape(group.size * front.shape[0], *front.shape[1:-1], last), 0, axis)

    return unpad(y, outputs), unpad(gathered, inputs)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _scatter_kernel(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: Any) -> Array:
    from jshard.kernels.tpu import dma, fused

    group = dma.Group.of(mesh_axes)
    front = jnp.moveaxis(x, axis, 0)
    mine = front.shape[0] // group.size
    rows, inputs, outputs = mine * math.prod(front.shape[1:-1]), w.shape[0], w.shape[1]
    halves, padded_w, tile = _pad_to_tiles(front.reshape(group.size, rows, inputs), w)
    payload = jax.ShapeDtypeStruct((group.size * rows, outputs), out)
    y = fused.matmul_scatter(halves, padded_w, group, payload, tile=tile, out_dtype=out)
    y = y.reshape(-1, y.shape[-1])[:rows, :outputs]
    return jnp.moveaxis(y.reshape(mine, *front.shape[1:-1], outputs), 0, axis)


def _pad_to_tiles(parts: Array, w: Array) -> tuple[Array, Array, int]:
    """Pad `[n, rows, K]` to halves of whole tiles, `[n, 2, rows, K]`, and w too; also return the columns of a tile."""
    n, rows, inputs = parts.shape
    half, padded_inputs = round_up(-(-rows // 2), sublanes(parts.dtype)), round_up(inputs, LANES)
    tile = _tile(rows, inputs, w.shape[1], parts.dtype)
    halves = pad_to(parts, n, 2 * half, padded_inputs).reshape(n, 2, half, padded_inputs)
    return halves, pad_to(w, padded_inputs, round_up(w.shape[1], tile)), tile


def _tile(rows: int, inputs: int, outputs: int, dtype: DTypeLike) -> int:
    """Return the columns of a tile; 0 if none fits, or none for the gradient, which is the other kernel with w.T."""
    from jshard.kernels.tpu.fused import columns

    half, itemsize = round_up(-(-rows // 2), sublanes(dtype)), jnp.dtype(dtype).itemsize
    fits = lambda k, n: columns(half, round_up(k, LANES), n, itemsize, vmem_budget())
    return fits(inputs, outputs) if fits(outputs, inputs) else 0
