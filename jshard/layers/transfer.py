"""Move a model, or any tree of arrays, to other devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jshard.errors import JShardError
from jshard.layouts.layout import Layout
from jshard.layouts.paths import words_of
from jshard.layouts.transfer import fewer, on_host, transfer


def move(model: Any, to: Mesh | Sequence[Any] | Literal["host"]) -> Any:
    """Move `model` (a module, an optimizer, any tree) to another mesh, with every array sharded over the same mesh axes as
    before; what was replicated is replicated. The old one stays as it is, and its memory is free once it is gone.

        small = jshard.move(model, jax.make_mesh((1, 2), ("data", "tensor")))
        small = jshard.move(model, jax.devices()[:2])     # the same mesh axes, the first ones smaller
        away = jshard.move(model, "host")                 # out of the devices' memory, still split
        model = jshard.move(away, mesh)                   # and back

    Devices may be numbers. No device ever holds more than its part; nothing but arrays on devices is touched. Every
    process calls it. The layers of a model follow the configuration that is loaded: load one whose mesh is the new one.
    """
    if isinstance(model, jax.Array):
        return _moving(to, [model])("the array", model)
    graph, state = nnx.split(model)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    moved_by = _moving(to, [leaf for _, leaf in leaves])
    moved: dict[int, Any] = {}  # what is in two places of the model is moved once
    for path, leaf in leaves:
        if id(leaf) not in moved:
            moved[id(leaf)] = moved_by(_named(path), leaf) if isinstance(leaf, jax.Array) else leaf
    return nnx.merge(graph, jax.tree.unflatten(tree, [moved[id(leaf)] for _, leaf in leaves]))


def _moving(to: Any, leaves: Sequence[Any]) -> Callable[[str, jax.Array], jax.Array]:
    """Return the function that moves one array."""
    if isinstance(to, str):
        if to != "host":
            raise JShardError(f'jshard.move to "{to}"', hint='use "host", a mesh or devices')
        return lambda name, x: _of_numbers(x, on_host)
    mesh = to if isinstance(to, Mesh) else _mesh_of(to, leaves)
    return lambda name, x: _of_numbers(x, lambda numbers: transfer(numbers, _layout(name, numbers, mesh).sharding))


def _of_numbers(x: jax.Array, moved: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Move `x`, a random key as the numbers that it is made of."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return moved(x)
    return jax.random.wrap_key_data(moved(jax.random.key_data(x)), impl=jax.random.key_impl(x))


def _layout(name: str, x: jax.Array, mesh: Mesh) -> Layout:
    axes = Layout.from_sharding(x.sharding, x.ndim).axes if isinstance(x.sharding, NamedSharding) else ((),) * x.ndim
    label = f"jshard.move: {name}"
    for mesh_axis in (mesh_axis for names in axes for mesh_axis in names):
        if mesh_axis not in mesh.shape:
            sizes = ", ".join(f"{each}: {size}" for each, size in mesh.shape.items())
            raise JShardError(
                f'{label} lies over mesh axis "{mesh_axis}", which the mesh {{{sizes}}} does not have',
                hint=f"give the mesh an axis {mesh_axis}, if only of size 1",
            )
    layout = Layout(mesh, *axes)
    layout.shard_shape(x.shape, label=label)
    return layout


def _mesh_of(devices: Sequence[Any], leaves: Sequence[Any]) -> Mesh:
    present = jax.devices()
    chosen = []
    for each in devices:
        if isinstance(each, int):
            if not 0 <= each < len(present):
                raise JShardError(
                    f"jshard.move to device {each}, but {len(present)} are here", hint=f"use 0 to {len(present) - 1}"
                )
            each = present[each]
        chosen.append(each)
    shardings = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)]
    meshes = list(dict.fromkeys(each.mesh for each in shardings if isinstance(each, NamedSharding)))
    if len(meshes) >= 2:
        raise JShardError(
            f"jshard.move to {len(chosen)} devices of what lies on {len(meshes)} meshes",
            hint="say which mesh it shall lie on: jshard.move(model, mesh)",
        )
    present_mesh = meshes[0] if meshes else jax.make_mesh((1,), ("devices",), devices=chosen or present)
    assert isinstance(present_mesh, Mesh)
    return fewer(present_mesh, chosen, label="jshard.move")


def _named(path: Sequence[Any]) -> str:
    return ".".join(word for word in words_of(path) if word != "raw_value")
