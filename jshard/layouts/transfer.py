"""An array from the devices of one mesh to those of another, or between a device's memory and its host's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from jshard.errors import JShardError
from jshard.layouts.index_ranges import boxes_of, holders, overlap
from jshard.layouts.mesh import sizes_of
from jshard.layouts.p2p import Parcel, carry, doors_of, is_shared, listed, parcels_of, without_mesh
from jshard.layouts.shard_buffers import Filling, taking
from jshard.layouts.transfer_events import moved, where

HOST = "pinned_host"  # JAX's name for memory of the host that a device can reach


def transfer(x: jax.Array, sharding: Sharding) -> jax.Array:
    """The same numbers, lying as `sharding` says. A device gets only what it will hold, and one block of 1 MiB at a time;
    between processes blocks travel as they do in `scatter`, and every process calls this."""
    parcels: list[Parcel] = []
    doors = doors_of(next(iter(sharding.device_set)).platform)
    with without_mesh():
        shared = is_shared("jshard.place", x, f"to {listed(sharding.device_set)}", doors)
    moved("move", x.shape, x.dtype, where(x), sharding)
    if sharding.memory_kind and x.sharding.memory_kind != sharding.memory_kind:
        x = jax.device_put(x, x.sharding.with_memory_kind(sharding.memory_kind))
    here, there = boxes_of(x.sharding, x.shape), boxes_of(sharding, x.shape)
    if here == there:
        return jax.device_put(x, sharding)
    for box, wanting in holders(there).items():
        for part, having in holders(here).items():
            both = overlap(box, part)
            if both is not None:
                parcels += parcels_of(both, having if shared else wanting, wanting)  # else each has its own
    with without_mesh():
        filling = Filling(sharding, x.shape, x.dtype)
        carry(parcels, doors, x.dtype.itemsize, taking(x), filling.put)
        return filling.finished()


def on_host(x: jax.Array) -> jax.Array:
    """The same, in the memory of the hosts of its devices: still split as it was, and no longer in the devices' own."""
    for device in x.sharding.device_set:
        if HOST not in {memory.kind for memory in device.addressable_memories()}:
            raise JShardError(
                f"{device.device_kind} reaches no memory of its host through JAX",
                hint="use jax.tree.map(jshard.gather, ...) for numpy arrays",
            )
    moved("move", x.shape, x.dtype, where(x), "the memory of its hosts")
    return jax.device_put(x, x.sharding.with_memory_kind(HOST))


def fewer(mesh: Mesh, devices: Sequence[Any], *, label: str) -> Mesh:
    """A mesh of the same axes over these devices: the first mesh axes become as small as they have to."""
    sizes, left = dict(mesh.shape), len(devices)
    for name in reversed(sizes):
        sizes[name] = math.gcd(sizes[name], left)
        left //= sizes[name]
    if left != 1:
        raise JShardError(
            f"{label} to {len(devices)} devices, over which the mesh {sizes_of(mesh)} can't be made smaller",
            hint=f"give it a number of devices that divides {mesh.size}, or a mesh",
        )
    grid = np.array(list(devices), dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
