"""One experiment: the model, data, loss and optimizer that `jshard.train` names, built on a mesh and ready to train."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.inspect.ledger import Ledger, Traced, ledger_of
from jshard.inspect.user_code_errors import as_user_error
from jshard.inspect.verify import Verification, verify
from jshard.layers.abstract import abstract
from jshard.signals.config import Configuration
from jshard.signals.scope import signal
from jshard.train.components import Component, parameters_of, transformation
from jshard.train.data import Examples, Placement, examples, in_memory, numbers_of, part_of, settle, source
from jshard.train.home import home_of
from jshard.train.loop import AHEAD, Step
from jshard.train.loss import cross_entropy
from jshard.train.objective import Objective, are_classes, check_called, shown
from jshard.train.optimizer import Optimizer
from jshard.train.settings import LEARNING_RATE, LOG, Policy, Settings
from jshard.train.sources import Shuffled, Source
from jshard.train.verifiable_step import step_with_gradients

READING = ("shuffle", "last", "ahead")  # keys of `data` that are no arguments of it


@dataclasses.dataclass
class Experiment:
    """What `jshard train` trains. `build` makes it; nothing has run yet then."""

    configuration: Configuration
    model: nnx.Module
    optimizer: nnx.Optimizer
    loss: Objective
    data: Source
    test: Examples | None
    placement: Placement
    batch: int
    steps: int
    seed: int
    log: int  # say and write figures after every so many steps
    evaluation: int  # evaluate after every so many
    output: str | None
    ahead: int = AHEAD  # batches that are read before they are asked for
    checkpoint: Policy | None = None
    ran: Path | None = None  # where each process writes what it runs
    tensorboard: bool = False
    only_shapes: bool = False
    apart: str | None = None  # why no one program is a step: layers, or their backward, on several sets of devices

    @classmethod
    def build(cls, configuration: Configuration, mesh: Mesh | None, *, only_shapes: bool = False) -> Experiment:
        """With `only_shapes` no array is made, and the devices of the mesh need not be here: it can be explained and
        compiled, not trained."""
        said = Settings(configuration)
        said.require("model")
        batch, steps, seed = said["batch"], said["steps"], said["seed"]
        placement = Placement(mesh, configuration.signals)
        said.check_rows(placement.ways)
        component, how = _data(said)
        with as_user_error(f"{component.path} is called"):
            returned = component(**_rows(component, placement, batch))
        here = f"{component}, which"
        data = source(here, returned, batch=batch, seed=seed, shuffle=how.get("shuffle"), last=how.get("last"))
        test = None if part_of(returned, "test") is None else examples(here, returned, "test")
        if isinstance(data, Shuffled):
            _check_count(said, len(data.examples), batch, data.last, placement)
        model_named, loss_named = _component(said, "model"), _component(said, "loss") if said["loss"] else None
        tx = transformation(said["optimizer"], configuration.train_places, LEARNING_RATE)

        apart = None

        def made() -> tuple[nnx.Module, nnx.Optimizer]:
            model = model_named(rngs=nnx.Rngs(seed))
            return model, Optimizer(model, tx)

        with as_user_error(f"{model_named.path} is built"):
            if only_shapes:
                model, optimizer = abstract(made)
            else:
                model = model_named(rngs=nnx.Rngs(seed))
                home, apart = home_of(model, mesh)
                if home is not mesh:
                    placement = Placement(home, {})
                settle(model, home)
                optimizer = settle(Optimizer(model, tx), home)
        check_called(model_named, model)
        loss = loss_named or cross_entropy
        loss = signal("objective")(loss) if "objective" in configuration.signals else loss
        present = {} if loss_named else in_memory(data, test)
        classes = {part: found for part, each in present.items() if (found := numbers_of(each.y))}
        return cls(
            configuration=configuration,
            model=model,
            optimizer=optimizer,
            loss=Objective(loss, loss_named, model_named, component, classes),
            data=data,
            test=test,
            placement=placement,
            batch=batch,
            steps=steps,
            seed=seed,
            log=said.every("log", LOG),
            evaluation=said.every("evaluation", steps),
            output=said["output"],
            ahead=how.get("ahead", AHEAD),
            checkpoint=said.checkpoint(),
            ran=said.ran(),
            tensorboard=said.tensorboard(),
            only_shapes=only_shapes,
            apart=apart,
        )

    def step(self) -> Step:
        """The training step, over the arrays of the model and the optimizer as they are now."""
        return Step(self.model, self.optimizer, self.loss, apart=self.apart is not None)

    def evaluated_on(self, step: Step, say: Callable[[str], None]) -> Examples | None:
        """The test data, where the part that is right can be counted; else `say` why nothing is evaluated."""
        data = self.loss.data
        if self.test is None:
            why = 'returns no "test"'
        else:
            outputs = self.outputs(step)
            (targets,) = self.placement.shapes(self.batch, self.test.take(np.arange(1))[1])
            if are_classes(outputs, targets):
                return self.test
            why = f'returns targets {shown(targets)} in "test", which are no classes of the outputs {shown(outputs)}'
        if "evaluation" in self.configuration.train:
            raise JShardError(
                f"jshard.train.evaluation ({self.configuration.train_places['evaluation']}) is on test data, and {data.path} "
                f"{why}",
                hint='return {"train": (x, y), "test": (x, y)}, or remove evaluation',
            )
        say(f"nothing is evaluated: {data.path} {why}")
        return None

    def outputs(self, step: Step) -> Any:
        """The shapes of what the model makes of a batch."""
        (x,) = self.placement.shapes(self.batch, self.data.example()[0])
        if self.apart:  # nothing can be traced as a whole
            return step.predict(step.state, self.first_batch()[0])
        return jax.eval_shape(step.predict, step.state, x)

    def check_read(self, step: Step) -> Callable[[Any], None]:
        """What raises an error for classes, among targets that are read meanwhile, which the model has no output for."""
        if self.loss.written is not None or "train" in self.loss.classes:
            return lambda y: None
        outputs = self.outputs(step)

        def check(y: Any) -> None:
            if (numbers := numbers_of(y)) and isinstance(outputs, jax.ShapeDtypeStruct):
                self.loss.check_numbers(numbers, outputs.shape[-1], "in a batch")

        return check

    def explain(self) -> Ledger:
        """Every collective of the training step, and what is held between steps."""
        return self._ledger

    @functools.cached_property
    def _ledger(self) -> Ledger:
        if self.apart:
            raise JShardError(self.apart, hint="name the same workers for both, or mesh axes")
        step = self.step()
        traced = Traced(step.program, (step.state, *self.first_batch()), {})
        return ledger_of(traced, [self.model, self.optimizer])

    def lowered(self) -> Any:
        """Lower the training step for the devices of its mesh."""
        step = self.step()
        return step.program.lower(step.state, *self.first_batch())

    def verify(self, meshes: Sequence[Mapping[str, int]] = ()) -> Verification:
        """One whole training step, sharded against unsharded, on these other meshes as well: the loss, every gradient, and
        the parameters and the optimizer state after it."""
        step, args = step_with_gradients(self.loss), (self.model, self.optimizer, *self.first_batch())
        return verify(step, *args, backward=False, meshes=meshes)

    def first_batch(self) -> tuple[Any, ...]:
        with as_user_error("data is read"):
            if self.only_shapes:
                return self.placement.shapes(self.batch, *self.data.example())
            return self.placement.place(self.batch, *self.data.first(self.placement.rows))


def _component(said: Settings, key: str) -> Component:
    """What the import path under `key` leads to."""
    said.require(key)
    return Component.of(key, said[key], said.place(key))


def _data(said: Settings) -> tuple[Component, Mapping[str, Any]]:
    """What `data` names, and how it says that is read."""
    component = _component(said, "data")
    how = {key: value for key, value in component.arguments.items() if key in READING}
    taken = sorted(set(how) & set(parameters_of(component.function)))
    if taken:
        raise JShardError(
            f'{component}, which has an argument "{taken[0]}", and {taken[0]} beside it says how jshard reads data',
            hint=f"give the argument of {component.path} another name",
        )
    rest = {key: value for key, value in component.arguments.items() if key not in READING}
    return dataclasses.replace(component, arguments=rest), how


def _rows(component: Component, placement: Placement, batch: int) -> Mapping[str, Any]:
    """Which rows of each batch this process needs, for a data function that asks by an argument `rows`."""
    asks = "rows" in parameters_of(component.function) and "rows" not in component.arguments
    return {"rows": placement.rows(batch)} if asks else {}


def _check_count(said: Settings, count: int, batch: int, last: str, placement: Placement) -> None:
    """An error when there are too few examples for a batch, or `last: keep` leaves some that can't be split."""
    if batch > count and last != "keep":
        raise JShardError(
            f"jshard.train.batch ({said.place('batch')}) is {batch}, but there are {count} examples",
            hint=f"use {count} or fewer",
        )
    if last == "keep" and (count % batch) % placement.ways:
        raise JShardError(
            f"jshard.train.data.last ({said.place('data.last')}) is keep, and the last batch has {count % batch} of "
            f"{count} examples, which can't be split in {placement.ways}",
            hint="write last: drop or last: fill",
        )
