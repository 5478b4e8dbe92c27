"""The parts of all devices along mesh axes, joined. The specification is `collectives.all_gather`."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels import collectives
from jshard.kernels.batch import at_once
from jshard.kernels.choose import decide
from jshard.kernels.collectives import MeshAxis


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
    mesh_axes, x, axis = collectives.joins("all_gather", x, mesh_axis, axis, result)
    taken = decide("all_gather", algorithm, x, mesh_axes)
    if taken == "xla" or (taken == "in_order" and result == "invariant"):  # a slice has no sum
        return collectives.all_gather(x, mesh_axes, axis=axis, result=result)
    return gathered(collectives.as_varying(x, mesh_axes), mesh_axes, axis, result, taken)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gathered(
    x: Array, mesh_axes: tuple[str, ...], axis: int, result: Literal["varying", "invariant"], algorithm: str = "ring"
) -> Array:
    """By the ring, or with a gradient in order, whatever "auto" says."""
    if algorithm == "in_order":
        return collectives.all_gather(x, mesh_axes, axis=axis, result=result)
    whole = at_once(lambda x, axis: _kernel(x, mesh_axes, axis), x, axis)
    return collectives.as_varying(whole, mesh_axes) if result == "varying" and collectives.checks() else whole


def _backward(
    mesh_axes: tuple[str, ...], axis: int, result: str, algorithm: str, _: None, cotangent: Array
) -> tuple[Array]:
    from jshard.kernels.reduce_scatter import scattered

    if result == "varying" or not collectives.checks():
        return (scattered(collectives.as_varying(cotangent, mesh_axes), mesh_axes, axis, algorithm),)
    size = cotangent.shape[axis] // collectives.axis_size(mesh_axes)
    start = collectives.axis_index(mesh_axes) * size
    return (lax.dynamic_slice_in_dim(collectives.as_varying(cotangent, mesh_axes), start, size, axis),)


gathered.defvjp(lambda x, *how: (gathered(x, *how), None), _backward)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _kernel(x: Array, mesh_axes: tuple[str, ...], axis: int) -> Array:
    from jshard.kernels.tiles import pack, unpack_each
    from jshard.kernels.tpu import ring
    from jshard.kernels.tpu.wire import Group

    whole = jnp.moveaxis(x, axis, 0)
    for name in reversed(mesh_axes):
        group = Group.of((name,))
        if group.size > 1:
            payload = jax.ShapeDtypeStruct((group.size, *whole.shape), whole.dtype)
            parts = unpack_each(ring.all_gather(pack(whole, 2), group, payload), whole.shape)
            whole = parts.reshape(-1, *whole.shape[1:])
    return jnp.moveaxis(whole, 0, axis)
