"""What the benchmarks of a training step share: the model, its loss, and a step that takes its own state again. It imports
JAX: import it behind `jshard.pretend` or `jshard.init`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jshard


class Model(nnx.Module):
    """Two layers under the signals "up" and "down"; it says nothing of a mesh or of processes."""

    def __init__(self, features: tuple[int, int, int], rngs: nnx.Rngs):
        with jshard.signal("up"):
            self.up = jshard.Linear(features[0], features[1], rngs=rngs)
        with jshard.signal("down"):
            self.down = jshard.Linear(features[1], features[2], rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


def losses(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """The cross entropy of each row."""
    return -jnp.sum(jax.nn.one_hot(y, outputs.shape[-1]) * jax.nn.log_softmax(outputs), axis=-1)


def threaded(program: Any, state: Any, *batch: jax.Array) -> Callable[[], Any]:
    """`program(state, *batch)`, called again and again with the state that it returned."""

    def step() -> Any:
        nonlocal state
        state, value = program(state, *batch)
        return value

    return step


def by_layers(train: Callable[..., Any], made: tuple[Model, jshard.Optimizer], *batch: jax.Array) -> Callable[[], Any]:
    """`train(model, optimizer, *batch)` under jax.jit, the collectives of each layer in a shard_map of its own."""
    graph, state = nnx.split(made)

    def step(state: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        value = train(model, optimizer, *batch)
        return nnx.state((model, optimizer)), value

    return threaded(jax.jit(step, donate_argnums=0), state, *batch)
