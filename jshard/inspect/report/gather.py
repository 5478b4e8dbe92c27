"""The facts of a training step or of a function, gathered from shapes alone."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding

from jshard.errors import Location
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.ledger.memory import held, place_of
from jshard.inspect.ledger.tracing import Traced, is_array, ledger_of
from jshard.inspect.plan.planning import with_added
from jshard.inspect.report.facts import ACTIVATION, BATCH, OPTIMIZER, Facts, Laid
from jshard.layers.sharding import objective_of, partitioned
from jshard.layouts.layout import Layout
from jshard.layouts.paths import words_of
from jshard.programs.jaxprs import Shaped, inner, level
from jshard.programs.provenance import Cause
from jshard.signals import active_config as current
from jshard.signals.config import Configuration
from jshard.signals.describe import component_words


@runtime_checkable
class TrainingProgram(Protocol):
    """The part of an experiment that a page reads."""

    configuration: Configuration
    model: Any
    optimizer: Any
    loss: Callable[..., Any]

    def explain(self) -> Ledger: ...
    def first_batch(self) -> tuple[Any, ...]: ...


def facts_of_experiment(experiment: TrainingProgram) -> Facts:
    """Return the facts of a training step."""
    present = experiment.configuration
    train = present.train
    objective = partitioned(experiment.model, objective_of(experiment.loss))
    batch = experiment.first_batch()
    laid = _at_rest([((), experiment.model)], [experiment.optimizer])
    laid += [_laid(BATCH, ("batch", name), array, ()) for name, array in zip("xy", batch, strict=False)]
    about = [component_words(train[key]) for key in ("model", "optimizer") if key in train]
    about += [f"batch {train['batch']}"] if "batch" in train else []
    traced = Traced(objective, (experiment.model, *batch), {})
    return _facts(present.source, tuple(about), laid, traced, experiment.explain())


def facts_of_function(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Facts:
    """Return the facts of `f(*args, **kwargs)`."""
    named = {**{f"argument {number}": arg for number, arg in enumerate(args)}, **kwargs}
    models = {name: arg for name, arg in {**named, "": f}.items() if isinstance(arg, nnx.Module)}
    prefixes = [(name,) if name and len(models) > 1 else () for name in models]
    optimizers = [arg for arg in named.values() if isinstance(arg, nnx.Optimizer)]
    laid = _at_rest(list(zip(prefixes, models.values(), strict=True)), optimizers)
    for name, arg in named.items():
        if not isinstance(arg, (nnx.Module, nnx.Optimizer)):
            arrays = jax.tree_util.tree_flatten_with_path(arg)[0]
            laid += [_laid(BATCH, (name, *words_of(path)), leaf, ()) for path, leaf in arrays if is_array(leaf)]
    traced = Traced(f, args, kwargs)
    present = current.configuration()
    title, about = getattr(f, "__qualname__", None) or type(f).__name__, () if present is None else (present.source,)
    return _facts(title, about, laid, traced, with_added(ledger_of(traced, traced.nodes), traced))


def _facts(title: str, about: tuple[str, ...], laid: list[Laid], traced: Traced, ledger: Ledger) -> Facts:
    """Return the facts, with the arrays between the layers of the traced forward and the loaded configuration."""
    present = current.configuration()
    between = collections.Counter(_between(traced.forward().jaxpr, Cause())).items()
    arrays = (*laid, *(dataclasses.replace(each, note=f"{n:,} × " if n > 1 else "") for each, n in between))
    meshes = [array.mesh for array in arrays if array.mesh is not None]
    is_placed = present is not None and present.mesh is not None
    mesh = current.mesh() if is_placed else max(meshes, key=lambda mesh: mesh.size, default=None)
    places = [] if present is None else present.train_places.values()
    settings = frozenset(Location(place.source, place.line) for place in places)
    return Facts(title, about, mesh, arrays, ledger, {} if present is None else _texts(present), settings)


# -- arrays --


def _laid(kind: str, path: tuple[str, ...], array: Shaped, signals: tuple[str, ...]) -> Laid:
    shape = tuple(array.shape)
    sharding: Any = getattr(array, "sharding", None)
    layout = Layout.from_sharding(sharding, len(shape)) if isinstance(sharding, NamedSharding) else None
    return Laid(
        kind=kind,
        path=path,
        signal="/".join(signals) or "-",
        place=place_of(signals),
        shape=shape,
        dtype=str(array.dtype),
        itemsize=array.dtype.itemsize,
        axes=((),) * len(shape) if layout is None else layout.axes,
        mesh=None if layout is None else layout.mesh,
        device=next(iter(sharding.device_set)) if isinstance(sharding, SingleDeviceSharding) else None,
    )


def _at_rest(models: list[tuple[Any, Any]], optimizers: list[Any]) -> list[Laid]:
    """Return the arrays of models and optimizers, in the order of the configuration's lines, mostly that of the program."""
    found = []
    for each in held(models, optimizers):
        path = each.path[1:] if each.path[:1] == ("opt_state",) else each.path
        found.append(_laid(each.kind, tuple(map(str, path)), each.array, each.signal_path))
    return sorted(found, key=_in_the_text)


def _in_the_text(array: Laid) -> tuple[bool, str, int, int]:
    place = array.place
    if place is None or array.kind == OPTIMIZER:
        return True, "", 0, 0
    return False, place.source, place.line or 0, -len(array.shape)  # a kernel before its bias


def _between(jaxpr: Any, outside: Cause) -> Iterator[Laid]:
    """Yield the results of each signal's shard_map, in program order. A
    differentiated program shows none: there results are mixed with residuals."""
    for eqn in level(jaxpr):
        stack = eqn.source_info.name_stack.stack
        if any(type(part).__name__ == "Transform" for part in stack):
            continue
        cause = outside.inside(stack)
        if eqn.primitive.name != "shard_map":
            for each in inner(eqn):
                yield from _between(each, cause)
        elif cause.path:
            path = (*cause.path[:-1], cause.path[-1] + ", redistributed" * cause.redistributed)
            for variable, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True):
                if variable.aval.ndim:
                    sharding = NamedSharding(eqn.params["mesh"], spec)
                    shape = jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype, sharding=sharding)
                    yield _laid(ACTIVATION, path, shape, cause.path)


# -- the text --


def _texts(present: Configuration) -> dict[str, list[str]]:
    """Return the files of the configuration with their lines, the named file first."""
    places = [Location(present.source), *present.train_places.values()]
    places += [place for signal in present.signals.values() for place in (signal.place, *signal.places.values())]
    places += [] if present.mesh is None else [present.mesh.place]
    sources = dict.fromkeys(place.source for place in places if place.line or place.source == present.source)
    return {
        source: Path(source).read_text(encoding="utf-8").splitlines() for source in sources if Path(source).is_file()
    }
