"""The loaded configuration, its mesh, and a fingerprint for JAX to retrace after a change."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jshard.errors import JShardError
from jshard.kernels import slices
from jshard.layouts import mesh as meshes
from jshard.layouts.mesh import build_mesh, workers_mesh
from jshard.runs import events
from jshard.signals.config import Configuration, load_configuration
from jshard.signals.effective_config import lines
from jshard.signals.signal import Signal


@dataclasses.dataclass
class _Loaded:
    """The state loaded in this process, shared by all threads."""

    configuration: Configuration | None = None
    mesh: Mesh | None = None
    stands_for: Mesh | None = None
    environment_read: bool = False
    lock: Any = dataclasses.field(default_factory=threading.RLock)


_loaded = _Loaded()
_fingerprint = jax.make_user_context(None)


def no_fingerprint() -> contextlib.AbstractContextManager[Any]:
    """Share the programs traced inside between all configurations; they depend on none."""
    return _fingerprint(None)


def _become(configuration: Configuration | None, mesh: Mesh | None = None, stands_for: Mesh | None = None) -> None:
    _loaded.configuration, _loaded.mesh, _loaded.environment_read = configuration, mesh, True
    _loaded.stands_for = stands_for
    placed = None if configuration is None else (configuration.fingerprint, mesh, stands_for)
    if _fingerprint.get_global() != placed:
        _fingerprint.set_global(placed)


def load(source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> Configuration:
    """Read, check and activate a configuration for every signal, without touching a device.
    `overrides` are `path=value` words as on the command line."""
    return use(load_configuration(source, overrides))


def use(configuration: Configuration) -> Configuration:
    """Activate a configuration for every signal."""
    with _loaded.lock:
        _become(configuration)
    if events.listeners:
        for place, key, value in lines(configuration):
            events.tell("config", place=str(place), key=key, value=value)
    return configuration


def unload() -> None:
    """Remove the configuration: every signal is a no-op, and the program runs as plain Flax."""
    with _loaded.lock:
        _become(None)


def configuration() -> Configuration | None:
    """Return the loaded configuration. The first call reads `JSHARD_CONFIG`."""
    if not _loaded.environment_read:
        with _loaded.lock:
            if not _loaded.environment_read:
                path = os.environ.get("JSHARD_CONFIG")
                load(path) if path else unload()
    return _loaded.configuration


def mesh() -> Mesh:
    """Return the mesh of the loaded configuration."""
    present = configuration()
    if present is None:
        raise JShardError(
            "no configuration is loaded", hint='call jshard.load("configs/mlp.yaml") or set JSHARD_CONFIG'
        )
    if _loaded.mesh is None:
        if present.mesh is None:
            raise JShardError(
                f"{present.source} describes no mesh", hint="add `jshard: {mesh: {data: 2, tensor: 4}}` to it"
            )
        if present.workers:
            _loaded.mesh = _mesh_of_stages(present)
            return _loaded.mesh
        sizes = dict(zip(present.mesh.names, present.mesh.sizes, strict=True))
        label, across = f"jshard.mesh ({present.mesh.place})", present.mesh.across
        _loaded.mesh = build_mesh(sizes, axis_types=present.axis_types, label=label, across=across)
    return _loaded.mesh


def _mesh_of_stages(present: Configuration) -> Mesh:
    """Return the mesh of GT's form, with a row for each list of workers."""
    assert present.mesh is not None
    everyone = build_mesh({"workers": -1}, axis_types="explicit", label=f"workers ({present.mesh.place})")
    label = f"the workers that signals name ({present.mesh.place})"
    rows = [workers_mesh(everyone, each, label=label)[0].devices.ravel() for each in present.workers]
    return Mesh(np.stack(rows), present.mesh.names, axis_types=(AxisType.Explicit,) * 2)


def use_stages() -> None:
    """Convert the loaded configuration from GT's form to a mesh with a stage for each list of workers."""
    present = configuration()
    found = None if present is None else present.by_stages
    if found is not None:
        with _loaded.lock:
            _become(found)
        events.tell("stages", workers=[list(each) for each in found.workers], mesh=str(found.mesh), microbatches=1)


def _across() -> tuple[str, ...]:
    return () if (present := configuration()) is None or present.mesh is None else present.mesh.across


slices.loaded_across = _across
meshes.loaded_mesh = lambda: None if (present := configuration()) is None or present.mesh is None else mesh()


def mesh_to_choose_for() -> Mesh:
    """Return the mesh for choices by size, such as a product's strategy: no stand-in of `on_mesh`."""
    return _loaded.stands_for or mesh()


def mesh_for(signal: Signal) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh of a signal's arrays, and the mesh axes of its `shard`: all, unless it names some."""
    full = mesh()
    if signal.shard is None or signal.shard.mesh:
        return full, signal.shard.mesh if signal.shard else ()
    return workers_mesh(full, signal.shard.workers, label=signal.label("shard.workers"))


@contextlib.contextmanager
def nothing_loaded() -> Iterator[None]:
    """Run as plain Flax inside, and restore the configuration after."""
    with _loaded.lock:
        before = _loaded.configuration, _loaded.mesh, _loaded.stands_for
        _become(None)
    try:
        yield
    finally:
        with _loaded.lock:
            _become(*before)


@contextlib.contextmanager
def on_mesh(replacement: Mesh, stands_for: Mesh | None = None) -> Iterator[None]:
    """Run the loaded configuration on another mesh with the same axes, in place of `jax.set_mesh`'s
    mesh too. `stands_for` is a mesh of other sizes for all choices by size: verify runs the same
    program on a mesh of ones."""
    present = configuration()
    with _loaded.lock:
        before = _loaded.mesh
        _become(present, replacement, stands_for)
    try:
        with meshes.in_place_of_set(replacement):
            yield
    finally:
        with _loaded.lock:
            _become(present)
            _loaded.mesh = before
