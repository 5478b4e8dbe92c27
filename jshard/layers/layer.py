"""What every layer is: a module that remembers the signal it was built under and says where its parameters rest; and the one
walk over the layers of a model that optimizers, gradients, memory and verify ask."""

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
    """A loss that a layer sets in each call, as that of a router's balance: training adds all of a model to its own."""


class Layer(nnx.Module):
    """A module whose parameters lie as a signal says.

    `parameter_axes` has for each parameter a word for each of its axes: the loop of the product that runs over it ("row",
    "column", "reduction"), or None. From them, and `store`, follows `parameter_layouts`, which a layer may define instead.
    `docs/layers.md` has an example.
    """

    parameter_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {}

    def __init__(self) -> None:
        """Remember the signal that is active here."""
        self.signal_path: tuple[str, ...] = active_path()

    def parameter_layouts(self) -> dict[str, Layout]:
        """Say where each parameter rests between steps. Empty outside every signal: parameters lie where Flax puts them."""
        signal = signal_at(self.signal_path)
        if signal is None:
            return {}
        strategy = strategy_of(signal)
        return {name: strategy.parameter(*words) for name, words in self.parameter_axes.items()}

    def parameter(
        self, name: str, initializer: Any, shape: tuple[int, ...], rngs: nnx.Rngs, dtype: Any = jnp.float32
    ) -> nnx.Param[Any]:
        """Draw a parameter where it rests, each device its part: the numbers that Flax draws, on every mesh."""
        signal, layouts = signal_at(self.signal_path), self.parameter_layouts()
        if signal is None:
            return nnx.Param(initializer(rngs.params(), shape, dtype))
        kind = type(self).__name__
        if name not in layouts:
            raise JShardError(
                f"{signal} has a {kind} that does not say where its parameter {name} lies",
                hint=f'name it in {kind}.parameter_axes: {{"{name}": ("reduction", "column")}}',
            )
        layouts[name].shard_shape(shape, label=f"{signal}, in {name} of a {kind},")
        with outside():
            return nnx.Param(create(initializer, rngs.params(), shape, signal.dtype.param or dtype, layouts[name]))

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the signal that holds for a call: the active one, else the remembered one."""
        return resolve(self.signal_path)[1]


@dataclasses.dataclass(frozen=True)
class ModelArray:
    """What is known of one array of a model: the scope that the innermost layer around it was built in, or the signal that
    claims it; the signal that means; and where the array rests, as the layer or the claim says; None where none says so."""

    signal_path: tuple[str, ...] = ()
    signal: Signal | None = None
    layout: Layout | None = None

    @property
    def reduce_dtype(self) -> str | None:
        """The dtype that gradients of a layer's parameter are summed in; None: their own."""
        return None if self.layout is None or self.signal is None else self.signal.dtype.reduce


class ModelArrays(dict[Path, ModelArray]):
    """By path. What lies inside a variable, which may hold a tree, is placed as the variable is."""

    def __missing__(self, path: Path) -> ModelArray:
        return self[path[:-1]] if path else ModelArray()


def is_sharded(model: object) -> bool:
    """Whether `jshard.shard` runs it: its parameters are claimed."""
    return hasattr(type(model), "_jshard_original")


def model_arrays(model: Any) -> ModelArrays:
    """For every variable in the state of a model, or of modules in a list, by its path there."""
    found = built_arrays(model)
    if (present := configuration()) is None:
        return found
    sharded = {path: module for path, module in nnx.iter_modules(model) if is_sharded(module)}
    for root, module in sharded.items():
        if any(root[:end] in sharded for end in range(len(root))):
            continue  # it runs as part of the one around it
        leaves = {path: leaf for path, leaf in parameters(module) if not found[*root, *path].signal_path}
        names = {slashed(path): path for path in leaves}
        for name, claim in found_claims(present, names, type(module)).items():
            path = names[name]
            under = tuple(claim.signal.name.split("/"))
            found[*root, *path] = ModelArray(under, claim.signal, Layout.of(leaves[path]))
    return found


def built_arrays(model: Any) -> ModelArrays:
    """The same of what layers of jshard were built under alone."""
    found = ModelArrays()
    layers = {path: each for path, each in nnx.iter_modules(model) if isinstance(each, Layer) and each.signal_path}
    layouts = {path: layer.parameter_layouts() for path, layer in layers.items()}
    for path, _ in nnx.to_flat_state(nnx.split(model)[1]):
        around = next((path[:end] for end in reversed(range(len(path))) if path[:end] in layers), None)
        if around is None:
            found[path] = ModelArray()
            continue
        under, name = layers[around].signal_path, path[len(around) :]
        layout = layouts[around].get(slashed(name))
        found[path] = ModelArray(under, signal_at(under), layout)
    return found


def is_by_layers(model: object) -> bool:
    """Whether a model, or modules in a list, run layer by layer: all parameters are of layers that were built under signals, or
    some, and no glob claims the others."""
    built, present = built_arrays(model), configuration()
    under = [bool(built[path].signal_path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    return any(under) and (all(under) or present is None or not present.has_claims)


def parameters_by_path(model: object) -> dict[str, Any]:
    """Find the parameters of an NNX model, or of Linen's variables, by the paths that `match` claims them by: what leads to
    each in the model, joined by slashes. `params` is left out of Linen's; a parameter that the model has twice is one; those
    of a layer that was built under a signal are that signal's, and not among them."""
    if isinstance(model, Mapping):
        found = jax.tree_util.tree_flatten_with_path(model.get("params", model))[0]
    else:
        built = built_arrays(model)
        found = [(path, leaf) for path, leaf in parameters(model) if not built[path].signal_path]
    named: dict[str, Any] = {}
    for keys, leaf in found:
        path = slashed(words_of(keys))
        if path in named:
            raise JShardError(
                f"two parameters of {kind_of(model)} have the path {quoted(path)}",
                hint="give one of them another name: a name with a slash reads as two",
            )
        named[path] = leaf
    return named


def parameters(model: object) -> list[tuple[Path, Any]]:
    """The arrays of a model's parameters, by the keys that lead to them; a variable may hold a tree."""
    leaves = jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))[0]
    return [(keys_of(path), leaf) for path, leaf in leaves]


def parameter_of(path: Path, parameters: Iterable[Path]) -> Path | None:
    """The parameter that an array of an optimizer's state belongs to: whose path is the longest end of the array's."""
    return next((path[start:] for start in range(len(path)) if path[start:] in parameters), None)


def signal_at(path: tuple[str, ...]) -> Signal | None:
    present = configuration()
    return present.lookup(path) if present is not None and path else None
