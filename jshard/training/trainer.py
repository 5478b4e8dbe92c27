"""`jshard.train` and `jshard.batches`: the loop and the data loader of `jshard train`, for the user's own objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from types import MappingProxyType
from typing import Any

import jax
import optax
from flax import nnx

from jshard.errors import JShardError, Location
from jshard.layers.token_loss import cross_entropy
from jshard.signals.active_config import configuration, mesh
from jshard.signals.config import Configuration, load_configuration
from jshard.training.components import Component
from jshard.training.data.batches import Placement, part_of, read_ahead, source
from jshard.training.experiments.experiment import READING, Experiment
from jshard.training.experiments.loop import AHEAD, placed
from jshard.training.experiments.loss import Objective
from jshard.training.experiments.train import last_saved
from jshard.training.experiments.train import train as train_experiment
from jshard.training.optimizers.chain import Chain

HERE = Location("jshard.train(...)")


def train(
    model: nnx.Module,
    optimizer: optax.GradientTransformation | nnx.Optimizer,
    data: object,
    *,
    loss: Callable[[Any, Any], jax.Array] | None = None,
    metrics: Sequence[Callable[[Any, Any], jax.Array]] = (),
    resume: bool = False,
    **settings: object,
) -> dict[str, float]:
    """Train a model in place, as `jshard train` does, with figures, evaluation and checkpoints.

        jshard.train(model, optax.adamw(1e-3), {"train": (x, y), "test": (x, y)}, steps=1000, batch=64)

    The loaded configuration shards the run. `data` is the result of a data function, or its "train" alone; `shuffle`, `last`
    and `ahead` set how it is read. `loss` is by default cross entropy. `optimizer` is an optax transformation or a
    `jshard.Optimizer` of the model. All other arguments are keys of `jshard.train` in YAML: steps, batch, microbatches,
    evaluation, log, output, checkpoint, seed. With `resume`, training continues from the last checkpoint, if there is one.
    Returns the last loss and the figures of the last evaluation.
    """
    how = {key: settings.pop(key) for key in READING if key in settings}
    present = _configured(settings)
    given = optimizer if isinstance(optimizer, nnx.Optimizer) else None
    tx = given.tx if given is not None else optimizer
    written = None if loss is None else _component("loss", loss)
    objective = Objective(
        written or cross_entropy,
        written,
        model=_component("model", lambda rngs: model, type(model).__name__),
        data=_component("data", lambda: data, "data"),
        metrics=[_component("metrics", each) for each in metrics],
    )
    returned = data if part_of(data, "train") is not None else {"train": data}
    chain = Chain(tx, None, "", None, (), "")  # type: ignore[arg-type]  # of the two
    where = None if present.mesh is None else mesh()
    experiment = Experiment.of(objective, returned, how, chain, present, where, optimizer=given, is_made=True)
    return train_experiment(experiment, resume=last_saved(experiment) if resume else None)


def batches(
    data: object,
    *,
    batch: int = 64,
    steps: int | None = None,
    ahead: int = AHEAD,
    shuffle: bool | None = None,
    last: str | None = None,
    seed: int = 0,
) -> Generator[tuple[Any, Any]]:
    """Yield `steps` batches `(x, y)` placed on the devices by the loaded signals, in an order set by `seed`.

        for x, y in jshard.batches((x, y), batch=64, steps=1000):
            loss = step(model, optimizer, x, y)

    Without `steps` the batches do not end. `data` is a pair of arrays, a sequence of examples `(x, y)`, an iterable of
    batches, or a function that returns an iterable. A thread reads `ahead` batches in advance and starts their transfer.
    """
    present = _configured({"batch": batch})
    given = data if part_of(data, "train") is not None else {"train": data}
    read = source("jshard.batches", given, batch=batch, seed=seed, shuffle=shuffle, last=last)
    where = Placement(None if present.mesh is None else mesh(), present.signals)
    with read_ahead(placed(read, where, None, steps), ahead) as made:
        for pair, _ in made:
            yield pair  # type: ignore[misc]


def _configured(settings: dict[str, Any]) -> Configuration:
    """Return the loaded configuration with `settings` in place of its `jshard.train`."""
    said = load_configuration({"jshard": {"train": settings}})
    present = configuration() or said
    places = MappingProxyType(dict.fromkeys(said.train_places, HERE))
    count = said.train.get("microbatches")
    if present.pipeline is not None and count not in (None, present.pipeline.microbatches):
        raise JShardError(
            f"jshard.train is given microbatches={count}, and {present.pipeline} ({present.pipeline.place})",
            hint="remove microbatches",
        )
    parts = {} if present.pipeline is None else {"microbatches": present.pipeline.microbatches}
    return dataclasses.replace(present, train=MappingProxyType({**said.train, **parts}), train_places=places)


def _component(key: str, function: Callable[..., Any], path: str | None = None) -> Component:
    name = getattr(function, "__name__", type(function).__name__) if path is None else path
    return Component(key, HERE, name, function, {})
