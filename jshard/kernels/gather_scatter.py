"""All-gather and reduce-scatter along mesh axes, by XLA (the specification) or by a kernel.

Each is the other's gradient.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jshard.kernels import collectives, permute_ring
from jshard.kernels.collectives import MeshAxis
from jshard.kernels.deterministic_sum import between_processes, ordered_psum_scatter
from jshard.kernels.invariant_cast import set_varying
from jshard.kernels.select_algorithm import resolve_algorithm, vmem_budget
from jshard.kernels.slices import size_along
from jshard.kernels.tiles import in_pieces, pack, pack_each, unpack, unpack_each
from jshard.kernels.vmap import call_batched


def all_gather(
    x: Array,
    mesh_axis: MeshAxis,
    *,
    axis: int = 0,
    result: Literal["varying", "invariant"] = "varying",
    algorithm: Literal["auto", "in_order", "permute", "ring", "torus", "xla"] = "auto",
) -> Array:
    """Concatenate the shards of all devices along `mesh_axis`, along array axis `axis`.

    The gradient of a "varying" result is a reduce-scatter. "invariant" states that all devices use the result alike;
    its gradient is a slice and moves nothing. Several mesh axes take a gather each, the minor (last) axis first.

    - "ring" sends half of each shard each way round, from HBM to HBM; the reduce-scatter of its gradient does so too.
    - "permute" sends whole shards both ways by XLA's permutes, on any backend.
    - "in_order" is XLA's gather, and between CPU processes an all-to-all of copies; its gradient is summed in device order.
    - "torus" is XLA's gather along each axis of a TPU slice's torus in turn, where the mesh axis is all of the slice. Its
      gradient is scattered by "auto".
    """
    mesh_axes, x, axis = collectives.canonicalize_gather("all_gather", x, mesh_axis, axis, result)
    chosen = resolve_algorithm("all_gather", algorithm, x, mesh_axes)
    if chosen == "xla" or (chosen == "in_order" and result == "invariant"):  # a slice has no sum
        return _by_xla(x, mesh_axes, axis, result)
    return _all_gather(collectives.pvary(x, mesh_axes), mesh_axes, axis, result, chosen)


def _by_xla(x: Array, mesh_axes: tuple[str, ...], axis: int, result: str) -> Array:
    to = "varying" if result == "varying" else "invarying"
    for name in reversed(mesh_axes):  # the minor axis first: its shards are adjacent in the result
        x = lax.all_gather(collectives.pvary(x, (name,)), name, axis=axis, tiled=True, to=to)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _all_gather(x: Array, mesh_axes: tuple[str, ...], axis: int, result: str, algorithm: str) -> Array:
    if algorithm == "in_order" and not between_processes():
        return _by_xla(x, mesh_axes, axis, result)
    run = lambda x, axis: gather_kernel(x, mesh_axes, axis, algorithm)
    full = call_batched(run, x, axis) if algorithm == "ring" else run(x, axis)  # JAX batches its own collectives
    if result == "varying":
        return collectives.pvary(full, mesh_axes)
    return set_varying(full, jax.typeof(full).mat.varying - {*mesh_axes})  # JAX types a permute's result as varying


def _all_gather_bwd(
    mesh_axes: tuple[str, ...], axis: int, result: str, algorithm: str, _: None, cotangent: Array
) -> tuple[Array]:
    cotangent = collectives.pvary(cotangent, mesh_axes)
    if result == "varying" or not collectives.check_vma_enabled():
        if algorithm == "torus":
            return (reduce_scatter(cotangent, mesh_axes, axis=axis),)
        return (_reduce_scatter(cotangent, mesh_axes, axis, algorithm),)
    size = cotangent.shape[axis] // collectives.axis_size(mesh_axes)
    return (lax.dynamic_slice_in_dim(cotangent, collectives.axis_index(mesh_axes) * size, size, axis),)


_all_gather.defvjp(lambda x, *static: (_all_gather(x, *static), None), _all_gather_bwd)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def gather_kernel(x: Array, mesh_axes: tuple[str, ...], axis: int, algorithm: str) -> Array:
    names = [name for name in reversed(mesh_axes) if size_along(name) > 1]
    if algorithm == "in_order":
        return functools.reduce(lambda full, name: _by_all_to_all(full, name, axis), names, x)
    if algorithm in ("permute", "torus"):
        along = [ring for name in names for ring in reversed(permute_ring.rings(name))]
        gather = permute_ring.all_gather if algorithm == "permute" else _along_ring
        return functools.reduce(lambda full, ring: gather(full, ring, axis), along, x)
    from jshard.kernels.tpu import dma, ring

    full = jnp.moveaxis(x, axis, 0)
    for name in names:
        group = dma.Group.of((name,))
        payload = jax.ShapeDtypeStruct((group.size, *full.shape), full.dtype)
        parts = unpack_each(ring.all_gather(pack(full, 2), group, payload), full.shape)
        full = parts.reshape(-1, *full.shape[1:])
    return jnp.moveaxis(full, 0, axis)


def _along_ring(x: Array, ring: permute_ring.Ring, axis: int) -> Array:
    return lax.all_gather(x, ring.names, axis=axis, tiled=True, axis_index_groups=ring.groups())


def _by_all_to_all(x: Array, name: str, axis: int) -> Array:
    n = lax.axis_size(name)
    parts = lax.all_to_all(jnp.broadcast_to(x, (n, *x.shape)), name, 0, 0, tiled=True)
    return jnp.moveaxis(parts, 0, axis).reshape(*x.shape[:axis], n * x.shape[axis], *x.shape[axis + 1 :])


def reduce_scatter(
    x: Array,
    mesh_axis: MeshAxis,
    *,
    axis: int = 0,
    algorithm: Literal["auto", "in_order", "permute", "ring", "xla"] = "auto",
) -> Array:
    """Sum `x` over the devices along `mesh_axis`; each device keeps its own part of array axis `axis`.

    Several mesh axes take a scatter each, the major (first) axis first: the inverse order of `all_gather`.

    - "ring" sends half of each part each way round and adds bfloat16 in float32; its gradient is the all-gather's ring.
    - "permute" sends whole parts both ways by XLA's permutes, on any backend, with rounding at each addition.
    - "in_order" is an all-to-all, and adds in device order, bfloat16 in float32 too.
    """
    mesh_axes, x, axis = collectives.canonicalize_scatter("reduce_scatter", x, mesh_axis, axis)
    shape = (*x.shape[:axis], x.shape[axis] // collectives.axis_size(mesh_axes), *x.shape[axis + 1 :])
    chosen = resolve_algorithm("reduce_scatter", algorithm, jax.ShapeDtypeStruct(shape, x.dtype), mesh_axes)
    if chosen == "xla":
        for name in mesh_axes:
            x = lax.psum_scatter(collectives.pvary(x, (name,)), name, scatter_dimension=axis, tiled=True)
        return x
    return _reduce_scatter(collectives.pvary(x, mesh_axes), mesh_axes, axis, chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _reduce_scatter(x: Array, mesh_axes: tuple[str, ...], axis: int, algorithm: str) -> Array:
    run = lambda x, axis: _scatter_kernel(x, mesh_axes, axis, algorithm)
    return run(x, axis) if algorithm == "permute" else call_batched(run, x, axis)


def _reduce_scatter_bwd(
    mesh_axes: tuple[str, ...], axis: int, algorithm: str, _: None, cotangent: Array
) -> tuple[Array]:
    return (_all_gather(cotangent, mesh_axes, axis, "varying", algorithm),)


_reduce_scatter.defvjp(lambda x, *static: (_reduce_scatter(x, *static), None), _reduce_scatter_bwd)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _scatter_kernel(x: Array, mesh_axes: tuple[str, ...], axis: int, algorithm: str) -> Array:
    names = [name for name in mesh_axes if size_along(name) > 1]
    if algorithm == "permute":
        for ring in (ring for name in names for ring in permute_ring.rings(name)):
            part_for = functools.partial(permute_ring.part, x, ring.size, axis)
            x = permute_ring.reduce_scatter(part_for, ring, x.dtype)
        return x
    from jshard.kernels.tpu.dma import accumulator_dtype

    part = jnp.moveaxis(x, axis, 0)
    for name in names:
        n = size_along(name)
        parts = part.reshape(n, part.shape[0] // n, *part.shape[1:])
        # Between two mesh axes a ring's sums stay in the accumulator's dtype: they are rounded once, at the end.
        dtype = x.dtype if name == names[-1] else accumulator_dtype(x.dtype)
        part = ordered_psum_scatter(parts, name) if algorithm == "in_order" else _ring(parts, name, dtype)
    return jnp.moveaxis(part.astype(x.dtype), 0, axis)


def _ring(x: Array, name: str, out_dtype: DTypeLike) -> Array:
    """Reduce-scatter `x[n, ...]`, in pieces of each part small enough for the chip's VMEM."""
    from jshard.kernels.tpu import dma, ring

    group = dma.Group.of((name,))

    def scatter(piece: Array) -> Array:
        return unpack(ring.reduce_scatter(pack_each(piece, 2), group, piece, out_dtype=out_dtype), piece.shape[1:])

    return in_pieces(x, -(-x.size * (x.dtype.itemsize + 8) // vmem_budget()), scatter)
