"""One compiled program, and one gradient, spans one set of devices: what would reach another is told with both YAML lines."""

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
    """An error where `x` can't be brought to `mesh`, as `signal` asks: it is differentiated on other devices, or the program
    that is traced has arrays on others already. JAX itself says so only when the program is compiled."""
    if not isinstance(x, Tracer) or not isinstance(mesh, Mesh):
        return
    value: Any = x.to_concrete_value()
    if value is not None:
        if is_elsewhere(value, mesh) and signal.backward is None:  # which brings cotangents back by itself
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
    """The trace of the program that `x` is part of, below derivatives and vmaps; None outside `jax.jit`."""
    trace = x._trace
    while trace is not None and type(trace).__name__ != "DynamicJaxprTrace":  # JAX keeps the class to itself
        trace = getattr(trace, "parent_trace", None)
    return trace


def differ(one: Mesh, other: Mesh) -> bool:
    """Whether two meshes are over different devices."""
    return list(one.devices.flat) != list(other.devices.flat)


def is_elsewhere(x: object, mesh: Mesh) -> bool:
    """Whether `x` lies on other devices than those of `mesh`, by somebody's wish."""
    if isinstance(x, Tracer) or not isinstance(x, jax.Array) or not isinstance(mesh, Mesh):
        return False
    return x.committed and x.sharding.device_set != {*mesh.devices.flat}


def apart(signal: Signal, mesh: Mesh, other: Signal | str, there: Any) -> JShardError:
    """For two places that no program spans."""
    present = configuration()
    can = present is not None and present.by_stages is not None
    return JShardError(
        f"{signal} lies on {devices_in_words(mesh)} and {other} on {devices_in_words(there)}, and one program or gradient "
        "can't span both",
        hint="call jshard.shard(model), which makes their workers stages of one mesh, or name the same workers for both"
        if can
        else "name the same workers for both, or mesh axes",
    )


def devices_in_words(mesh: Mesh) -> str:
    """`workers 2, 3`"""
    return "workers " + ", ".join(str(device.id) for device in mesh.devices.flat)


def _mesh_of(x: jax.Array) -> Mesh:
    """The mesh that an array lies on, made of its devices where its sharding has none."""
    if isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh):
        return x.sharding.mesh
    return Mesh(np.array(sorted(x.devices(), key=lambda device: device.id)), ("workers",))
