"""The bytes on a device between training steps: parameters, gradients, optimizer state, by signal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jshard.errors import Location
from jshard.layers.layer import Path, model_arrays, parameter_of
from jshard.layouts.paths import keys_of
from jshard.programs.jaxprs import Shaped
from jshard.signals.active_config import configuration

KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state", "other": "other"}


@dataclasses.dataclass(frozen=True)
class Resident:
    """Bytes on each device under a signal, or "-" outside every signal."""

    place: Location | None
    signal: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    other: int = 0  # batch statistics, keys of random numbers

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


class Held(NamedTuple):
    """An array of a model or an optimizer, held between steps."""

    kind: str  # a key of KINDS
    path: Path
    array: Any
    signal_path: tuple[str, ...]


def held(models: Iterable[tuple[Path, Any]], optimizers: Sequence[nnx.Optimizer]) -> Iterator[Held]:
    """Yield the arrays of models, each with a path to prefix, and of optimizers. Arrays may be shapes alone.
    Gradients are as large as the parameters that an optimizer updates; without an optimizer there are none."""
    trains = [nnx.filterlib.to_predicate(optimizer.wrt) for optimizer in optimizers]
    parameters: dict[Path, tuple[str, ...]] = {}  # their signals, by the path in their model
    for before, model in models:
        placed = model_arrays(model)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            under = placed[path].signal_path
            kinds = ["parameters"] if isinstance(variable, nnx.Param) else ["other"]
            if isinstance(variable, nnx.Param):
                parameters[path] = under
                kinds += ["gradients"] * any(does(path, variable) for does in trains)
            for below, leaf in jax.tree_util.tree_flatten_with_path(variable)[0]:
                yield from (Held(kind, (*before, *path, *keys_of(below)), leaf, under) for kind in kinds)
    for path, leaf in jax.tree_util.tree_flatten_with_path([nnx.state(optimizer) for optimizer in optimizers])[0]:
        _, *path = keys_of(path)
        of = parameter_of(tuple(path), parameters)
        yield Held("optimizer", tuple(path), leaf, () if of is None else parameters[of])


def at_rest(nodes: Iterable[Any]) -> tuple[Resident, ...]:
    """Return the bytes held by the models and optimizers among `nodes`, by signal."""
    nodes = list(nodes)
    models = [((), node) for node in nodes if isinstance(node, nnx.Module)]
    sums: dict[tuple[str, ...], dict[str, int]] = {}
    for each in held(models, [node for node in nodes if isinstance(node, nnx.Optimizer)]):
        kinds = sums.setdefault(each.signal_path, dict.fromkeys(KINDS, 0))
        kinds[each.kind] += on_a_device(each.array)
    found = [Resident(place_of(path), "/".join(path) or "-", **kinds) for path, kinds in sums.items()]
    return tuple(sorted(found, key=_in_the_file))


def _in_the_file(rest: Resident) -> tuple[Any, ...]:
    place = rest.place
    return (True,) if place is None else (False, place.source, place.line or 0)


def on_a_device(array: Shaped) -> int:
    """Return the bytes of an array's shard."""
    shape, sharding = tuple(array.shape), getattr(array, "sharding", None)
    part = sharding.shard_shape(shape) if isinstance(sharding, NamedSharding) else shape
    return math.prod(part) * array.dtype.itemsize


def place_of(signal_path: tuple[str, ...]) -> Location | None:
    """Return the line of the configuration with the signal of a scope."""
    present = configuration()
    return None if present is None or not signal_path else present.lookup(signal_path).place
