"""A gather and the product after it, a product and the scatter after it: each as one kernel, each the other's gradient."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jshard.errors import JShardError
from jshard.kernels import collectives
from jshard.kernels.collectives import MeshAxis
from jshard.kernels.gather_scatter import all_gather, reduce_scatter
from jshard.kernels.local_matmul import matmul
from jshard.kernels.select_algorithm import default_algorithm, resolve_algorithm, room
from jshard.kernels.vmap import call_batched

Algorithm = Literal["auto", "fused", "xla"]
PLAIN = 'use algorithm="auto"'


def all_gather_matmul(
    x: Array,
    w: Array,
    mesh_axis: MeshAxis,
    *,
    axis: int = 0,
    out_dtype: DTypeLike | None = None,
    algorithm: Algorithm = "auto",
) -> Array:
    """`all_gather(x, axis) @ w`: x[..., K] is split over `mesh_axis` by its array axis `axis`, not by the last one.

    "fused" multiplies what has arrived while the rest is under way, sums in float32, and keeps the gathered x for the
    gradient of w; the gradient of x is one `matmul_reduce_scatter`.
    """
    mesh_axes, x, axis = collectives.canonicalize_gather("all_gather_matmul", x, mesh_axis, axis, "varying")
    _rows("all_gather_matmul", x, w, axis, "joins")
    if resolve_algorithm("all_gather_matmul", algorithm, x, mesh_axes, lambda: _why_not(x, w, mesh_axes, 1)) == "xla":
        whole = all_gather(x, mesh_axes, axis=axis, algorithm=default_algorithm("all_gather"))
        return matmul(whole, w, out_dtype=out_dtype, algorithm="xla")
    return _gathered(*_alike(mesh_axes, x, w), mesh_axes, axis, _dtype(x, w, out_dtype))


def matmul_reduce_scatter(
    x: Array,
    w: Array,
    mesh_axis: MeshAxis,
    *,
    axis: int = 0,
    out_dtype: DTypeLike | None = None,
    algorithm: Algorithm = "auto",
) -> Array:
    """`reduce_scatter(x @ w, axis)`: K is split over `mesh_axis`, and each device keeps its part of array axis `axis`.

    "fused" sends partial sums on while the next are multiplied, in float32 and rounded once; the gradient of x is one
    `all_gather_matmul`, whose gathered rows the gradient of w takes too.
    """
    mesh_axes, x, axis = collectives.canonicalize_scatter("matmul_reduce_scatter", x, mesh_axis, axis)
    _rows("matmul_reduce_scatter", x, w, axis, "splits")
    parts = collectives.axis_size(mesh_axes)
    if (
        resolve_algorithm("matmul_reduce_scatter", algorithm, x, mesh_axes, lambda: _why_not(x, w, mesh_axes, parts))
        == "xla"
    ):
        partial = matmul(x, w, out_dtype=out_dtype, algorithm="xla")
        return reduce_scatter(partial, mesh_axes, axis=axis, algorithm=default_algorithm("reduce_scatter"))
    return _scattered(*_alike(mesh_axes, x, w), mesh_axes, axis, _dtype(x, w, out_dtype))


def _dtype(x: Array, w: Array, out_dtype: DTypeLike | None) -> Any:
    return jnp.dtype(jnp.result_type(x, w) if out_dtype is None else out_dtype)


def _rows(op: str, x: Array, w: Array, axis: int, verb: str) -> None:
    if axis == x.ndim - 1:
        raise JShardError(
            f"{op} {verb} axis {axis} of x{x.shape}, which is the one that is multiplied", mend="use axis=0"
        )
    if not w.ndim or x.shape[-1] != w.shape[0]:
        raise JShardError(
            f"{op} of x{x.shape} and w{w.shape}: the last axis of x does not match the first of w",
            mend="use a w with as many rows as x has columns",
        )


def _why_not(x: Array, w: Array, mesh_axes: tuple[str, ...], parts: int) -> tuple[str, str] | None:
    """What the kernels can't take; `parts` are those that the rows of x are made of here."""
    if w.ndim != 2:
        return f"its kernel takes a w of two axes, and w is {w.shape}", PLAIN
    if w.dtype != x.dtype:
        return f"its kernel takes operands of one dtype, and x is {x.dtype} and w {w.dtype}", "cast one of them"
    if not w.size:
        return f"w{w.shape} holds nothing to multiply", PLAIN
    if collectives.axis_size(mesh_axes) > 1 and not _tile(
        math.prod(x.shape[:-1]) // parts, w.shape[0], w.shape[1], x.dtype
    ):
        return (
            f"{math.prod(x.shape[:-1]) // parts} rows of {x.shape[-1]} numbers from each device do not fit "
            f"{room():,} bytes of VMEM",
            f"split the rows further, or {PLAIN}",
        )
    return None


def _alike(mesh_axes: tuple[str, ...], x: Array, w: Array) -> tuple[Array, Array]:
    """Both varying over the same mesh axes, so that the types of gradients come out right."""
    if not collectives.check_vma_enabled():
        return x, w
    names = tuple(sorted({*mesh_axes, *jax.typeof(x).mat.varying, *jax.typeof(w).mat.varying}))
    return collectives.pvary(x, names), collectives.pvary(w, names)


# -- gather, then multiply --


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _gathered(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: Any) -> Array:
    return _gather(x, w, mesh_axes, axis, out)[0]


def _gathered_forward(x, w, mesh_axes, axis, out):
    y, whole = _gather(x, w, mesh_axes, axis, out)
    return y, (whole, w)


def _gathered_backward(mesh_axes, axis, out, kept, cotangent):
    whole, w = kept
    narrow = cotangent.astype(whole.dtype)
    return _scatter(narrow, w.T, mesh_axes, axis, whole.dtype), _weights(whole, narrow, w.dtype)


_gathered.defvjp(_gathered_forward, _gathered_backward)


# -- multiply, then scatter --


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _scattered(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: Any) -> Array:
    return _scatter(x, w, mesh_axes, axis, out)


def _scattered_backward(mesh_axes, axis, out, kept, cotangent):
    x, w = kept
    x_gradient, whole = _gather(cotangent.astype(x.dtype), w.T, mesh_axes, axis, x.dtype)
    return x_gradient, _weights(x, whole, w.dtype)


_scattered.defvjp(lambda x, w, names, axis, out: (_scattered(x, w, names, axis, out), (x, w)), _scattered_backward)


def _weights(x: Array, y: Array, dtype: Any) -> Array:
    rows = tuple(range(x.ndim - 1))
    adds = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else None
    return jax.lax.dot_general(x, y, ((rows, rows), ((), ())), preferred_element_type=adds).astype(dtype)


# -- the kernels, on x[rows, K] of any number of axes --


def _gather(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: Any) -> tuple[Array, Array]:
    run = lambda x, axis, w: _gather_kernel(x, w, mesh_axes, axis, out)
    return call_batched(run, x, axis, w, op="all_gather_matmul")


def _scatter(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: Any) -> Array:
    run = lambda x, axis, w: _scatter_kernel(x, w, mesh_axes, axis, out)
    return call_batched(run, x, axis, w, op="matmul_reduce_scatter")


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _gather_kernel(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: Any) -> tuple[Array, Array]:
    from jshard.kernels.tpu import fused
    from jshard.kernels.tpu.dma import Group

    group = Group.of(mesh_axes)
    front = jnp.moveaxis(x, axis, 0)
    rows, inputs, outputs = math.prod(front.shape[:-1]), w.shape[0], w.shape[1]
    halves, wide_w, tile = _shaped(front.reshape(1, rows, inputs), w)
    payload = jax.ShapeDtypeStruct((group.size * rows, inputs), x.dtype)
    y, whole = fused.gather_matmul(halves[0], wide_w, group, payload, tile=tile, out_dtype=out)

    def back(array: Array, last: int) -> Array:
        array = array.reshape(group.size, -1, array.shape[-1])[:, :rows, :last]
        return jnp.moveaxis(array.reshape(group.size * front.shape[0], *front.shape[1:-1], last), 0, axis)

    return back(y, outputs), back(whole, inputs)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _scatter_kernel(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: Any) -> Array:
    from jshard.kernels.tpu import fused
    from jshard.kernels.tpu.dma import Group

    group = Group.of(mesh_axes)
    front = jnp.moveaxis(x, axis, 0)
    mine = front.shape[0] // group.size
    rows, inputs, outputs = mine * math.prod(front.shape[1:-1]), w.shape[0], w.shape[1]
    halves, wide_w, tile = _shaped(front.reshape(group.size, rows, inputs), w)
    payload = jax.ShapeDtypeStruct((group.size * rows, outputs), out)
    y = fused.matmul_scatter(halves, wide_w, group, payload, tile=tile, out_dtype=out)
    y = y.reshape(-1, y.shape[-1])[:rows, :outputs]
    return jnp.moveaxis(y.reshape(mine, *front.shape[1:-1], outputs), 0, axis)


def _shaped(parts: Array, w: Array) -> tuple[Array, Array, int]:
    """`[n, rows, K]` as halves of whole tiles `[n, 2, rows, K]`, w of whole tiles, and the columns of a tile."""
    from jshard.kernels.tiles import LANES, pad_to, round_up, sublanes

    n, rows, inputs = parts.shape
    half, deep = round_up(-(-rows // 2), sublanes(parts.dtype)), round_up(inputs, LANES)
    tile = _tile(rows, inputs, w.shape[1], parts.dtype)
    halves = jnp.pad(parts, ((0, 0), (0, 2 * half - rows), (0, deep - inputs))).reshape(n, 2, half, deep)
    return halves, pad_to(w, deep, round_up(w.shape[1], tile)), tile


def _tile(rows: int, inputs: int, outputs: int, dtype: Any) -> int:
    """Columns of a tile, for either product: its gradient is the other, with inputs and outputs changed over."""
    from jshard.kernels.tiles import LANES, round_up, sublanes
    from jshard.kernels.tpu.fused import columns

    dtype = jnp.dtype(dtype)
    half = round_up(-(-rows // 2), sublanes(dtype))
    there = columns(half, round_up(outputs, LANES), inputs, dtype.itemsize, room())
    return columns(half, round_up(inputs, LANES), outputs, dtype.itemsize, room()) if there else 0
