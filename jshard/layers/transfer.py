"""`jshard.place`: transfer an array, a model or a tree of arrays to a layout, a signal, a mesh or devices."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jshard.errors import JShardError, kind_of, quoted
from jshard.layouts.gathering import kind, raw, typed
from jshard.layouts.index_ranges import boxes_of, holders, overlap
from jshard.layouts.layout import Layout, Placement, as_layout
from jshard.layouts.mesh import sizes_of
from jshard.layouts.p2p import Parcel, carry, doors_of, is_shared, listed, moved, parcels_of, where, without_mesh
from jshard.layouts.paths import words_of
from jshard.layouts.redistribution import as_array, redistribute, replicated
from jshard.layouts.shard_buffers import Filling, taking
from jshard.signals.scope import signal

HOST = "pinned_host"  # JAX's name for host memory reachable from a device
To = Placement | Sharding | Mesh | jax.Device | Sequence[jax.Device | int] | str | enum.Enum


def place(x: Any, to: To) -> Any:
    """Return an array, a number, a list of numbers, an NNX model, or a tree of arrays, transferred to `to`.

        x = jshard.place(x, jax.P("data"))                             # a Layout or Sharding; a spec is over the loaded mesh.
        batch = jshard.place(batch, "inputs")                          # by a signal; without a configuration: unchanged.
        small = jshard.place(model, jax.make_mesh((1, 2), ("data", "tensor")))  # every array over its previous mesh axes.
        small = jshard.place(model, jax.devices()[:2])                 # the same mesh axes, the first smaller.
        away = jshard.place(model, jax.memory.Space.Host)              # to host memory, still split.

    A layout or a signal applies to each array by itself, also inside jit. Devices may be given by number; they need concrete
    arrays. Between meshes a device receives only its shard, and every process must make the call. A model's layers follow
    the loaded configuration: load one for the new mesh. Other leaves of a tree are returned unchanged.
    """
    graph, state = nnx.split(x)
    named, tree = jax.tree_util.tree_flatten_with_path(state)
    arrays = [leaf for _, leaf in named if _is_array(leaf)]
    if not arrays:
        return place(as_array(x, label="jshard.place"), to)
    if isinstance(to, str) and isinstance(x, nnx.Module):
        raise JShardError(
            f"jshard.place of {kind_of(x)} to signal {quoted(to)}, but signals claim its parameters one by one",
            hint="write jshard.shard(model, x), or name a mesh",
        )
    placed_by = _placing(to, arrays)
    placed: dict[int, Any] = {}  # a shared array is transferred once
    for path, leaf in named:
        if id(leaf) not in placed:
            placed[id(leaf)] = placed_by(_label(path), leaf) if _is_array(leaf) else leaf
    return nnx.merge(graph, jax.tree.unflatten(tree, [placed[id(leaf)] for _, leaf in named]))


def _is_array(x: object) -> bool:
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")


def _placing(to: Any, arrays: Sequence[Any]) -> Callable[[str, Any], Any]:
    """Return a function that transfers an array, given the array's name in errors."""
    if isinstance(to, str):
        return lambda _, x: signal.tensor(x, name=to)
    to = [*to.device_set] if isinstance(to, SingleDeviceSharding) else [to] if isinstance(to, jax.Device) else to
    if not isinstance(to, Mesh | Sequence | enum.Enum):
        return lambda label, x: _to_layout(x, as_layout(to, x.ndim, label=label, beside=Layout.of(x)), label)
    if any(isinstance(x, Tracer) for x in arrays):
        raise JShardError(
            "jshard.place to a mesh, devices or a memory was called inside jit, which runs on one mesh",
            hint='name a layout, as in jax.P("data"), or call it outside of jit',
        )
    if isinstance(to, enum.Enum):
        if to is not jax.memory.Space.Host:
            raise JShardError(f"jshard.place to {to}", hint="use jax.memory.Space.Host, a mesh or devices")
        return lambda _, x: _of_numbers(x, on_host) if isinstance(x, jax.Array) else x
    mesh = to if isinstance(to, Mesh) else _mesh_of(to, arrays)
    return lambda label, x: _across(jnp.asarray(x), _layout(label, x, mesh), label)


def _to_layout(x: jax.Array, layout: Layout, label: str) -> Any:
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        sharding = layout.sharding
        if x.sharding.memory_kind == HOST:
            x = jax.device_put(x, x.sharding.with_memory_kind(sharding.memory_kind or "device"))
        processes = {device.process_index for device in sharding.device_set}
        by_blocks = x.committed if jax.process_count() == 1 else len(processes) > 1
        if by_blocks and x.sharding.device_set != sharding.device_set:
            return _across(x, layout, label)
    return redistribute(x, layout, label=label)


def _across(x: jax.Array, layout: Layout, label: str) -> jax.Array:
    layout.shard_shape(x.shape, label=label)
    return _of_numbers(x, lambda numbers: transfer(numbers, layout.sharding))


def _of_numbers(x: jax.Array, moved: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Apply `moved` to `x`; a random key is moved as its underlying numbers."""
    return typed(moved(raw(x)), kind(x))


def _layout(label: str, x: jax.Array, mesh: Mesh) -> Layout:
    """Return the layout of `x` on another mesh, over its present mesh axes."""
    present = Layout.of(x) or replicated(mesh, x.ndim)
    for mesh_axis in present.mesh_axes:
        if mesh_axis not in mesh.shape:
            raise JShardError(
                f'{label} is split over mesh axis "{mesh_axis}", which the mesh {sizes_of(mesh)} does not have',
                hint=f"give the mesh an axis {mesh_axis}, if only of size 1",
            )
    return Layout(mesh, *present.axes)


def _mesh_of(devices: Sequence[Any], leaves: Sequence[Any]) -> Mesh:
    present = jax.devices()
    chosen = []
    for device in devices:
        if not isinstance(device, int | jax.Device):
            raise JShardError(f"jshard.place to {kind_of(device)} in a list", hint="list devices, or their numbers")
        if isinstance(device, int) and not 0 <= device < len(present):
            raise JShardError(
                f"jshard.place to device {device}, but {len(present)} are here", hint=f"use 0 to {len(present) - 1}"
            )
        chosen.append(present[device] if isinstance(device, int) else device)
    shardings = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)]
    meshes = list(dict.fromkeys(sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)))
    if len(meshes) >= 2:
        raise JShardError(
            f"jshard.place to {len(chosen)} devices of arrays on {len(meshes)} meshes",
            hint="name the mesh: jshard.place(model, mesh)",
        )
    present_mesh = meshes[0] if meshes else jax.make_mesh((1,), ("devices",), devices=chosen or present)
    assert isinstance(present_mesh, Mesh)
    return fewer(present_mesh, chosen, label="jshard.place")


def _label(path: Sequence[Any]) -> str:
    name = ".".join(word for word in words_of(path) if word != "raw_value")
    return f"jshard.place: {name}" if name else "jshard.place"


# -- transfers between meshes, and between a device's memory and its host's --


def transfer(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Transfer an array to `sharding`; each device receives only its shard, in blocks of 1 MiB.
    Between processes blocks are sent as in `scatter`, and every process must call this."""
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
                parcels += parcels_of(both, having if shared else wanting, wanting)  # else each has its own copy
    with without_mesh():
        filling = Filling(sharding, x.shape, x.dtype)
        carry(parcels, doors, x.dtype.itemsize, taking(x), filling.put)
        return filling.finished()


def on_host(x: jax.Array) -> jax.Array:
    """Move an array to the memory of its devices' hosts, with unchanged sharding."""
    for device in x.sharding.device_set:
        if HOST not in {memory.kind for memory in device.addressable_memories()}:
            raise JShardError(
                f"{device.device_kind} reaches no memory of its host through JAX",
                hint="use jax.tree.map(jshard.gather, ...) for numpy arrays",
            )
    moved("move", x.shape, x.dtype, where(x), "the memory of its hosts")
    return jax.device_put(x, x.sharding.with_memory_kind(HOST))


def fewer(mesh: Mesh, devices: Sequence[Any], *, label: str) -> Mesh:
    """Return a mesh with the same axes over fewer devices; the first mesh axes shrink."""
    sizes, remaining = dict(mesh.shape), len(devices)
    for name in reversed(sizes):
        sizes[name] = math.gcd(sizes[name], remaining)
        remaining //= sizes[name]
    if remaining != 1:
        raise JShardError(
            f"{label} to {len(devices)} devices, over which the mesh {sizes_of(mesh)} can't be made smaller",
            hint=f"give it a number of devices that divides {mesh.size}, or a mesh",
        )
    grid = np.array(list(devices), dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
