"""Parameters of a model that lie whole on every device and need not: which words of a signal would split each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx

from jshard.inspect.ledger.memory import on_a_device
from jshard.inspect.ledger.unsplit import is_split
from jshard.layers.layer import ModelArray, model_arrays, parameters
from jshard.layers.roles import Placed, Roles
from jshard.layouts.paths import slashed
from jshard.signals.active_config import configuration, mesh
from jshard.signals.parameter_path import repeats
from jshard.signals.signal import Signal

MOST = 12


def whole(model: nnx.Module, placed: Mapping[str, Placed]) -> list[str]:
    """A sentence for all that are alike, the largest first, as long as those left are more than a hundredth of the parameters
    on a device; of more than twelve the others are counted."""
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
    found, left = [], sum(size for size, *_ in rows)
    for size, place, name, kind, words, path, count in sorted(rows, key=lambda row: -row[0]):
        if 100 * left <= held:
            break
        if len(found) == MOST:
            found.append(f"others lie whole and need not, {left:,} B on each device")
            break
        what = f"{path} x {count}" if count >= 2 else path
        found.append(f"{place}  {name}  whole: {what} {kind}, {size:,} B on each device; would be split by {words}")
        left -= size
    return found


def _parameters(model: nnx.Module, placed: Mapping[str, Placed]) -> Iterator[tuple[str, ModelArray, Any, Roles]]:
    """The path of each parameter, its signal, its array, and the roles of its axes as far as they are known."""
    arrays, modules = model_arrays(model), dict(nnx.iter_modules(model))
    for keys, leaf in parameters(model):
        path, (*around, name) = slashed(keys), keys
        roles: Roles = (None,) * leaf.ndim
        if path in placed and placed[path].use.shape == leaf.shape:
            roles = placed[path].use.roles
        of_layer = getattr(modules.get(tuple(around)), "parameter_axes", {})
        yield path, arrays[keys], leaf, of_layer.get(name, roles)


def _words(signal: Signal, shape: tuple[int, ...], roles: Roles, sizes: Mapping[str, int]) -> Iterator[str]:
    """For each mesh axis that the signal says nothing of a word that would split this parameter over it, and what it would."""
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
