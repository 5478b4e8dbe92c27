"""Parameters that lie whole on every device although the signal that they are used under splits such parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from jshard.errors import Location
from jshard.inspect.ledger.memory import on_a_device
from jshard.layers.layer import Layer
from jshard.layers.program_claims import active_signals
from jshard.programs.jaxprs import Jaxpr
from jshard.signals.active_config import configuration, mesh
from jshard.signals.signal import Signal

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Unsplit:
    """Parameters that lie whole, the keys of their signal that would split them, and what to type."""

    place: Location | None
    signal: str
    parameter: str  # up.kernel, up.bias
    bytes: int  # of all of them, on each device
    keys: str  # column: tensor, store: data
    hint: str

    def __str__(self) -> str:
        return (
            f"{self.place or '-'}  {self.signal}  unsplit: {self.parameter} whole on each device ({self.bytes:,} B), not split "
            f"by {self.keys}; {self.hint}"
        )


def unsplit(
    jaxpr: Jaxpr, arrays: Sequence[Any], names: Sequence[Path | None], modules: Mapping[Path, Any]
) -> tuple[Unsplit, ...]:
    """Find them among the operands of `jaxpr`, which are `arrays`: those with a name, that of a parameter in its model.

    Those of one signal to which the same may be done are told together.
    """
    present = configuration()
    if present is None:
        return ()
    found: dict[Any, list[tuple[str, int]]] = {}
    uses = active_signals(jaxpr, [f"{number}" * (name is not None) for number, name in enumerate(names)], {}, ())
    for number, (array, name) in enumerate(zip(arrays, names, strict=True)):
        use = next(iter(uses.get(f"{number}", ())), None)
        if name is None or use is None or is_split(array):
            continue
        signal = present.lookup(use.names)
        if keys := _splitting(signal, use.rank, mesh().shape):
            words = ", ".join(f"{key}: {' x '.join(axes)}" for key, axes in keys)
            hint = _hint(modules.get(name[:-1]))
            remark = (signal.at(keys[0][0]), "/".join(use.names), words, hint)
            found.setdefault(remark, []).append((".".join(name), on_a_device(array)))
    return tuple(
        Unsplit(place, signal, _listed([name for name, _ in each]), sum(size for _, size in each), words, hint)
        for (place, signal, words, hint), each in found.items()
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def is_split(array: object) -> bool:
    """Whether a device holds a part of it."""
    sharding = getattr(array, "sharding", None)
    return isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated


def _splitting(signal: Signal, rank: int, sizes: Mapping[str, int]) -> list[tuple[str, Path]]:
    """The keys by which a signal splits a parameter of this rank, with their mesh axes."""
    keys = ("column", "reduction", "store") if rank > 1 else ("column", "store") if rank else ()
    found = [(key, getattr(signal, key)) for key in keys]
    if signal.shard is not None and signal.shard.axis is not None and -rank <= signal.shard.axis < rank:
        found = [("shard", signal.shard.mesh or ("workers",))]
    return [(key, axes) for key, axes in found if any(sizes.get(name) != 1 for name in axes)]


def _hint(module: object) -> str:
    if isinstance(module, Layer):
        return "build the layer under this signal"
    for layer in Layer.__subclasses__():
        if type(module) in layer.__mro__:
            return f"use jshard.{layer.__name__} for nnx.{type(module).__name__}"
    return "lay it out where it is made: jshard.place(x, jax.P(...))"
