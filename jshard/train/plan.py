"""The plan of an experiment, or of a function: its program, compiled for devices that are not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jshard.errors import JShardError
from jshard.inspect.plan import Plan, Topology
from jshard.inspect.plan.aot import LIMIT, check_installed
from jshard.inspect.plan.planning import mesh_on, moved_to, planned
from jshard.signals.config import Configuration
from jshard.train.experiment import Experiment
from jshard.train.function import Call, Function


@contextlib.contextmanager
def planned_on(
    topology: Topology,
    configuration: Configuration,
    call: Call | None = None,
    *,
    limit: float = LIMIT,
    cache: bool = True,
) -> Iterator[tuple[Experiment | Function, Plan]]:
    """The experiment of the configuration that is loaded, or a call under it, of shapes alone on the mesh of a topology;
    and its plan. No array is made."""
    if configuration.mesh is None:
        raise JShardError(
            f"{configuration.source} describes no mesh to plan on",
            hint="add `jshard: {mesh: {data: 2, tensor: 4}}` to it",
        )
    mesh = mesh_on(topology, configuration)
    check_installed(topology)
    with moved_to(mesh):
        if call is not None:
            function = call.built(configuration, only_shapes=True)
            yield function, function.plan(topology, limit=limit, cache=cache)
            return
        experiment = Experiment.build(configuration, mesh, only_shapes=True)
        step = experiment.step()
        args = (step.state, *experiment.first_batch())
        told = planned(step.program, args, {}, experiment.explain(), topology, mesh, limit=limit, cache=cache)
        yield experiment, told
