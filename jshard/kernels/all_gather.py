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
    algorithm: Literal["auto", "ring", "xla"] = "auto",
) -> Array:
    """The shards of all devices along `mesh_axis`, joined along array axis `axis`.

    "ring" sends half of each shard each way round, from memory to memory; the gradient of a "varying" result is the
    reduce-scatter's ring, of an "invariant" one a slice. Several mesh axes go one at a time, the minor one first.
    """
    mesh_axes, x, axis = collectives.joins("all_gather", x, mesh_axis, axis, result)
    if decide("all_gather", algorithm, x, mesh_axes) == "xla":
        return collectives.all_gather(x, mesh_axes, axis=axis, result=result)
    return gathered(collectives.as_varying(x, mesh_axes), mesh_axes, axis, result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gathered(x: Array, mesh_axes: tuple[str, ...], axis: int, result: str) -> Array:
    """By the ring, whatever "auto" says."""
    whole = at_once(lambda x, axis: _kernel(x, mesh_axes, axis), x, axis)
    return collectives.as_varying(whole, mesh_axes) if result == "varying" and collectives.checks() else whole


def _backward(mesh_axes: tuple[str, ...], axis: int, result: str, _: None, cotangent: Array) -> tuple[Array]:
    from jshard.kernels.reduce_scatter import scattered

    if result == "varying" or not collectives.checks():
        return (scattered(collectives.as_varying(cotangent, mesh_axes), mesh_axes, axis),)
    size = cotangent.shape[axis] // collectives.axis_size(mesh_axes)
    start = collectives.axis_index(mesh_axes) * size
    return (lax.dynamic_slice_in_dim(collectives.as_varying(cotangent, mesh_axes), start, size, axis),)


gathered.defvjp(lambda x, mesh_axes, axis, result: (gathered(x, mesh_axes, axis, result), None), _backward)


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
