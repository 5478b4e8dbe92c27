"""All-gather and reduce-scatter along mesh axes, each the other's gradient. Their specification is
`collectives.all_gather` and `collectives.reduce_scatter`."""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels import collectives
from jshard.kernels.collectives import MeshAxis
from jshard.kernels.deterministic_sum import ordered_psum_scatter
from jshard.kernels.select_algorithm import resolve_algorithm, room
from jshard.kernels.vmap import call_batched


def all_gather(
    x: Array,
    mesh_axis: MeshAxis,
    *,
    axis: int = 0,
    result: Literal["varying", "invariant"] = "varying",
    algorithm: Literal["auto", "in_order", "ring", "xla"] = "auto",
) -> Array:
    """The shards of all devices along `mesh_axis`, joined along array axis `axis`.

    "ring" sends half of each shard each way round, from memory to memory; the gradient of a "varying" result is the
    reduce-scatter's ring, of an "invariant" one a slice. "in_order" is XLA's own, with a gradient summed in the order of
    devices. Several mesh axes go one at a time, the minor one first.
    """
    mesh_axes, x, axis = collectives.canonicalize_gather("all_gather", x, mesh_axis, axis, result)
    taken = resolve_algorithm("all_gather", algorithm, x, mesh_axes)
    if taken == "xla" or (taken == "in_order" and result == "invariant"):  # a slice has no sum
        return collectives.all_gather(x, mesh_axes, axis=axis, result=result)
    return gathered(collectives.pvary(x, mesh_axes), mesh_axes, axis, result, taken)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gathered(
    x: Array, mesh_axes: tuple[str, ...], axis: int, result: Literal["varying", "invariant"], algorithm: str = "ring"
) -> Array:
    """By the ring, or with a gradient in order, whatever "auto" says."""
    if algorithm == "in_order":
        return collectives.all_gather(x, mesh_axes, axis=axis, result=result)
    whole = call_batched(lambda x, axis: _gather_kernel(x, mesh_axes, axis), x, axis)
    return collectives.pvary(whole, mesh_axes) if result == "varying" and collectives.check_vma_enabled() else whole


def _gathered_bwd(
    mesh_axes: tuple[str, ...], axis: int, result: str, algorithm: str, _: None, cotangent: Array
) -> tuple[Array]:
    if result == "varying" or not collectives.check_vma_enabled():
        return (scattered(collectives.pvary(cotangent, mesh_axes), mesh_axes, axis, algorithm),)
    size = cotangent.shape[axis] // collectives.axis_size(mesh_axes)
    start = collectives.axis_index(mesh_axes) * size
    return (lax.dynamic_slice_in_dim(collectives.pvary(cotangent, mesh_axes), start, size, axis),)


gathered.defvjp(lambda x, *how: (gathered(x, *how), None), _gathered_bwd)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gather_kernel(x: Array, mesh_axes: tuple[str, ...], axis: int) -> Array:
    from jshard.kernels.tiles import pack, unpack_each
    from jshard.kernels.tpu import ring
    from jshard.kernels.tpu.dma import Group

    whole = jnp.moveaxis(x, axis, 0)
    for name in reversed(mesh_axes):
        group = Group.of((name,))
        if group.size > 1:
            payload = jax.ShapeDtypeStruct((group.size, *whole.shape), whole.dtype)
            parts = unpack_each(ring.all_gather(pack(whole, 2), group, payload), whole.shape)
            whole = parts.reshape(-1, *whole.shape[1:])
    return jnp.moveaxis(whole, 0, axis)


def reduce_scatter(
    x: Array, mesh_axis: MeshAxis, *, axis: int = 0, algorithm: Literal["auto", "in_order", "ring", "xla"] = "auto"
) -> Array:
    """The sum of `x` over the devices along `mesh_axis`, of which each keeps its own part of array axis `axis`.

    "ring" sends half of each part each way round and adds bfloat16 in float32; its gradient is the all-gather's ring.
    "in_order" is an all-to-all, and adds in the order of devices, bfloat16 in float32 too. Several mesh axes go one at a
    time, the major (first) one first.
    """
    mesh_axes, x, axis = collectives.canonicalize_scatter("reduce_scatter", x, mesh_axis, axis)
    taken = resolve_algorithm("reduce_scatter", algorithm, x, mesh_axes)
    if taken == "xla":
        return collectives.reduce_scatter(x, mesh_axes, axis=axis)
    return scattered(collectives.pvary(x, mesh_axes), mesh_axes, axis, taken)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def scattered(x: Array, mesh_axes: tuple[str, ...], axis: int, algorithm: str = "ring") -> Array:
    """By the ring or in order, whatever "auto" says."""
    return call_batched(lambda x, axis: _scatter_kernel(x, mesh_axes, axis, algorithm), x, axis)


def _scattered_bwd(mesh_axes: tuple[str, ...], axis: int, algorithm: str, _: None, cotangent: Array) -> tuple[Array]:
    return (gathered(cotangent, mesh_axes, axis, "varying", algorithm),)


scattered.defvjp(lambda x, *how: (scattered(x, *how), None), _scattered_bwd)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _scatter_kernel(x: Array, mesh_axes: tuple[str, ...], axis: int, algorithm: str) -> Array:
    from jshard.kernels.tpu.dma import accumulator_dtype

    whole = jnp.moveaxis(x, axis, 0)
    for name in mesh_axes:
        n = lax.axis_size(name)
        if n > 1:
            parts = whole.reshape(n, whole.shape[0] // n, *whole.shape[1:])
            last = name == mesh_axes[-1]
            whole = (
                ordered_psum_scatter(parts, name)
                if algorithm == "in_order"
                else _ring(parts, name, x.dtype if last else accumulator_dtype(x.dtype))
            )
    return jnp.moveaxis(whole.astype(x.dtype), 0, axis)


def _ring(x: Array, name: str, out_dtype) -> Array:
    """`x[n, ...]`, by pieces of each part that fit the chip's VMEM."""
    from jshard.kernels.tiles import pack_each, unpack
    from jshard.kernels.tpu import ring
    from jshard.kernels.tpu.dma import Group

    group, shape, size = Group.of((name,)), x.shape[1:], math.prod(x.shape[1:])
    pieces = max(1, -(-x.size * (x.dtype.itemsize + 8) // room()))
    each = -(-size // pieces)

    def done(piece: Array) -> Array:
        return unpack(ring.reduce_scatter(pack_each(piece, 2), group, piece, out_dtype=out_dtype), (each,))

    flat = jnp.pad(x.reshape(group.size, size), ((0, 0), (0, pieces * each - size)))
    if pieces == 1:
        return done(flat).reshape(shape)
    parts = lax.map(done, jnp.moveaxis(flat.reshape(group.size, pieces, each), 1, 0))
    return parts.reshape(-1)[:size].reshape(shape)
