"""The experiment of a configuration, or a function under it, on real or pretend devices."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jshard.cli.target import Target
from jshard.cli.terminal import tell
from jshard.errors import printable
from jshard.launch.cluster_env import found
from jshard.layouts.pretend import pretend, start_no_other_backend
from jshard.signals.config import Configuration

if TYPE_CHECKING:
    from jshard.training.experiments.experiment import Experiment
    from jshard.training.function import Function

FEWEST = 8  # devices to pretend if the mesh leaves a size open


def opened(target: Target, *, only_shapes: bool = False) -> Experiment | Function:
    """Build the experiment or function, on pretend devices if needed. Modules are found from this folder."""
    pretend_where_none(target.configuration())  # faults come before the import of JAX
    return built(target, only_shapes=only_shapes)


def built(target: Target, *, only_shapes: bool = False) -> Experiment | Function:
    """Build the experiment or the function on JAX's devices."""
    _, build = target.load()
    from jshard.layouts.mesh import present_mesh

    return build(present_mesh(), only_shapes=only_shapes)


@contextlib.contextmanager
def sketched(target: Target) -> Iterator[Experiment | Function]:
    """Build the experiment or the function from shapes alone, without arrays or the devices of the mesh.
    The devices here are used if the mesh leaves a size open, or signals name workers, each list a mesh."""
    configuration = target.configuration()
    if target.on or configuration.mesh is None or -1 in configuration.mesh.sizes or names_workers(configuration):
        yield opened(target)
        return
    sizes = dict(zip(configuration.mesh.names, configuration.mesh.sizes, strict=True))
    start_no_other_backend()
    configuration, build = target.load()
    from jshard.layouts.mesh import absent_mesh
    from jshard.signals.active_config import on_mesh

    absent = absent_mesh(sizes, axis_types=configuration.axis_types)
    with on_mesh(absent):
        yield build(absent, only_shapes=True)


def names_workers(configuration: Configuration) -> bool:
    return any(signal.shard is not None and signal.shard.workers for signal in configuration.signals.values())


def pretended(configuration: Configuration) -> int | None:
    """Return the number of CPU devices to pretend for the mesh, or None for a single device."""
    mesh, count = configuration.mesh, configuration.devices or 1
    if mesh is not None and -1 in mesh.sizes:
        count *= max(1, FEWEST // count)
    return None if mesh is None or count == 1 else count


def pretend_where_none(configuration: Configuration) -> None:
    """Pretend CPU devices for the mesh if there is no accelerator, and report it."""
    count = pretended(configuration)
    if found() is not None:  # a process of several has pretended its part
        return
    if count is None:
        start_no_other_backend()
        return
    why = "JAX_PLATFORMS=cpu" if "cpu" in os.environ.get("JAX_PLATFORMS", "") else "no accelerator here"
    pretend(count, platforms=None)
    import jax

    logging.getLogger("jax._src.xla_bridge").addFilter(_is_of_use)
    if jax.default_backend() == "cpu":
        here = len(jax.devices())
        tell(f"{why}: pretending {here} CPU devices for mesh {printable(str(configuration.mesh))}")


def _is_of_use(record: logging.LogRecord) -> bool:
    """Return whether a log record is of use: without a GPU, a page on CUDA's libraries is not."""
    return "plugin configuration error" not in record.getMessage() or bool(glob.glob("/dev/nvidia[0-9]*"))
