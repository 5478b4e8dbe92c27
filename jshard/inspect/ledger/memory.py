"""What a training step holds between steps, on each device: parameters, gradients, optimizer state, by signal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jshard.errors import Place
from jshard.layers.layer import Path, model_arrays, parameter_of
from jshard.signals.active_config import configuration

KINDS = ("parameters", "gradients", "optimizer", "other")


@dataclasses.dataclass(frozen=True)
class Rest:
    """Bytes on each device that lie under one signal; "-" for what no signal places."""

    place: Place | None
    signal: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    other: int = 0  # batch statistics, keys of random numbers

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.other


def at_rest(nodes: Iterable[Any]) -> tuple[Rest, ...]:
    """Of the models and optimizers among `nodes`. Gradients are those that the optimizers take, as large as the parameters
    they are of; without an optimizer nothing is said of them. Arrays may be shapes alone."""
    nodes = list(nodes)
    optimizers = [node for node in nodes if isinstance(node, nnx.Optimizer)]
    sums: dict[str, dict[str, int]] = {}
    under: dict[Path, str] = {}  # the parameters, by the path in their model

    def add(signal: str, kind: str, bytes_: int) -> None:
        kinds = sums.setdefault(signal, dict.fromkeys(KINDS, 0))
        kinds[kind] += bytes_

    for model in (node for node in nodes if isinstance(node, nnx.Module)):
        placed = model_arrays(model)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            signal = "/".join(placed[path].signal_path) or "-"
            for leaf in jax.tree.leaves(variable):
                add(signal, "parameters" if isinstance(variable, nnx.Param) else "other", on_a_device(leaf))
            if isinstance(variable, nnx.Param):
                under[path] = signal
            for optimizer in optimizers:
                if _is_trained(optimizer, path, variable):
                    add(signal, "gradients", sum(map(on_a_device, jax.tree.leaves(variable))))
    for optimizer in optimizers:
        for path, variable in nnx.to_flat_state(nnx.state(optimizer)):
            of = parameter_of(path, under)
            signal = "-" if of is None else under[of]
            for leaf in jax.tree.leaves(variable):
                add(signal, "optimizer", on_a_device(leaf))
    found = [Rest(_place(signal), signal, **kinds) for signal, kinds in sums.items()]
    return tuple(sorted(found, key=_in_the_file))


def _in_the_file(rest: Rest) -> tuple[bool, str, int]:
    place = rest.place
    return (place is None, "", 0) if place is None else (False, place.source, place.line or 0)


def on_a_device(array: Any) -> int:
    """Bytes of an array's part on one device."""
    shape, sharding = tuple(array.shape), getattr(array, "sharding", None)
    part = sharding.shard_shape(shape) if isinstance(sharding, NamedSharding) else shape
    return math.prod(part) * array.dtype.itemsize


def _is_trained(optimizer: nnx.Optimizer, path: Path, variable: Any) -> bool:
    return nnx.filterlib.to_predicate(optimizer.wrt)(path, variable)


def _place(signal: str) -> Place | None:
    present = configuration()
    return None if present is None or signal == "-" else present.lookup(tuple(signal.split("/"))).place
