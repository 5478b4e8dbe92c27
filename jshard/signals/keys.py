"""Attribution of collectives to keys of signals and their lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jshard.errors import JShardError
from jshard.programs.provenance import Cause
from jshard.signals.active_config import configuration
from jshard.signals.config import Configuration
from jshard.signals.signal import AXIS_KEYS, Signal


def blamed(cause: Cause, mesh_axes: Sequence[str]) -> Cause:
    """Complete the cause of a collective over `mesh_axes`: key, line, and whether a signal asked for it."""
    present = configuration()
    if present is None:
        return cause
    if not cause.path:
        return dataclasses.replace(cause, asked=bool(cause.chosen))
    signal = present.lookup(cause.path)
    key = _key(signal, cause, mesh_axes)
    asked = bool(cause.key or cause.chosen or cause.redistributed or set(mesh_axes) & _named(signal, present))
    return dataclasses.replace(cause, key=key, place=signal.at(key), asked=asked)


def _key(signal: Signal, cause: Cause, mesh_axes: Sequence[str]) -> str:
    """Return the key of a signal responsible for a collective.

    Recomputation belongs to `remat`. Otherwise it is the key written by the layer; under `shard`, only
    if the signal names the mesh axes for this key too. JAX inserts sums of gradients without a key:
    the first key with a mesh axis is responsible. For a redistribution of x, `reduction` comes first.
    """
    if cause.remat and signal.remat:
        return "remat"
    is_own = cause.key not in AXIS_KEYS or not {*mesh_axes}.isdisjoint(signal.axes(cause.key))
    if cause.key and (signal.shard is None or is_own):
        return cause.key
    if signal.shard is not None:
        return "shard"
    keys = ("reduction", *AXIS_KEYS) if cause.redistributed else AXIS_KEYS
    return next((key for key in keys if not {*mesh_axes}.isdisjoint(signal.axes(key))), "")


def _named(signal: Signal, present: Configuration) -> set[str]:
    """Return the mesh axes named by a signal and by the signal of its cotangents."""
    names = {name for key in AXIS_KEYS for name in signal.axes(key)}
    if signal.shard is not None:
        every = present.mesh.names if present.mesh is not None else ()
        names |= set(signal.shard.mesh or (*every, "workers"))
    if signal.backward is not None:
        other = present.lookup((signal.backward,))
        names |= _named(other, present) if other.backward is None else set()
    return names


def unused(scopes: Iterable[tuple[str, ...]]) -> tuple[Signal, ...]:
    """Return the configured signals without a scope in `scopes` and without a placed array."""
    present = configuration()
    if present is None:
        return ()
    used: set[int] = set()  # a name that a glob matches gets a signal of its own, which keeps the glob's places
    for path in dict.fromkeys(scope[:end] for scope in (*scopes, *present.placed) for end, _ in enumerate(scope, 1)):
        try:
            signal = present.lookup(path)
        except JShardError:  # the scope "mlp/up" is entered at once, and there need be no signal "mlp"
            continue
        used.add(id(signal.places))
        if signal.backward is not None:
            used.add(id(present.lookup((signal.backward,)).places))
    return tuple(signal for signal in present.signals.values() if id(signal.places) not in used)
