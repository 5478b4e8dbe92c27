"""Send from one device to another, inside a shard_map."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jshard.kernels.collectives import (
    MeshAxis,
    axis_index,
    axis_size,
    canonicalize_mesh_axes,
    check_rank,
    permute,
    pvary,
)


def send_recv(x: Array, *, source: int, target: int, axis: MeshAxis) -> Array:
    """Send the `x` of device `source` along mesh axis `axis` to device `target`; the others keep their own.

    Costs one collective-permute of one pair; so does its gradient, the other way. Several mesh axes count as one, major first.
    """
    mesh_axes = canonicalize_mesh_axes("send_recv", axis)
    size = axis_size(mesh_axes)
    for role, rank in (("source", source), ("target", target)):
        check_rank("send_recv", role, rank, mesh_axes, size)
    if source == target:
        return jnp.asarray(x)
    x = pvary(x, mesh_axes)
    arrived = permute(x, mesh_axes, pairs=[(source, target)])
    return jnp.where(axis_index(mesh_axes) == target, arrived, x)
