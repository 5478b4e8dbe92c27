"""An experiment: the model, data, loss and optimizer named under `jshard.train`, built on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.hardware.host import computes_on_cpus, memory_of_host
from jshard.inspect.ledger import Ledger, Traced, ledger_of
from jshard.inspect.plan import Plan, Topology
from jshard.inspect.plan.aot import LIMIT
from jshard.inspect.plan.planning import planned, with_added
from jshard.inspect.verify import Verification, verify
from jshard.layers.creating import abstract, created
from jshard.layers.layer import model_arrays, parameters_by_path
from jshard.layers.program_claims import is_run_by_claims
from jshard.layers.sharding import shard
from jshard.layers.token_loss import CHUNK, cross_entropy
from jshard.layers.user_code_errors import as_user_error
from jshard.printing.units import size
from jshard.signals import device_sets
from jshard.signals.active_config import mesh_for, unload
from jshard.signals.config import Configuration
from jshard.signals.scope import signal
from jshard.training.components import Component, parameters_of
from jshard.training.data.batches import Examples, Placement, examples, held_out, numbers_of, part_of, settle, source
from jshard.training.data.sources import Selectable, Shuffled, Source
from jshard.training.data.text import packed_rows
from jshard.training.data.tokens import tokenizer
from jshard.training.experiments.loop import AHEAD, TrainingStep, placed, step_with_gradients
from jshard.training.experiments.loss import Objective, check_called, has_hidden
from jshard.training.experiments.plain_steps import plain_steps
from jshard.training.optimizers.chain import Chain
from jshard.training.optimizers.optimizer import Optimizer
from jshard.training.settings import Settings

MOST, TIMES = 2 * 2**30, 25  # bytes of parameters verified at full depth, and the memory needed, in multiples of them
DEPTHS = ("depth", "layers", "num_layers", "n_layers", "num_hidden_layers")  # arguments for the number of layers
STEPS = 2  # compared with plain Flax
READING = ("shuffle", "last", "ahead")  # keys of `data` for jshard, not for the data function


@dataclasses.dataclass
class Experiment:
    """A model, its optimizer, loss and data, ready to train; `build` makes it from a configuration."""

    configuration: Configuration
    model: nnx.Module
    optimizer: nnx.Optimizer
    chain: Chain  # the optimizer's transformation and learning rate
    loss: Objective
    data: Source
    test: Selectable | None
    placement: Placement
    ahead: int = AHEAD  # batches read in advance
    only_shapes: bool = False
    apart: str | None = None  # why a step is several programs: layers, or their backward, on several sets of devices

    @classmethod
    def build(cls, configuration: Configuration, mesh: Mesh | None, *, only_shapes: bool = False) -> Experiment:
        """Build the experiment of a configuration on a mesh. With `only_shapes` it can be explained
        and compiled, not trained: no array is made, and the mesh's devices may be absent."""
        settings = Settings(configuration)
        settings.require("model")
        placement = Placement(mesh, configuration.signals, settings["microbatches"])
        settings.check_rows(placement.ways)
        component, how = _data(settings, only_shapes)
        with as_user_error(f"{component.path} is called"):
            asks = "rows" in parameters_of(component.function) and "rows" not in component.arguments
            returned = component(**{"rows": placement.rows(settings["batch"])} if asks else {})
        written, loss = _loss(settings)
        metrics = [Component.at(settings, "metrics", path, {}) for path in settings["metrics"] or ()]
        objective = Objective(loss, written, Component.of(settings, "model"), component, metrics=metrics)
        return cls.of(objective, returned, how, Chain.of(settings), configuration, mesh, only_shapes=only_shapes)

    @classmethod
    def of(
        cls, objective: Objective, returned: object, how: Mapping[str, Any], chain: Chain, configuration: Configuration,
        mesh: Mesh | None, *, only_shapes: bool = False, optimizer: nnx.Optimizer | None = None, is_made: bool = False,
    ) -> Experiment:  # fmt: skip
        """Build an experiment from the objective, the data function's result, the values of
        `READING` and the chain. `is_made` means the caller's own model, with its numbers."""
        settings, model_named = Settings(configuration), objective.model
        batch, seed = settings["batch"], settings["seed"]
        placement = Placement(mesh, configuration.signals, settings["microbatches"])
        settings.check_rows(placement.ways)
        here = f"{objective.data}, which"
        returned = held_out(settings, here, returned)
        data = source(here, returned, batch=batch, seed=seed, shuffle=how.get("shuffle"), last=how.get("last"))
        test = None if part_of(returned, "test") is None else examples(here, returned, "test")
        if isinstance(data, Shuffled) and not (only_shapes and settings.text):
            _check_count(settings, len(data.examples), batch, data.last, placement)

        apart = None

        def built() -> nnx.Module:
            model = model_named(rngs=nnx.Rngs(seed))
            check_called(model_named, model)
            return model

        with as_user_error(f"{model_named.path} is built"):
            is_claimed = mesh is not None and is_run_by_claims(configuration, built)
        with as_user_error("data is read"):
            inputs = placement.shapes(batch // settings["microbatches"], data.example()[0]) if is_claimed else ()

        def claimed() -> nnx.Module:
            model = built()
            with as_user_error(f"{model_named.path} is called"):
                return shard(model, *inputs)

        make = claimed if is_claimed else built
        with as_user_error(f"{model_named.path} is built"):
            if only_shapes:
                model, made_optimizer = abstract(lambda: (model := make(), Optimizer(model, chain.tx)))
            else:
                model = created(built, claimed) if is_claimed and not is_made else make()
                home, apart = _home_of(model, mesh, settings)
                if home is not mesh:
                    placement = Placement(home, {}, settings["microbatches"])
                settle(model, home)
                made_optimizer = settle(optimizer or Optimizer(model, chain.tx), home)
        chain.check_decay(model)
        settings.check_folders()
        return cls(
            configuration=configuration,
            model=model,
            optimizer=made_optimizer,
            chain=chain,
            loss=_completed(objective, settings, model, data, test),
            data=data,
            test=test,
            placement=placement,
            ahead=how.get("ahead", AHEAD),
            only_shapes=only_shapes,
            apart=apart,
        )

    @functools.cached_property
    def settings(self) -> Settings:
        return Settings(self.configuration)

    def step(self) -> TrainingStep:
        """Return the training step over the present arrays of the model and the optimizer. All
        steps share their programs, so the traced program of the ledger is the program that runs."""
        return self._step.over(self.model, self.optimizer)

    @functools.cached_property
    def _step(self) -> TrainingStep:
        return TrainingStep(
            self.model,
            self.optimizer,
            self.loss,
            apart=self.apart is not None,
            microbatches=self.settings["microbatches"],
        )

    def evaluated_on(self, say: Callable[[str], None]) -> Selectable | None:
        """Return the test data; without any, `say` so, or raise an error if an evaluation is configured."""
        if self.test is None and "evaluation" in self.configuration.train:
            raise JShardError(
                f'{self.settings.label("evaluation")} needs test data, and {self.loss.data.path} returns no "test"',
                hint='return {"train": (x, y), "test": (x, y)}, or write evaluation: {held_out: 0.1}',
            )
        if self.test is None:
            say(f'nothing is evaluated: {self.loss.data.path} returns no "test"')
        return self.test

    def outputs(self, step: TrainingStep) -> Any:
        """Return the shapes of the model's outputs for a batch."""
        (x,) = self.placement.shapes(self.settings["batch"], self.data.example()[0])
        if self.apart:  # no single program can be traced
            return step.predict(step.state, self.first_batch()[0])
        return jax.eval_shape(step.predict, step.state, x)

    def check_read(self, step: TrainingStep) -> Callable[[Any], None]:
        """Return a check of later batches' targets: it raises an error for classes without an output of the model."""
        if self.loss.written is not None or self.settings.text or "train" in self.loss.classes:
            return lambda y: None
        outputs = self.outputs(step)

        def check(y: object) -> None:
            if (numbers := numbers_of(y)) and isinstance(outputs, jax.ShapeDtypeStruct):
                self.loss.check_numbers(numbers, outputs.shape[-1], "in a batch")

        return check

    def explain(self) -> Ledger:
        """List every collective of the training step, and the memory held between steps."""
        return self._ledger

    @functools.cached_property
    def asked(self) -> Ledger:
        """The requested collectives of the training step, without the compiler's: nothing is compiled."""
        if self.apart:
            raise JShardError(self.apart, hint="name the same workers for both, or mesh axes")
        return ledger_of(self._traced(), [self.model, self.optimizer])

    @functools.cached_property
    def _ledger(self) -> Ledger:
        return with_added(self.asked, self._traced())

    def _traced(self) -> Traced:
        step = self.step()
        return Traced(step.program, (step.state, *self.first_batch()), {})

    def lowered(self) -> Any:
        """Lower the training step for the devices of its mesh."""
        step = self.step()
        return step.program.lower(step.state, *self.first_batch())

    def plan(self, topology: Topology, *, limit: float = LIMIT) -> Plan:
        """Compile the training step for a topology of absent devices."""
        step = self.step()
        args = step.state, *self.first_batch()
        return planned(step.program, args, {}, self.asked, topology, self.placement.mesh, limit=limit)

    def verify(self, meshes: Sequence[Mapping[str, int]] = ()) -> Verification:
        """Verify a training step, sharded against unsharded, also on `meshes`: loss, gradients,
        updated parameters and optimizer state; and two steps against plain Flax and optax."""
        step = step_with_gradients(self.loss, self.settings["microbatches"])
        args = self.model, self.optimizer, *self.first_batch()
        verification = verify(step, *args, backward=False, meshes=meshes)
        batches = [batch for batch, _ in placed(self.data, self.placement, None, STEPS)]
        return dataclasses.replace(verification, plain=plain_steps(self.settings, self.loss, self.step(), batches))

    def first_batch(self) -> tuple[Any, ...]:
        batch = self.settings["batch"]
        with as_user_error("data is read"):
            if self.only_shapes:
                return self.placement.shapes(batch, *self.data.example(), parts=self.placement.microbatches)
            return self.placement.place(batch, *self.data.first(self.placement.rows))


def _completed(
    objective: Objective, settings: Settings, model: nnx.Module, data: Source, test: Selectable | None
) -> Objective:
    """Return the objective with the classes of the data in memory, the tokenizer's size and the model's chunk."""
    parts = {"train": data.examples if isinstance(data, Shuffled) else None, "test": test}
    in_memory = {part: numbers_of(rows.y) for part, rows in parts.items() if isinstance(rows, Examples)}
    has_signal = "objective" in settings.configuration.signals
    return dataclasses.replace(
        objective,
        loss=signal("objective")(objective.loss) if has_signal else objective.loss,
        classes={part: numbers for part, numbers in in_memory.items() if numbers and objective.written is None},
        tokens=tokenizer(settings).vocabulary if settings.text else None,
        chunk=_chunk(settings, model, objective.model),
    )


def parameter_shapes(configuration: Configuration) -> dict[str, str]:
    """Return the parameters of a configuration's model by path, as `float32[784,1024]`."""
    return {path: jax.typeof(leaf).str_short() for path, leaf in parameters_by_path(_of_shapes(configuration)).items()}


def _of_shapes(configuration: Configuration) -> nnx.Module:
    """Build a configuration's model of shapes only, after unloading the configuration."""
    settings = Settings(configuration)
    named = Component.of(settings, "model")
    unload()
    with as_user_error(f"{named.path} is built"):
        return nnx.eval_shape(lambda: named(rngs=nnx.Rngs(settings["seed"])))


def at_two_layers(configuration: Configuration) -> tuple[str, str] | None:
    """Return an override to verify a large model at two layers, with its notice, or None."""
    if "model" not in configuration.train:
        return None
    leaves = jax.tree.leaves(nnx.state(_of_shapes(configuration), nnx.Param))
    bytes_now = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if bytes_now <= MOST:
        return None
    model = Component.of(Settings(configuration), "model")
    depth = next((name for name in DEPTHS if name in parameters_of(model.function)), None)
    if depth is not None and model.arguments.get(depth) != 2:
        return (
            f"jshard.train.model.{depth}=2",
            f"{model.path} has {size(bytes_now)} of parameters: verified at {depth}=2",
        )
    if computes_on_cpus() and TIMES * bytes_now > (memory := memory_of_host()):
        raise JShardError(
            f"{model}, which has {size(bytes_now)} of parameters{' in two layers' * (depth is not None)}; verifying needs "
            f"{TIMES} times as much memory, and this host has {size(memory)}",
            hint=f"make it smaller, as in: jshard verify {configuration.source} model.width=256",
        )
    return None


def _data(settings: Settings, only_shapes: bool) -> tuple[Component, Mapping[str, Any]]:
    """Import the data function, or make the reader of text; return it with the values of `READING`."""
    if path := settings.text:
        rows = functools.partial(packed_rows, settings, only_shapes=only_shapes)
        return Component("data", settings.place("data"), path, rows, {}), settings.table("data")
    component = Component.of(settings, "data")
    how = {key: value for key, value in component.arguments.items() if key in READING}
    taken = sorted(set(how) & set(parameters_of(component.function)))
    if taken:
        raise JShardError(
            f'{component}, which has an argument "{taken[0]}", but {taken[0]} under data is a setting of jshard',
            hint=f"give the argument of {component.path} another name",
        )
    rest = {key: value for key, value in component.arguments.items() if key not in READING}
    return dataclasses.replace(component, arguments=rest), how


def _loss(settings: Settings) -> tuple[Component | None, Callable[..., Any]]:
    """Import the named loss; by default return cross entropy with its configured arguments."""
    table = settings.table("loss")
    if "path" in table:
        return (named := Component.of(settings, "loss")), named
    for name in table.keys() - {"z", "chunk"}:
        raise JShardError(
            f'{settings.label("loss")} names no path, and cross entropy takes no argument "{name}"',
            hint="write path: and the import path of a loss, or z: 1e-4",
        )
    return None, functools.partial(cross_entropy, z=table.get("z", 0.0))


def _chunk(settings: Settings, model: nnx.Module, named: Component) -> int:
    """Return the number of positions with logits in memory at a time, for a model with `hidden` and `logits`."""
    table = settings.table("loss")
    if "chunk" in table and "path" not in table and not has_hidden(model):
        raise JShardError(
            f"{settings.label('loss.chunk')} is {table['chunk']}, and {named.path} computes all logits at once",
            hint="remove it, or give the model hidden(x), and logits(hidden) of some places, as a jshard.Decoder has",
        )
    return CHUNK if "path" in table else table.get("chunk", CHUNK)


def _check_count(settings: Settings, count: int, batch: int, last: str, placement: Placement) -> None:
    """Raise an error if there are too few examples for a batch, or the last batch of `last: keep` does not divide."""
    if batch > count and last != "keep":
        fault = f"{settings.label('batch')} is {batch}, but there are {count} examples"
        raise JShardError(fault, hint=f"use {count} or fewer")
    if last == "keep" and (count % batch) % (placement.ways * placement.microbatches):
        raise JShardError(
            f"{settings.label('data.last')} is keep, and the last batch has {count % batch} of {count} examples, which can't "
            f"be split in {placement.ways * placement.microbatches}",
            hint="write last: drop or last: fill",
        )


def _home_of(model: nnx.Module, mesh: Any, settings: Settings) -> tuple[Any, str | None]:
    """Return the mesh of all layers; None and the reason if layers, or their backward, have
    several. Without a `backward` this is an error: no gradient could pass between them."""
    arrays = model_arrays(model).values()
    named = {
        array.signal.name: array.signal for array in arrays if array.layout is not None and array.signal is not None
    }
    signals = sorted(named.values(), key=lambda signal: signal.place.line or 0)
    if mesh is None or not signals:
        return mesh, None
    first, home = signals[0], mesh_for(signals[0])[0]
    for each in signals:
        if device_sets.differ(home, there := mesh_for(each)[0]) and not (first.backward and each.backward):
            raise device_sets.apart(each, there, first, home)
    for each in signals:
        back = settings.configuration.lookup((each.backward,)) if each.backward is not None else each
        if device_sets.differ(home, there := mesh_for(back)[0]):
            why = f"{first} lies on {device_sets.devices_in_words(home)} and {back} on {device_sets.devices_in_words(there)}"
            why = f"{why}, so a step is several programs, which are run and not explained"
            if (count := settings["microbatches"]) > 1:
                raise JShardError(f"{settings.label('microbatches')} is {count}, and {why}", hint="remove microbatches")
            return None, why
    return (home if device_sets.differ(home, mesh) else mesh), None
