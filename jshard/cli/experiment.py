"""The experiment of a configuration, or a function under it, on the devices that are here or on pretended ones."""

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

FEWEST = 8  # devices to pretend where the mesh leaves a size open


def opened(target: Target, *, only_shapes: bool = False) -> Experiment | Function:
    """Build the experiment or the function. Models and data are found from this folder."""
    pretend_where_none(target.configuration())  # all faults are told before JAX is imported
    return built(target, only_shapes=only_shapes)


def built(target: Target, *, only_shapes: bool = False) -> Experiment | Function:
    """Build the experiment or the function on the devices that JAX has started with."""
    _, build = target.load()
    from jshard.layouts.mesh import present_mesh

    return build(present_mesh(), only_shapes=only_shapes)


@contextlib.contextmanager
def sketched(target: Target) -> Iterator[Experiment | Function]:
    """Build it of shapes alone: no array is made, and no device of the mesh need be here. Where the mesh leaves a size
    open, or signals name workers, whose slices are meshes of their own, the devices that are here decide."""
    configuration = target.configuration()
    if configuration.mesh is None or -1 in configuration.mesh.sizes or names_workers(configuration):
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
    """Count the CPU devices that the mesh needs where there is no accelerator; None when it needs no more than is there."""
    mesh, count = configuration.mesh, configuration.devices or 1
    if mesh is not None and -1 in mesh.sizes:
        count *= max(1, FEWEST // count)
    return None if mesh is None or count == 1 else count


def pretend_where_none(configuration: Configuration) -> None:
    """Pretend as many CPU devices as the mesh needs, where there is no accelerator, and say so."""
    count = pretended(configuration)
    if found() is not None:  # one of several processes, which has pretended its part
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
    """Leave out a page on CUDA's libraries where there is no GPU: the compiler that plans are made with brings a plugin
    along."""
    return "plugin configuration error" not in record.getMessage() or bool(glob.glob("/dev/nvidia[0-9]*"))
