"""The base class of layers, and the walk over a model's layers in optimizers, gradients, memory and verify."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.errors import JShardError, kind_of, quoted
from jshard.layers.strategy import strategy_of
from jshard.layouts.creation import create
from jshard.layouts.layout import Layout
from jshard.layouts.paths import keys_of, slashed, words_of
from jshard.signals.active_config import configuration
from jshard.signals.claims import found_claims
from jshard.signals.scope import active_path, outside, resolve
from jshard.signals.signal import Signal

Path = tuple[Any, ...]  # of an array in the state of a model


class AuxLoss(nnx.Variable):
    """An auxiliary loss set in each call, such as a router's; training adds it to its own loss."""


class Layer(nnx.Module):
    """A module with parameters sharded by its signal.

    `parameter_axes` holds for each parameter a word for each of its axes: the loop of the product over this axis ("row",
    "column", "reduction"), or None. `parameter_layouts` follows from these words and `store`; a layer may define it instead.
    `docs/layers.md` has an example.
    """

    parameter_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {}

    def __init__(self) -> None:
        """Remember the active signal."""
        self.signal_path: tuple[str, ...] = active_path()

    def parameter_layouts(self) -> dict[str, Layout]:
        """Return the layout at rest of each parameter; empty outside every signal, where Flax places them."""
        signal = signal_at(self.signal_path)
        if signal is None:
            return {}
        strategy = strategy_of(signal)
        return {name: strategy.parameter(*words) for name, words in self.parameter_axes.items()}

    def parameter(
        self, name: str, initializer: Any, shape: tuple[int, ...], rngs: nnx.Rngs, dtype: Any = jnp.float32
    ) -> nnx.Param[Any]:
        """Draw a parameter directly as shards, with the numbers of Flax on every mesh."""
        signal, layouts = signal_at(self.signal_path), self.parameter_layouts()
        if signal is None:
            return nnx.Param(initializer(rngs.params(), shape, dtype))
        kind = type(self).__name__
        if name not in layouts:
            raise JShardError(
                f"{signal} has a {kind} without a layout for its parameter {name}",
                hint=f'name it in {kind}.parameter_axes: {{"{name}": ("reduction", "column")}}',
            )
        layouts[name].shard_shape(shape, label=f"{signal}, in {name} of a {kind},")
        with outside():
            return nnx.Param(create(initializer, rngs.params(), shape, signal.dtype.param or dtype, layouts[name]))

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the scope of a call: the active signal, else the remembered one."""
        return resolve(self.signal_path)[1]


@dataclasses.dataclass(frozen=True)
class ModelArray:
    """The signal and the layout at rest of an array, from its layer or its claim. `signal_path` is
    the innermost layer's scope, or the claiming signal."""

    signal_path: tuple[str, ...] = ()
    signal: Signal | None = None
    layout: Layout | None = None

    @property
    def reduce_dtype(self) -> str | None:
        """The dtype for the sums of the parameter's gradients; None means their own."""
        return None if self.layout is None or self.signal is None else self.signal.dtype.reduce


class ModelArrays(dict[Path, ModelArray]):
    """A mapping from path to `ModelArray`; a leaf of a tree inside a variable has the variable's entry."""

    def __missing__(self, path: Path) -> ModelArray:
        return self[path[:-1]] if path else ModelArray()


def is_sharded(model: object) -> bool:
    """Return True if `jshard.shard` runs the model."""
    return hasattr(type(model), "_jshard_original")


def model_arrays(model: Any) -> ModelArrays:
    """Return the signal and layout of each variable of a model, or of modules in a list, by its path."""
    arrays = built_arrays(model)
    if (present := configuration()) is None:
        return arrays
    sharded = {path: module for path, module in nnx.iter_modules(model) if is_sharded(module)}
    for root, module in sharded.items():
        if any(root[:end] in sharded for end in range(len(root))):
            continue  # it runs as a part of the sharded module around it
        leaves = {path: leaf for path, leaf in parameters(module) if not arrays[*root, *path].signal_path}
        names = {slashed(path): path for path in leaves}
        for name, claim in found_claims(present, names, type(module)).items():
            path = names[name]
            under = tuple(claim.signal.name.split("/"))
            arrays[*root, *path] = ModelArray(under, claim.signal, Layout.of(leaves[path]))
    return arrays


def built_arrays(model: Any) -> ModelArrays:
    """Return the signal and layout of each variable as `model_arrays`, by the signals jshard's layers were built under only."""
    arrays = ModelArrays()
    modules = nnx.iter_modules(model)
    layers = {path: module for path, module in modules if isinstance(module, Layer) and module.signal_path}
    layouts = {path: layer.parameter_layouts() for path, layer in layers.items()}
    for path, _ in nnx.to_flat_state(nnx.split(model)[1]):
        around = next((path[:end] for end in reversed(range(len(path))) if path[:end] in layers), None)
        if around is None:
            arrays[path] = ModelArray()
            continue
        under, name = layers[around].signal_path, path[len(around) :]
        arrays[path] = ModelArray(under, signal_at(under), layouts[around].get(slashed(name)))
    return arrays


def is_by_layers(model: object) -> bool:
    """Return True if a model, or modules in a list, run layer by layer. Then all parameters are of
    layers built under signals, or some are and no glob claims the others."""
    built, present = built_arrays(model), configuration()
    under = [bool(built[path].signal_path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    return any(under) and (all(under) or present is None or not present.has_claims)


def parameters_by_path(model: object) -> dict[str, Any]:
    """Return the parameters of an NNX model, or of Linen's variables, by their paths in `match`,
    joined by slashes. Linen's paths omit `params`. A shared parameter appears once. Parameters of
    layers built under a signal belong to this signal, and are omitted."""
    if isinstance(model, Mapping):
        leaves = jax.tree_util.tree_flatten_with_path(model.get("params", model))[0]
    else:
        built = built_arrays(model)
        leaves = [(path, leaf) for path, leaf in parameters(model) if not built[path].signal_path]
    named: dict[str, Any] = {}
    for keys, leaf in leaves:
        path = slashed(words_of(keys))
        if path in named:
            raise JShardError(
                f"two parameters of {kind_of(model)} have the path {quoted(path)}",
                hint="give one of them another name: a name with a slash reads as two",
            )
        named[path] = leaf
    return named


def parameters(model: object) -> list[tuple[Path, Any]]:
    """List the arrays of a model's parameters with their key paths; a variable may hold a tree."""
    leaves = jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))[0]
    return [(keys_of(path), leaf) for path, leaf in leaves]


def parameter_of(path: Path, parameters: Iterable[Path]) -> Path | None:
    """Return the parameter of an optimizer state's array: its path is the longest end of the array's path."""
    return next((path[start:] for start in range(len(path)) if path[start:] in parameters), None)


def signal_at(path: tuple[str, ...]) -> Signal | None:
    present = configuration()
    return present.lookup(path) if present is not None and path else None
