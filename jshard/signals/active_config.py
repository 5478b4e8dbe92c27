"""The configuration that is loaded, its mesh, and the fingerprint that makes jit trace again when either changes."""

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
    """What is loaded in this process, for all threads."""

    configuration: Configuration | None = None
    mesh: Mesh | None = None
    stands_for: Mesh | None = None
    environment_read: bool = False
    lock: Any = dataclasses.field(default_factory=threading.RLock)


_loaded = _Loaded()
_fingerprint = jax.make_user_context(None)


def no_fingerprint() -> contextlib.AbstractContextManager[Any]:
    """Let what is traced inside be one program under all configurations: nothing there asks for any."""
    return _fingerprint(None)


def _become(configuration: Configuration | None, mesh: Mesh | None = None, stands_for: Mesh | None = None) -> None:
    _loaded.configuration, _loaded.mesh, _loaded.environment_read = configuration, mesh, True
    _loaded.stands_for = stands_for
    placed = None if configuration is None else (configuration.fingerprint, mesh, stands_for)
    if _fingerprint.get_global() != placed:
        _fingerprint.set_global(placed)


def load(source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> Configuration:
    """Read and check a configuration and make it the one that every signal means from now on. `overrides` are
    `path=value` words as on the command line. No device is touched."""
    return use(load_configuration(source, overrides))


def use(configuration: Configuration) -> Configuration:
    """Make a configuration the one that every signal means from now on."""
    with _loaded.lock:
        _become(configuration)
    if events.listeners:
        for place, key, value in lines(configuration):
            events.tell("config", place=str(place), key=key, value=value)
    return configuration


def unload() -> None:
    """No configuration: every signal is a no-op again, and the program runs as plain Flax."""
    with _loaded.lock:
        _become(None)


def configuration() -> Configuration | None:
    """What is loaded; `JSHARD_CONFIG` is read at the first question."""
    if not _loaded.environment_read:
        with _loaded.lock:
            if not _loaded.environment_read:
                path = os.environ.get("JSHARD_CONFIG")
                load(path) if path else unload()
    return _loaded.configuration


def mesh() -> Mesh:
    """The mesh of what is loaded."""
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
    """The mesh of GT's form: a row for each list of workers."""
    assert present.mesh is not None
    everyone = build_mesh({"workers": -1}, axis_types="explicit", label=f"workers ({present.mesh.place})")
    label = f"the workers that signals name ({present.mesh.place})"
    rows = [workers_mesh(everyone, each, label=label)[0].devices.ravel() for each in present.workers]
    return Mesh(np.stack(rows), present.mesh.names, axis_types=(AxisType.Explicit,) * 2)


def use_stages() -> None:
    """Take GT's form, whose signals name the workers of following layers, as stages of one mesh from now on."""
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
    """The mesh whose sizes decide how a product without a strategy runs: the loaded one, also while another stands for it."""
    return _loaded.stands_for or mesh()


def mesh_for(signal: Signal) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh that a signal's arrays lie on, and the axes of it that its `shard` names (all, unless it names some)."""
    full = mesh()
    if signal.shard is None or signal.shard.mesh:
        return full, signal.shard.mesh if signal.shard else ()
    return workers_mesh(full, signal.shard.workers, label=signal.label("shard.workers"))


@contextlib.contextmanager
def nothing_loaded() -> Iterator[None]:
    """Run as plain Flax, and load again what is loaded."""
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
    """The loaded configuration on another mesh of the same axes. Where that stands for one of other sizes (verify's mesh of
    ones), what is chosen by size is chosen as on that one, so that it is the same program. It takes the place of the mesh of
    `jax.set_mesh` too."""
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
