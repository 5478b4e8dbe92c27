"""The sum over the devices along mesh axes, of which each keeps its part. The specification is
`collectives.reduce_scatter`."""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels import collectives
from jshard.kernels.batch import at_once
from jshard.kernels.choose import decide, room
from jshard.kernels.collectives import MeshAxis
from jshard.kernels.in_order import part_of_sum


def reduce_scatter(
    x: Array, mesh_axis: MeshAxis, *, axis: int = 0, algorithm: Literal["auto", "in_order", "ring", "xla"] = "auto"
) -> Array:
    """The sum of `x` over the devices along `mesh_axis`, of which each keeps its own part of array axis `axis`.

    "ring" sends half of each part each way round and adds bfloat16 in float32; its gradient is the all-gather's ring.
    "in_order" is an all-to-all, and adds in the order of devices, bfloat16 in float32 too. Several mesh axes go one at a
    time, the major (first) one first.
    """
    mesh_axes, x, axis = collectives.splits("reduce_scatter", x, mesh_axis, axis)
    taken = decide("reduce_scatter", algorithm, x, mesh_axes)
    if taken == "xla":
        return collectives.reduce_scatter(x, mesh_axes, axis=axis)
    return scattered(collectives.as_varying(x, mesh_axes), mesh_axes, axis, taken)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def scattered(x: Array, mesh_axes: tuple[str, ...], axis: int, algorithm: str = "ring") -> Array:
    """By the ring or in order, whatever "auto" says."""
    return at_once(lambda x, axis: _kernel(x, mesh_axes, axis, algorithm), x, axis)


def _backward(mesh_axes: tuple[str, ...], axis: int, algorithm: str, _: None, cotangent: Array) -> tuple[Array]:
    from jshard.kernels.all_gather import gathered

    return (gathered(cotangent, mesh_axes, axis, "varying", algorithm),)


scattered.defvjp(lambda x, *how: (scattered(x, *how), None), _backward)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _kernel(x: Array, mesh_axes: tuple[str, ...], axis: int, algorithm: str) -> Array:
    from jshard.kernels.tpu.wire import wide

    whole = jnp.moveaxis(x, axis, 0)
    for name in mesh_axes:
        n = lax.axis_size(name)
        if n > 1:
            parts = whole.reshape(n, whole.shape[0] // n, *whole.shape[1:])
            last = name == mesh_axes[-1]
            whole = (
                part_of_sum(parts, name)
                if algorithm == "in_order"
                else _ring(parts, name, x.dtype if last else wide(x.dtype))
            )
    return jnp.moveaxis(whole.astype(x.dtype), 0, axis)


def _ring(x: Array, name: str, out_dtype) -> Array:
    """`x[n, ...]`, by pieces of each part that fit the chip's VMEM."""
    from jshard.kernels.tiles import pack_each, unpack
    from jshard.kernels.tpu import ring
    from jshard.kernels.tpu.wire import Group

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
