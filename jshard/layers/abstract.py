"""Build models of shapes alone: how each array would be sharded, and no array made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jshard.layers.creating import described
from jshard.layers.uncreated import created as created_arrays
from jshard.layouts.mesh import with_axis_types
from jshard.signals.active_config import configuration, mesh, on_mesh

Made = TypeVar("Made")
Model = TypeVar("Model", bound=nnx.Module)


def abstract(factory: Callable[[], Made]) -> Made:
    """Build what `factory()` returns (NNX modules, optimizers, pytrees of them), with a `jax.ShapeDtypeStruct` for each
    array, sharded as its signal says on the loaded mesh; what no signal places is replicated. The devices of the mesh need
    not be here.

        model = abstract(lambda: Model(rngs=nnx.Rngs(0)))

    Layouts are read from types, so a slice of devices (`shard: {workers: [0, 1]}`), which is a mesh of its own, is not
    seen: what lies on it is taken to be replicated.
    """
    if configuration() is None:
        return nnx.eval_shape(factory)
    home = mesh()
    with on_mesh(with_axis_types(home, "explicit")):
        made = nnx.eval_shape(factory)

    def placed(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(home, spec))

    graph, state = nnx.split(made)
    return nnx.merge(graph, jax.tree.map(placed, state))


def created(factory: Callable[[], Model], placed: Callable[[], Model], only: Any = ...) -> Model:
    """Build what `placed()` returns, with the numbers that the same model has of `factory()`: each device computes its part,
    and no array is whole on one that holds a part of it. What the filter `only` leaves out stays a shape alone."""
    model = abstract(placed)
    asked, tree = jax.tree.flatten(nnx.state(model, only))
    drawn = jax.tree.leaves(nnx.state(described(factory), only))
    shapes = [x.at(like.sharding, like.dtype) for x, like in zip(drawn, asked, strict=True)]
    nnx.update(model, jax.tree.unflatten(tree, created_arrays(shapes)))
    return model
