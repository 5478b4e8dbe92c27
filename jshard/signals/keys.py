"""Which key of a signal asks for a collective, and the line that it is written on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jshard.errors import JShardError
from jshard.programs.provenance import Cause
from jshard.signals.active_config import configuration
from jshard.signals.config import Configuration
from jshard.signals.signal import AXIS_KEYS, Signal


def blamed(cause: Cause, mesh_axes: Sequence[str]) -> Cause:
    """Find the key and the line behind a collective over `mesh_axes`, and whether a signal asked for it."""
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
    """Of the signal: `remat` for what runs again because of it, the key that the layer wrote around the collective, else the
    first key that names a mesh axis. Layers have other keys for `shard`: under one, what they wrote counts if the signal has
    it too. JAX adds sums of gradients where a value starts to vary, which no layer writes. But x is brought to where
    `reduction` splits it, as the sequence is scattered to later."""
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
    """The mesh axes that a signal names, and the signal where its cotangents lie."""
    names = {name for key in AXIS_KEYS for name in signal.axes(key)}
    if signal.shard is not None:
        every = present.mesh.names if present.mesh is not None else ()
        names |= set(signal.shard.mesh or (*every, "workers"))
    if signal.backward is not None:
        other = present.lookup((signal.backward,))
        names |= _named(other, present) if other.backward is None else set()
    return names


def unused(scopes: Iterable[tuple[str, ...]]) -> tuple[Signal, ...]:
    """The signals of the configuration that no scope of these means, and no array has been placed under."""
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
