"""The facts of a training step or of a function, gathered from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding

from jshard.errors import Place
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.ledger.tracing import Traced, explain
from jshard.inspect.report.array_placement import ACTIVATION, BATCH, GRADIENT, OPTIMIZER, OTHER, PARAMETER, Laid
from jshard.inspect.report.between import Between, between
from jshard.inspect.report.facts import Facts, Text
from jshard.layers.layer import model_arrays, parameter_of
from jshard.layouts.layout import Layout
from jshard.layouts.paths import keys_of, words_of
from jshard.signals import active_config as current
from jshard.signals.config import Configuration


@runtime_checkable
class Experiment(Protocol):
    """What `jshard train` trains, as far as a page needs it."""

    configuration: Configuration
    model: Any
    optimizer: Any
    loss: Callable[..., Any]

    def explain(self) -> Any: ...
    def first_batch(self) -> tuple[Any, ...]: ...


def facts_of_experiment(experiment: Experiment, plan: Any = None) -> Facts:
    """The facts of a whole training step."""
    present = experiment.configuration
    train = present.train

    def objective(model: Any, x: Any, *rest: Any) -> Any:
        return experiment.loss(model(x), *rest)

    batch = experiment.first_batch()
    laid = [*_model(experiment.model, ()), *_optimizer(experiment.optimizer, experiment.model)]
    laid += _gradients(laid, [experiment.optimizer])
    laid += [_laid(BATCH, ("batch", name), array, ()) for name, array in zip("xy", batch, strict=False)]
    laid += _activations(Traced(objective, (experiment.model, *batch), {}).forward())
    named = [_component(train.get(key)) for key in ("model", "optimizer")]
    batch_words = [f"batch {train['batch']}"] if "batch" in train else []
    return Facts(
        title=present.source,
        about=(*filter(None, named), *batch_words),
        mesh=_mesh(present, laid),
        arrays=tuple(laid),
        ledger=_ledger(experiment.explain()),
        texts=_texts(present),
        settings=frozenset(Place(place.source, place.line) for place in present.train_places.values()),
        plan=plan,
    )


def facts_of_function(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], plan: Any = None) -> Facts:
    """The facts of `f(*args, **kwargs)`."""
    laid: list[Laid] = []
    models = [each for each in (f, *args, *kwargs.values()) if isinstance(each, nnx.Module) and not _updates(each)]
    named = {**{f"argument {number}": arg for number, arg in enumerate(args)}, **kwargs}
    for name, arg in named.items():
        if _updates(arg):
            laid += _optimizer(arg, models[0] if models else None)
        elif isinstance(arg, nnx.Module):
            laid += _model(arg, () if len(models) == 1 else (name,))
        else:
            for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
                if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                    laid.append(_laid(BATCH, (name, *words_of(path)), leaf, ()))
    if isinstance(f, nnx.Module):
        laid += _model(f, ())
    laid += _gradients(laid, [arg for arg in named.values() if _updates(arg)])
    traced = Traced(f, args, kwargs)
    laid += _activations(traced.forward())
    present = current.configuration()
    return Facts(
        title=getattr(f, "__qualname__", None) or type(f).__name__,
        about=() if present is None else (present.source,),
        mesh=_mesh(present, laid),
        arrays=tuple(laid),
        ledger=_ledger(explain(f, *args, **kwargs)),
        texts=() if present is None else _texts(present),
        plan=plan,
    )


def _ledger(explained: Any) -> Ledger:
    return getattr(explained, "ledger", explained)


def _component(said: Any) -> str:
    if isinstance(said, dict):
        return str(said.get("path") or said.get("name") or "")
    return "" if said is None else str(said)


def _mesh(present: Configuration | None, laid: list[Laid]) -> Any:
    if present is not None and present.mesh is not None:
        return current.mesh()
    found = [array.mesh for array in laid if array.mesh is not None]
    return max(found, key=lambda mesh: mesh.size, default=None)


# -- arrays --


def _updates(value: Any) -> bool:
    return isinstance(value, nnx.Optimizer)


def _laid(kind: str, path: tuple[str, ...], array: Any, signals: tuple[str, ...], variable: Any = None) -> Laid:
    shape = tuple(array.shape)
    sharding: Any = getattr(array, "sharding", None)
    layout = Layout.from_sharding(sharding, len(shape)) if isinstance(sharding, NamedSharding) else None
    return Laid(
        kind=kind,
        path=path,
        signal="/".join(signals) or "-",
        place=_place(signals),
        shape=shape,
        dtype=str(array.dtype),
        itemsize=array.dtype.itemsize,
        axes=((),) * len(shape) if layout is None else layout.axes,
        mesh=None if layout is None else layout.mesh,
        variable=variable,
        device=next(iter(sharding.device_set)) if isinstance(sharding, SingleDeviceSharding) else None,
    )


def _place(signals: tuple[str, ...]) -> Place | None:
    present = current.configuration()
    if present is None or not signals:
        return None
    return present.lookup(signals).place


def _model(model: Any, before: tuple[str, ...]) -> list[Laid]:
    """In the order of the configuration's lines, which is more often the program's than that of the alphabet is."""
    placed = model_arrays(model)
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        kind = PARAMETER if isinstance(variable, nnx.Param) else OTHER
        value = variable.get_value()
        if hasattr(value, "shape"):
            names = (*before, *map(str, path))
            found.append(_laid(kind, names, value, placed[path].signal_path, variable=variable))
    return sorted(found, key=_in_the_text)


def _in_the_text(array: Laid) -> tuple[str, int, int]:
    place = array.place
    return (
        ("\uffff", 0, 0) if place is None else (place.source, place.line or 0, -len(array.shape))
    )  # a kernel before its bias


def _optimizer(optimizer: Any, model: Any) -> Iterator[Laid]:
    """The state of an optimizer; each array of it under the signal of the parameter that it is about."""
    placed = {} if model is None else model_arrays(model)
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(optimizer))[0]:
        path = keys_of(path)
        path = path[1:] if path[:1] == ("opt_state",) else path
        about = parameter_of(path, placed)
        yield _laid(OPTIMIZER, tuple(map(str, path)), leaf, () if about is None else placed[about].signal_path)


def _gradients(laid: list[Laid], optimizers: list[Any]) -> list[Laid]:
    """Of what the optimizers train. A gradient lies as its parameter does, in the parameter's dtype."""
    trains = [nnx.filterlib.to_predicate(optimizer.wrt) for optimizer in optimizers]
    return [
        dataclasses.replace(array, kind=GRADIENT)
        for array in laid
        if array.kind == PARAMETER and any(does(array.path, array.variable) for does in trains)
    ]


def _activations(jaxpr: Any) -> Iterator[Laid]:
    seen: dict[Between, int] = {}
    for found in between(jaxpr):
        seen[found] = seen.get(found, 0) + 1
    for found, times in seen.items():
        repeats = f"{times:,} × " if times > 1 else ""
        name = found.signals[-1] + ("" if found.role == "result" else f", {found.role}")
        yield Laid(
            ACTIVATION,
            (*found.signals[:-1], name),
            "/".join(found.signals),
            _place(found.signals),
            found.shape,
            found.dtype,
            found.itemsize,
            found.axes,
            found.mesh,
            repeats,
        )


# -- the text --


def _texts(present: Configuration) -> tuple[Text, ...]:
    """The files that the configuration was read from, the one that was named first."""
    places = [Place(present.source), *present.train_places.values()]
    places += [place for signal in present.signals.values() for place in (signal.place, *signal.places.values())]
    places += [] if present.mesh is None else [present.mesh.place]
    texts = []
    for source in dict.fromkeys(place.source for place in places):
        if source == present.source or any(place.source == source and place.line for place in places):
            path = Path(source)
            if path.is_file():
                texts.append(Text(source, tuple(path.read_text(encoding="utf-8").splitlines())))
    return tuple(texts)
