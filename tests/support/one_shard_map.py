"""A function of NNX objects and placed arrays, run in one shard_map of jax, in which layers run their bodies on shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jshard
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import with_axis_types
from jshard.signals.active_config import on_mesh


def in_one_shard_map(f: Callable[..., Any] | None = None, *, outputs: Any = None) -> Callable[..., Any]:
    """Return `f` in one shard_map. `outputs` are the specs of its results; else a trace over whole arrays finds them."""
    if f is None:
        return functools.partial(in_one_shard_map, outputs=outputs)

    def program(args: tuple[Any, ...]) -> tuple[Any, list[Any], Any]:
        graph, variables, arrays = nnx.split(args, nnx.Variable, ...)
        leaves, tree = jax.tree.flatten((variables, arrays))
        count, specs = len(jax.tree.leaves(variables)), tuple(map(_spec, leaves))

        def run(*xs: Any) -> Any:
            args = nnx.merge(graph, *jax.tree.unflatten(tree, xs))
            result = f(*args)
            return result, jax.tree.leaves(nnx.split(args, nnx.Variable, ...)[1])

        found = _specs_of_results(run, leaves, specs) if outputs is None else outputs
        mapped = jax.shard_map(run, mesh=jshard.mesh(), in_specs=specs, out_specs=(found, list(specs[:count])))
        return jax.jit(mapped), leaves, jax.tree.structure(variables)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        run, leaves, variables = program(args)
        result, numbers = run(*leaves)
        nnx.update(args, jax.tree.unflatten(variables, numbers))
        return result

    def lower(*args: Any) -> Any:
        run, leaves, _ = program(args)
        return run.lower(*leaves)

    vars(call)["lower"] = lower
    return call


def _spec(x: Any) -> PartitionSpec:
    layout = Layout.of(x)
    return PartitionSpec(*(None,) * jax.typeof(x).ndim) if layout is None else layout.spec


def _specs_of_results(run: Callable[..., Any], leaves: list[Any], specs: tuple[PartitionSpec, ...]) -> Any:
    twin = with_axis_types(jshard.mesh(), "explicit")
    typed = [
        jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.typeof(x).dtype, sharding=NamedSharding(twin, spec))
        for x, spec in zip(leaves, specs, strict=True)
    ]
    with on_mesh(twin):
        return jax.tree.map(_spec, jax.eval_shape(run, *typed)[0])
