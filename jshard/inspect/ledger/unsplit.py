"""Parameters that lie whole on every device although the signal that they are used under splits such parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.sharding import NamedSharding

from jshard.errors import Place
from jshard.inspect.ledger.memory import on_a_device
from jshard.jaxprs import bare, called
from jshard.layers.layer import Layer
from jshard.provenance import Cause
from jshard.signals.active_config import configuration, mesh
from jshard.signals.signal import Signal

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Unsplit:
    """Parameters that lie whole, the keys of their signal that would split them, and what to type."""

    place: Place | None
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
    jaxpr: Any, arrays: Sequence[Any], names: Sequence[Path | None], modules: Mapping[Path, Any]
) -> tuple[Unsplit, ...]:
    """Find them among the operands of `jaxpr`, which are `arrays`: those with a name, that of a parameter in its model.

    Those of one signal to which the same may be done are told together.
    """
    present = configuration()
    if present is None:
        return ()
    found: dict[Any, list[tuple[str, int]]] = {}
    uses = _first_uses(jaxpr, {})
    for number, (array, name) in enumerate(zip(arrays, names, strict=True)):
        if name is None or number not in uses or is_split(array):
            continue
        path, rank = uses[number]
        signal = present.lookup(path) if path else Signal("-")
        if keys := _splitting(signal, rank, mesh().shape):
            words = ", ".join(f"{key}: {' x '.join(axes)}" for key, axes in keys)
            hint = _hint(modules.get(name[:-1]))
            remark = (signal.at(keys[0][0]), "/".join(path), words, hint)
            found.setdefault(remark, []).append((".".join(name), on_a_device(array)))
    return tuple(
        Unsplit(place, signal, _listed([name for name, _ in each]), sum(size for _, size in each), words, hint)
        for (place, signal, words, hint), each in found.items()
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def is_split(array: Any) -> bool:
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


def _hint(module: Any) -> str:
    if isinstance(module, Layer):
        return "build the layer under this signal"
    for layer in Layer.__subclasses__():
        if type(module) in layer.__mro__:
            return f"use jshard.{layer.__name__} for nnx.{type(module).__name__}"
    return "lay it out where it is made: jshard.place(x, jax.P(...))"


Use = tuple[Path, int]  # the signals around an equation, and the rank that an operand has there


def _first_uses(jaxpr: Any, known: dict[int, dict[int, Use]]) -> dict[int, Use]:
    """For operands by number: the first equation that takes it, one under a signal where there is one."""
    if id(jaxpr) in known:  # equal layers share one
        return known[id(jaxpr)]
    numbers = {variable: number for number, variable in enumerate(jaxpr.invars)}
    found: dict[int, Use] = {}
    named: set[int] = set()  # those that are found under a signal
    for eqn in jaxpr.eqns:
        taken = {at: each for at, each in enumerate(eqn.invars) if not isinstance(each, Literal) and each in numbers}
        if named.issuperset(numbers[each] for each in taken.values()):
            continue
        path = Cause().inside(eqn.source_info.name_stack.stack).path
        inner = eqn.params["jaxpr"] if eqn.primitive.name in ("shard_map", "scan") else called(eqn)
        uses = {at: ((), len(each.aval.shape)) for at, each in taken.items()}
        if inner is not None:
            uses = _first_uses(bare(inner), known)
        for at, (below, rank) in ((at, use) for at, use in uses.items() if at in taken):
            number = numbers[taken[at]]
            if number in named or (number in found and not (path or below)):
                continue
            found[number] = (*path, *below), rank
            if path or below:
                named.add(number)
    known[id(jaxpr)] = found
    return found
