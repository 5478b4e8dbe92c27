"""The training step as one program with donated state, the loop that dispatches it, and the evaluation."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import layers
from jshard.inspect.verify.inputs import Named, named_leaves
from jshard.layers.gradients import accumulated
from jshard.layers.sharding import objective_of, partitioned
from jshard.layers.user_code_errors import as_user_error
from jshard.training.data.batches import Placement, padded, read_ahead
from jshard.training.data.sources import Position, Selectable, Source
from jshard.training.experiments.loss import Objective

# The most steps dispatched and unfinished: each holds a batch on the devices.
IN_FLIGHT = 16
AHEAD = 2


class TrainingStep:
    """A training step over `state`, the donated arrays of model and optimizer. `apart` means layers
    on several sets of devices: each operation runs by itself."""

    def __init__(
        self,
        model: Any,
        optimizer: nnx.Optimizer,
        loss: Objective,
        *,
        apart: bool = False,
        microbatches: int = 1,
    ):
        compiled: Any = (lambda f, **how: f) if apart else jax.jit
        graph, self.state = nnx.split((model, optimizer))
        where = jax.tree.map(lambda array: array.sharding, self.state)
        differentiated, scores = gradients_of(model, loss, microbatches), partitioned(model, loss.scores)

        def train(state: object, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            model, optimizer = nnx.merge(graph, state)
            value, gradients = differentiated(model, x, y)
            optimizer.update(model, gradients)
            return nnx.state((model, optimizer)), value

        def evaluated(state: object) -> Any:
            model, _ = nnx.merge(graph, state)
            model = nnx.view(model, deterministic=True, use_running_average=True, raise_if_not_found=False)
            model.eval()  # for the user's modules with these attributes and without `set_view`
            return model

        self.program = compiled(train, donate_argnums=0, out_shardings=(where, None))
        self.predict = lambda state, x: evaluated(state)(x)
        self.scores = compiled(lambda state, x, y: scores(evaluated(state), x, y), out_shardings=_read_by_all(where))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Train on a batch and return its loss, which may not be computed yet."""
        self.state, loss = self.program(self.state, x, y)
        return loss

    def over(self, model: object, optimizer: nnx.Optimizer) -> TrainingStep:
        """Return a step with the same programs over the present arrays of `model` and `optimizer`."""
        other = copy.copy(self)
        other.state = nnx.split((model, optimizer))[1]
        return other

    def into(self, model: object, optimizer: nnx.Optimizer) -> None:
        """Copy the state into `model` and `optimizer`."""
        nnx.update((model, optimizer), self.state)


def gradients_of(model: Any, loss: Objective, microbatches: int, argnums: Any = 0) -> Callable[..., Any]:
    """Return a function from a batch to its loss and gradients, summed over microbatches if there
    are several. `argnums` holds for a single microbatch only."""
    if microbatches == 1:
        return nnx.value_and_grad(partitioned(model, objective_of(loss)), argnums=argnums)
    by_microbatches = accumulated(objective_of(loss))

    def differentiated(model: object, x: object, y: Any) -> Any:
        if len(jax.tree.leaves(y)) > 1 or loss.written is not None or y[0].ndim < 2:
            return by_microbatches(model, x, y)
        # The loss is a mean over the tokens with a target; their number differs between microbatches.
        count = jnp.maximum(layers.sum((y >= 0).astype(jnp.float32)), 1.0) / microbatches
        return by_microbatches(model, x, y, jnp.broadcast_to(count, microbatches))

    return differentiated


def step_with_gradients(loss: Objective, microbatches: int = 1) -> Callable[..., Named]:
    """Return a training step for `verify`, with the loss and the gradients of parameters and float
    inputs as results. It updates the model and the optimizer in place."""

    def train(model: object, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> Named:
        smooth = microbatches == 1 and all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(x))
        argnums = [nnx.DiffState(0, optimizer.wrt), 1] if smooth else nnx.DiffState(0, optimizer.wrt)
        value, results = gradients_of(model, loss, microbatches, argnums)(model, x, y)
        gradients, *of_x = results if smooth else [results]
        optimizer.update(model, gradients)
        named = {**named_leaves("model", gradients), **(named_leaves("x", of_x[0]) if smooth else {})}
        return Named({"loss": value, **{f"gradient of {name}": leaf for name, leaf in named.items()}})

    return train


def _read_by_all(where: object) -> NamedSharding | None:
    """Return a replicated sharding if the devices belong to several processes, so that each can read the results."""
    named = (each for each in jax.tree.leaves(where) if isinstance(each, NamedSharding))
    meshes = (each.mesh for each in named if isinstance(each.mesh, Mesh) and not each.is_fully_addressable)
    return next((NamedSharding(mesh, PartitionSpec()) for mesh in meshes), None)


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
    """A dispatched step: its number, from 1, its loss, which may not be computed yet, and the next position in the data.

    `settle()` waits for this step and all before it, and raises `NotANumber` at the first NaN loss. `fed` and `called` are
    the seconds of the wait for the batch and of the dispatch.
    """

    number: int
    loss: jax.Array
    position: Position
    settle: Callable[[], None]
    fed: float = 0.0
    called: float = 0.0


def run(
    step: Callable[..., jax.Array],
    source: Source,
    placement: Placement,
    *,
    steps: int,
    ahead: int = AHEAD,
    since: tuple[int, Position | None] = (0, None),
    begins: Callable[[int], None] = lambda number: None,
    check: Callable[[Any], None] = lambda y: None,
) -> Generator[DispatchedStep]:
    """Dispatch steps up to number `steps` and yield each; `since` holds the finished steps and the data's position.

    `ahead` batches are read and transferred in advance. `begins` is called with each number before the dispatch, `check`
    with each batch's targets. A NaN loss raises `NotANumber`, at most `IN_FLIGHT` steps later.
    """
    waiting: collections.deque[tuple[int, jax.Array, Position | None]] = collections.deque()
    done, position = since
    numbers = range(done + 1, steps + 1)

    def settle(unfinished: int = 0) -> None:
        while len(waiting) > unfinished:
            number, loss, before = waiting.popleft()
            if math.isnan(float(loss)):
                raise NotANumber(number, read=(before,))

    with read_ahead(placed(source, placement, position, len(numbers), check), ahead) as batches:
        asked = time.perf_counter()
        for number, (batch, behind) in zip(numbers, batches, strict=True):
            fed = time.perf_counter()
            begins(number)
            loss = step(*batch)
            called = time.perf_counter()
            waiting.append((number, loss, position))
            position = behind
            settle(IN_FLIGHT)
            yield DispatchedStep(number, loss, behind, settle, fed - asked, called - fed)
            asked = time.perf_counter()
        settle()


def placed(
    source: Source,
    placement: Placement,
    position: Position | None,
    count: int | None,
    check: Callable[[Any], None] = lambda y: None,
) -> Generator[tuple[tuple[Any, ...], Position]]:
    """Yield `count` batches placed on the devices, with the position after each."""
    with as_user_error("data is read"):
        for batch in itertools.islice(source.read(position, placement.rows), count):
            check(batch.y)
            yield placement.place(batch.size, batch.x, batch.y), batch.position


def holds_nan(state: Any) -> bool:
    """Return True if a parameter holds a NaN."""
    by_devices: dict[Any, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(nnx.filter_state(state[0], nnx.Param)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            by_devices.setdefault(frozenset(leaf.sharding.device_set), []).append(leaf)
    return any(bool(_any_nan(leaves)) for leaves in by_devices.values())


@jax.jit
def _any_nan(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isnan(array).any() for array in arrays]).any()


class NotANumber(Exception):
    """A NaN in a step's loss, or in a parameter after it; `read` holds the position of its
    batch."""

    def __init__(self, step: int, what: str = "the loss of", *, read: tuple[Position | None, ...] = ()):
        super().__init__(f"{what} step {step} is NaN")
        self.step, self.read = step, read


def evaluate(step: TrainingStep, data: Selectable, placement: Placement, batch: int) -> dict[str, float]:
    """Return the model's mean figures on `data`, over all rows or over all tokens with a target."""
    sums: dict[str, tuple[float, float]] = {}
    for chosen, weights in padded(data, batch):
        for name, both in step.scores(step.state, *placement(chosen.x, chosen.y)).items():
            more = (float(np.dot(np.asarray(rows), weights)) for rows in both)
            sums[name] = tuple(map(sum, zip(sums.get(name, (0.0, 0.0)), more, strict=True)))  # type: ignore[assignment]  # two
    order = sorted(sums, key=lambda name: (name == "accuracy", name != "loss", name))
    return {f"test_{name}": sums[name][0] / max(sums[name][1], 1.0) for name in order}
