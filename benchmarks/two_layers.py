"""What the benchmarks of a training step share: the model, its loss, and a step that takes its own state again. It imports
JAX: import it behind `jshard.pretend` or `jshard.init`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jshard


class Model(nnx.Module):
    """Two layers under the signals "up" and "down", or more, all but the last under "up"; it says nothing of a mesh or of
    processes."""

    def __init__(self, features: Sequence[int], rngs: nnx.Rngs):
        sizes = list(zip(features, features[1:], strict=False))
        with jshard.signal("up"):
            self.up = jshard.Linear(*sizes[0], rngs=rngs)
            self.between = nnx.List([jshard.Linear(*each, rngs=rngs) for each in sizes[1:-1]])
        with jshard.signal("down"):
            self.down = jshard.Linear(*sizes[-1], rngs=rngs)

    @property
    def layers(self) -> list[jshard.Linear]:
        return [self.up, *self.between, self.down]

    def __call__(self, x: jax.Array) -> jax.Array:
        *first, last = self.layers
        for layer in first:
            x = jax.nn.relu(layer(x))
        return last(x)


class Plain(nnx.Module):
    """Two layers of Flax's own."""

    def __init__(self, features: Sequence[int]):
        self.up, self.down = (nnx.Linear(*each, rngs=nnx.Rngs(0)) for each in zip(features, features[1:], strict=False))

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
