"""Parameters whole on every device, although a word of their signal splits, or could split, them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx
from jax.sharding import NamedSharding

from jshard.errors import Location
from jshard.inspect.ledger.memory import on_a_device
from jshard.layers.layer import Layer, ModelArray, model_arrays, parameters
from jshard.layers.program_claims import active_signals
from jshard.layers.roles import Placed, Roles
from jshard.layouts.paths import slashed
from jshard.programs.jaxprs import Jaxpr
from jshard.signals.active_config import configuration, mesh
from jshard.signals.globs import repeats
from jshard.signals.signal import Signal

MOST = 12
Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Unsplit:
    """Whole parameters, the keys of their signal for splitting them, and a line to type."""

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
    """List whole parameters among the operands of `jaxpr`, although a key of their signal
    splits them. `arrays` are the operands; `names` has the path of each parameter in its
    model, else None. Parameters of one signal with equal keys and hint are one entry."""
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
    """Return whether each device holds only a shard of the array."""
    sharding = getattr(array, "sharding", None)
    return isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated


def _splitting(signal: Signal, rank: int, sizes: Mapping[str, int]) -> list[tuple[str, Path]]:
    """Return the keys of a signal for splitting a parameter of this rank, with their mesh axes."""
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


def whole(model: nnx.Module, placed: Mapping[str, Placed]) -> list[str]:
    """List whole parameters with a word to split them, the largest first, a sentence for equal ones. It stops
    at a hundredth of the parameters' bytes on a device, and after `MOST` sentences it only adds up the rest."""
    present = configuration()
    if present is None or present.mesh is None:
        return []
    entries: list[tuple[tuple[str, str, str, str, int], str]] = []
    held = 0
    for path, array, leaf, roles in _parameters(model, placed):
        size = on_a_device(leaf)
        held += size
        signal = array.signal or Signal("-")
        words = ", ".join(_words(signal, leaf.shape, roles, mesh().shape))
        if words and not is_split(leaf):
            place = "-" if array.signal is None else str(signal.place)
            kind = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            entries.append(((place, signal.name, kind, words, size), path))
    rows = [(size * count, *row, path, count) for (*row, size), path, count in repeats(entries)]
    sentences, left = [], sum(size for size, *_ in rows)
    for size, place, name, kind, words, path, count in sorted(rows, key=lambda row: -row[0]):
        if 100 * left <= held:
            break
        if len(sentences) == MOST:
            sentences.append(f"other parameters are whole and could be split, {left:,} B on each device")
            break
        what = f"{path} x {count}" if count >= 2 else path
        sentences.append(f"{place}  {name}  whole: {what} {kind}, {size:,} B on each device; would be split by {words}")
        left -= size
    return sentences


def _parameters(model: nnx.Module, placed: Mapping[str, Placed]) -> Iterator[tuple[str, ModelArray, Any, Roles]]:
    """Yield the path of each parameter, its signal, its array, and the known roles of its axes."""
    arrays, modules = model_arrays(model), dict(nnx.iter_modules(model))
    for keys, leaf in parameters(model):
        path, (*around, name) = slashed(keys), keys
        roles: Roles = (None,) * leaf.ndim
        if path in placed and placed[path].use.shape == leaf.shape:
            roles = placed[path].use.roles
        of_layer = getattr(modules.get(tuple(around)), "parameter_axes", {})
        yield path, arrays[keys], leaf, of_layer.get(name, roles)


def _words(signal: Signal, shape: tuple[int, ...], roles: Roles, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield, for each mesh axis left out by the signal, a word to split this parameter over it, and how."""
    busy = {*signal.column, *signal.reduction, *signal.store, *signal.sequence}
    for name, ways in sizes.items():
        if ways < 2 or name in busy or signal.shard is not None:
            continue
        words = [] if name in signal.row else [word for word in ("column", "reduction") if word in roles]
        axes = [(word, roles.index(word)) for word in words]
        axes += [("store", axis) for axis, role in enumerate(roles) if role != "scan"]
        if found := [(word, axis) for word, axis in axes if not shape[axis] % ways]:
            word, axis = found[0]
            yield f"{word}: {name} ({shape[axis]} in {ways})"
