"""One experiment: the model, data, loss and optimizer that `jshard.train` names, built on a mesh and ready to train."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jshard import run_names
from jshard.errors import JShardError, Place
from jshard.inspect.ledger import Ledger, Traced, ledger_of
from jshard.inspect.user_code_errors import told
from jshard.inspect.verify import Verification, verify
from jshard.layers.abstract import abstract
from jshard.signals.config import Configuration
from jshard.signals.scope import signal
from jshard.train.checkpoint import KEEP, Policy
from jshard.train.components import Component, parameters_of, transformation
from jshard.train.data import Examples, Placement, examples, settle, source
from jshard.train.loop import AHEAD, Step
from jshard.train.loss import cross_entropy
from jshard.train.optimizer import Optimizer
from jshard.train.sources import Shuffled, Source
from jshard.train.verifiable_step import step_with_gradients

DEFAULTS: Mapping[str, Any] = {
    "batch": 64,
    "steps": 1000,
    "seed": 0,
    "optimizer": "adamw",
}
LEARNING_RATE = 1e-3
LOG = 100
READING = ("shuffle", "last", "ahead")  # keys of `data` that are no arguments of it
Loss = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass
class Experiment:
    """What `jshard train` trains. `build` makes it; nothing has run yet then."""

    configuration: Configuration
    model: nnx.Module
    optimizer: nnx.Optimizer
    loss: Loss
    data: Source
    test: Examples
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

    @classmethod
    def build(cls, configuration: Configuration, mesh: Mesh | None, *, only_shapes: bool = False) -> Experiment:
        """With `only_shapes` no array is made, and the devices of the mesh need not be here: it can be explained and
        compiled, not trained."""
        said = Said(configuration)
        said.require("model")
        batch, steps, seed = said["batch"], said["steps"], said["seed"]
        placement = Placement(mesh, configuration.signals)
        placement.check(batch, said.place("batch"))
        component, how = said.data()
        with told(f"{component.path} is called"):
            returned = component(**said.rows(component, placement, batch))
        here = f"{component}, which"
        data = source(here, returned, batch=batch, seed=seed, shuffle=how.get("shuffle"), last=how.get("last"))
        test = examples(here, returned, "test")
        if isinstance(data, Shuffled):
            said.check_batch(len(data.examples), batch, data.last, placement)
        component = said.component("model")
        tx = transformation(said["optimizer"], configuration.train_places, LEARNING_RATE)

        def made(settled: Callable[[Any], Any]) -> tuple[nnx.Module, nnx.Optimizer]:
            model = settled(component(rngs=nnx.Rngs(seed)))
            return model, settled(Optimizer(model, tx))

        with told(f"{component.path} is built"):
            if only_shapes:
                model, optimizer = abstract(lambda: made(lambda module: module))
            else:
                model, optimizer = made(lambda module: settle(module, mesh))
        return cls(
            configuration=configuration,
            model=model,
            optimizer=optimizer,
            loss=_under_signal(cross_entropy if said["loss"] is None else said.component("loss"), configuration),
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
        )

    def explain(self) -> Ledger:
        """Every collective of the training step, and what is held between steps."""
        return self._ledger

    @functools.cached_property
    def _ledger(self) -> Ledger:
        step = Step(self.model, self.optimizer, self.loss)
        traced = Traced(step.program, (step.state, *self.first_batch()), {})
        return ledger_of(traced, [self.model, self.optimizer])

    def lowered(self) -> Any:
        """Lower the training step for the devices of its mesh."""
        step = Step(self.model, self.optimizer, self.loss)
        return step.program.lower(step.state, *self.first_batch())

    def verify(self, meshes: Sequence[Mapping[str, int]] = ()) -> Verification:
        """One whole training step, sharded against unsharded, on these other meshes as well: the loss, every gradient, and
        the parameters and the optimizer state after it."""
        step = step_with_gradients(self.loss)
        return verify(step, self.model, self.optimizer, *self.first_batch(), backward=False, meshes=meshes)

    def first_batch(self) -> tuple[Any, ...]:
        with told("data is read"):
            if self.only_shapes:
                return self.placement.shapes(self.batch, *self.data.example())
            return self.placement.place(self.batch, *self.data.first(self.placement.rows))


def _under_signal(loss: Loss, configuration: Configuration) -> Loss:
    """The loss under the signal "objective", where the configuration has one."""
    return signal("objective")(loss) if "objective" in configuration.signals else loss


class Said:
    """What `jshard.train` says, with the defaults, and where."""

    def __init__(self, configuration: Configuration):
        self.configuration = configuration

    def __getitem__(self, key: str) -> Any:
        return self.configuration.train.get(key, DEFAULTS.get(key))

    def every(self, key: str, default: int) -> int:
        said = self[key]
        return said if type(said) is int else said.get("every", default) if isinstance(said, Mapping) else default

    def place(self, key: str) -> Place:
        return self.configuration.train_places.get(key, Place(self.configuration.source))

    def component(self, key: str) -> Component:
        """What the import path under `key` leads to."""
        self.require(key)
        return Component.of(key, self[key], self.place(key))

    def data(self) -> tuple[Component, Mapping[str, Any]]:
        """What `data` names, and how it says that is read."""
        component = self.component("data")
        how = {key: value for key, value in component.arguments.items() if key in READING}
        taken = sorted(set(how) & set(parameters_of(component.function)))
        if taken:
            raise JShardError(
                f'{component}, which has an argument "{taken[0]}", and {taken[0]} beside it says how jshard reads data',
                mend=f"give the argument of {component.path} another name",
            )
        rest = {key: value for key, value in component.arguments.items() if key not in READING}
        return dataclasses.replace(component, arguments=rest), how

    def rows(self, component: Component, placement: Placement, batch: int) -> Mapping[str, Any]:
        """Which rows of each batch this process needs, for a data function that asks by an argument `rows`."""
        asks = "rows" in parameters_of(component.function) and "rows" not in component.arguments
        return {"rows": placement.rows(batch)} if asks else {}

    def checkpoint(self) -> Policy | None:
        """When to save, and where: in the output folder, unless it is said."""
        said, output = self["checkpoint"], self["output"]
        if said is None:
            return None
        said: Mapping[str, Any] = {"every": said} if isinstance(said, int) else said
        key, folder = ("checkpoint.folder", str(said["folder"])) if "folder" in said else ("checkpoint", None)
        if folder is None and output is None:
            raise JShardError(
                f"jshard.train.checkpoint ({self.place('checkpoint')}) has no folder to save to",
                mend="write output: runs/mine beside it, or folder: in it",
            )
        where = Path(folder or Path(output) / run_names.CHECKPOINTS)
        text = f'jshard.train.{key} ({self.place(key)}) saves to "{where}", which'
        return Policy(said["every"], said.get("keep", KEEP), where, text, str(output or where))

    def ran(self) -> Path | None:
        """Where each process writes what it runs; None where it does not."""
        said = self["log"]
        said = said if isinstance(said, Mapping) else {"ran": said}
        if not said.get("ran", "folder" in said):
            return None
        if "folder" not in said:
            self._require_output("log", "write output: runs/mine beside it, or folder: in it")
        return Path(said.get("folder") or Path(self["output"]) / run_names.LOG)

    def tensorboard(self) -> bool:
        """Whether figures are written for TensorBoard too."""
        said = self["log"]
        asked = isinstance(said, Mapping) and said.get("tensorboard", False)
        if asked:
            self._require_output("log.tensorboard", "write output: runs/mine")
        return asked

    def _require_output(self, key: str, mend: str) -> None:
        if self["output"] is None:
            raise JShardError(f"jshard.train.{key} ({self.place(key)}) has no folder to write to", mend=mend)

    def check_batch(self, count: int, batch: int, last: str, placement: Placement) -> None:
        """An error when there are too few examples for a batch, or `last: keep` leaves some that can't be split."""
        if batch > count and last != "keep":
            raise JShardError(
                f"jshard.train.batch ({self.place('batch')}) is {batch}, but there are {count} examples",
                mend=f"use {count} or fewer",
            )
        if last == "keep" and (count % batch) % placement.ways:
            raise JShardError(
                f"jshard.train.data.last ({self.place('data.last')}) is keep, and the last batch has {count % batch} of "
                f"{count} examples, which can't be split in {placement.ways}",
                mend="write last: drop or last: fill",
            )

    def require(self, key: str) -> None:
        if self[key] is None:
            example = {"model": "examples.digits:Model", "data": "examples.digits:data"}[key]
            raise JShardError(
                f"{self.configuration.source} names no {key} to train",
                mend=f"write {key}: {example} under jshard.train",
            )
