"""Gradients of a batch that is taken in microbatches, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.layers.sharding import call_of, partitioned
from jshard.layouts.mesh import is_explicit
from jshard.signals.active_config import configuration, mesh
from jshard.signals.scope import unplaced


def accumulated(f: Callable[..., Any]) -> Callable[..., Any]:
    """Differentiate `f(model, *batch)` over microbatches: of arrays with an axis of them before their own it returns the mean
    of the values, and of the gradients, as `nnx.value_and_grad(f)` would of each. The model's other variables (random
    states, statistics) go from one to the next.

    On an explicit mesh the loop runs on each device's part, as under `jshard.shard`: each gradient is summed over devices once,
    behind it; but that of a parameter under `store` is scattered, and the parameter gathered, in each turn, as neither is
    whole between them. Elsewhere the loop is left to XLA.
    """

    def differentiated(model: Any, *batches: Any) -> Any:
        present = configuration()
        if present is None or present.mesh is None or unplaced.value or not is_explicit(mesh()):
            return _in_turn(partitioned(model, f), model, *batches)
        call = call_of(f, (model, *jax.tree.map(lambda x: x[0], batches)), {})
        name, *names = call.given
        value, (gradients,) = call.microbatches(dict(zip(names, batches, strict=True)), [name])
        return value, jax.tree.unflatten(jax.tree.structure(nnx.state(model, nnx.Param)), gradients)

    return differentiated


def _in_turn(f: Callable[..., Any], model: Any, *batches: object) -> Any:
    graph, parameters, variables = nnx.split(model, nnx.Param, ...)

    def loss(parameters: object, variables: object, batch: Any) -> tuple[Any, Any]:
        model = nnx.merge(
            graph, parameters, jax.tree.map(lambda x: x, variables)
        )  # of this trace, which may change them
        value = f(model, *batch)
        return value, nnx.split(model, nnx.Param, ...)[2]

    def turn(carry: tuple[Any, ...], batch: object) -> tuple[Any, None]:
        total, sums, variables = carry
        (value, variables), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, variables, batch)
        return (total + value, jax.tree.map(jnp.add, sums, gradients), variables), None

    one, _ = jax.eval_shape(loss, parameters, variables, jax.tree.map(lambda x: x[0], batches))
    start = jnp.zeros((), one.dtype), jax.tree.map(jnp.zeros_like, parameters), variables
    (total, sums, variables), _ = jax.lax.scan(turn, start, batches)
    nnx.update(model, variables)
    count = jax.tree.leaves(batches)[0].shape[0]
    return total / count, jax.tree.map(lambda x: x / count, sums)
