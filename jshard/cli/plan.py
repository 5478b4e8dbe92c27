"""`jshard plan`: a training step as compiled for absent hardware."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from jshard.cli.target import Target, function_arguments
from jshard.cli.terminal import show, tell
from jshard.errors import JShardError

if TYPE_CHECKING:
    from jshard.inspect.plan import Plan

TOPOLOGIES = "v5e:4x4, v5p:8x8x16, v6e:16x16, tpu7x:2x2x2, h100:8, h200:8, b200:8, cpu:8"
LIMIT = 600  # seconds, as in jshard.inspect.plan, which imports JAX


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology",
        metavar="CHIP:SIZE",
        help=f"the devices: {TOPOLOGIES} and others of these chips; default: jshard.topology, else pretend devices for "
        "the mesh",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, its schema named in it")
    parser.add_argument("--program", action="store_true", help="print the compiled program without names")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="a time limit for the compiler")
    function_arguments(parser)


def run(chosen: argparse.Namespace) -> int:
    """Print the plan; return 0 if it fits, 1 if it does not fit or exceeds the budget."""
    target = Target.of(chosen)
    configuration = target.configuration()
    topology = chosen.topology or configuration.topology or f"cpu:{configuration.devices or 8}"
    plan = _planned(topology, target, chosen.limit)
    if chosen.program:
        from jshard.inspect.compiled.program_text import normalised

        print(normalised(plan.text_of_program))
        return 0
    too_much = plan.memory.over_budget()
    if chosen.json:
        print(plan.to_json())
        if too_much:
            tell(too_much)
    else:
        show(str(plan))
    return 1 if plan.memory.fits is False or too_much else 0


def _planned(topology: str, target: Target, limit: float) -> Plan:
    """Plan the target from shapes alone, on the mesh of a topology."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # tracing needs no accelerator
    target.configuration()  # faults come before the import of JAX
    configuration, build = target.load()
    from jshard.inspect.plan import Topology
    from jshard.inspect.plan.aot import check_installed
    from jshard.inspect.plan.planning import mesh_on
    from jshard.signals.active_config import on_mesh

    devices = Topology.chosen(topology, configuration)
    assert devices is not None
    if configuration.mesh is None:
        raise JShardError(
            f"{configuration.source} describes no mesh to plan on",
            hint="add `jshard: {mesh: {data: 2, tensor: 4}}` to it",
        )
    mesh = mesh_on(devices, configuration)
    check_installed(devices)
    with on_mesh(mesh):
        return build(mesh, only_shapes=True).plan(devices, limit=limit)
