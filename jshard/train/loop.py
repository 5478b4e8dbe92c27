"""The training step as one program with donated state, the loop that dispatches it, and the evaluation."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.train.data import Examples, Placement, batches, padded
from jshard.train.loss import correct

# Steps are dispatched without waiting for the one before, but only so many: each holds a batch on the devices.
IN_FLIGHT = 16


class Step:
    """One training step. `state` is all that changes; it is donated at each call, so that it is held once."""

    def __init__(self, model: Any, optimizer: nnx.Optimizer, loss: Callable[[jax.Array, jax.Array], jax.Array]):
        graph, self.state = nnx.split((model, optimizer))
        where = jax.tree.map(lambda array: array.sharding, self.state)

        def train(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            model, optimizer = nnx.merge(graph, state)
            value, gradients = nnx.value_and_grad(lambda model: loss(model(x), y))(model)
            optimizer.update(model, gradients)
            return nnx.state((model, optimizer)), value

        def predict(state: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            model, _ = nnx.merge(graph, state)
            return correct(model(x), y)

        self.program = jax.jit(train, donate_argnums=0, out_shardings=(where, None))
        self.hits = jax.jit(predict, out_shardings=_read_by_all(where))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Trains on one batch and returns its loss, which may not be computed yet."""
        self.state, loss = self.program(self.state, x, y)
        return loss

    def into(self, model: Any, optimizer: nnx.Optimizer) -> None:
        """Puts what was learned into the modules that the step was made of."""
        nnx.update((model, optimizer), self.state)


def _read_by_all(where: Any) -> NamedSharding | None:
    """Whole everywhere, when devices of other processes take part, so that each process can read it; else as it comes."""
    for each in jax.tree.leaves(where):
        if isinstance(each, NamedSharding) and isinstance(each.mesh, Mesh) and not each.is_fully_addressable:
            return NamedSharding(each.mesh, PartitionSpec())
    return None


def run(
    step: Step, data: Examples, placement: Placement, *, batch: int, steps: int, seed: int
) -> Iterator[tuple[int, jax.Array]]:
    """Dispatches `steps` steps; yields the number of each, from 1, and its loss."""
    waiting: collections.deque[jax.Array] = collections.deque()
    for number, chosen in zip(range(1, steps + 1), batches(data, batch, seed), strict=False):
        waiting.append(step(*placement(chosen.x, chosen.y)))
        if len(waiting) > IN_FLIGHT:
            waiting.popleft().block_until_ready()
        yield number, waiting[-1]


def evaluate(step: Step, data: Examples, placement: Placement, batch: int) -> float:
    """The part of `data` that the model gets right."""
    hits = sum(
        float(np.dot(np.asarray(step.hits(step.state, *placement(chosen.x, chosen.y))), weights))
        for chosen, weights in padded(data, batch)
    )
    return hits / len(data)
