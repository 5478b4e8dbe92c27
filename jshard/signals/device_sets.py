"""Errors for a program or gradient over different sets of devices, with both YAML lines."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jshard.errors import JShardError
from jshard.signals.active_config import configuration, mesh_for
from jshard.signals.signal import Signal

# The first mesh of each program being traced, and the signal that brought it there.
_first: weakref.WeakKeyDictionary[Any, tuple[Mesh, Signal]] = weakref.WeakKeyDictionary()


def check_reach(x: object, mesh: Mesh, signal: Signal) -> None:
    """Raise an error if `x` can't be moved to `mesh` under `signal`. `x` may be differentiated on other devices,
    or the traced program may have arrays on other devices. JAX itself reports this only when it compiles."""
    if not isinstance(x, Tracer) or not isinstance(mesh, Mesh):
        return
    value: Any = x.to_concrete_value()
    if value is not None:
        if is_elsewhere(value, mesh) and signal.backward is None:  # `backward` moves cotangents back
            there, present = _mesh_of(value), configuration()
            signals = present.signals.values() if present is not None else ()
            lie_there = (each for each in signals if each.shard is not None and not differ(mesh_for(each)[0], there))
            raise apart(signal, mesh, next(lie_there, "its input"), there)
        return
    if (trace := program_of(x)) is None:
        return
    there, other = _first.setdefault(trace, (mesh, signal))
    if differ(there, mesh):
        raise apart(signal, mesh, other, there)


def program_of(x: Any) -> Any:
    """Return the jit trace of `x`, below derivatives and vmaps; None outside `jax.jit`."""
    trace = x._trace
    while trace is not None and type(trace).__name__ != "DynamicJaxprTrace":  # a private class of JAX
        trace = getattr(trace, "parent_trace", None)
    return trace


def differ(one: Mesh, other: Mesh) -> bool:
    """Return whether two meshes have different devices."""
    return list(one.devices.flat) != list(other.devices.flat)


def is_elsewhere(x: object, mesh: Mesh) -> bool:
    """Return whether `x` is committed to devices outside `mesh`."""
    if isinstance(x, Tracer) or not isinstance(x, jax.Array) or not isinstance(mesh, Mesh):
        return False
    return x.committed and x.sharding.device_set != {*mesh.devices.flat}


def apart(signal: Signal, mesh: Mesh, other: Signal | str, there: Any) -> JShardError:
    """Return the error for two places without a common program."""
    present = configuration()
    can = present is not None and present.by_stages is not None
    return JShardError(
        f"{signal} is on {devices_in_words(mesh)} and {other} on {devices_in_words(there)}, but one program or gradient "
        "can't span both",
        hint="call jshard.shard(model), which makes their workers stages of one mesh, or name the same workers for both"
        if can
        else "name the same workers for both, or mesh axes",
    )


def devices_in_words(mesh: Mesh) -> str:
    """Return the devices of a mesh in words: `workers 2, 3`."""
    return "workers " + ", ".join(str(device.id) for device in mesh.devices.flat)


def _mesh_of(x: jax.Array) -> Mesh:
    """Return the mesh of an array, made of its devices if its sharding has none."""
    if isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh):
        return x.sharding.mesh
    return Mesh(np.array(sorted(x.devices(), key=lambda device: device.id)), ("workers",))
