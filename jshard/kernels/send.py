"""From one device to another, inside a shard_map."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jshard.errors import JShardError
from jshard.kernels.collectives import MeshAxis, axis_index, axis_size, canonicalize_mesh_axes, permute, pvary


def send_recv(x: Array, *, source: int, target: int, axis: MeshAxis) -> Array:
    """The `x` of device `source` along mesh axis `axis`, on device `target`; the others keep their own.

    One collective-permute of one pair. The gradient goes the other way. Several mesh axes count as one, major first.
    """
    mesh_axes = canonicalize_mesh_axes("send_recv", axis)
    size = axis_size(mesh_axes)
    for role, place in (("source", source), ("target", target)):
        if not 0 <= place < size:
            named = ", ".join(f'"{name}"' for name in mesh_axes)
            raise JShardError(
                f"send_recv names {role} {place} over mesh axis {named} of size {size}", mend=f"use 0 to {size - 1}"
            )
    if source == target:
        return jnp.asarray(x)
    x = pvary(x, mesh_axes)
    arrived = permute(x, mesh_axes, pairs=[(source, target)])
    return jnp.where(axis_index(mesh_axes) == target, arrived, x)
