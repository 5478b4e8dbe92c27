"""jshard train as one process of several: it joins, agrees with the others, and speaks when it is the first."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import yaml
from jax.sharding import Mesh
from rich.console import Console

from jshard.cli.experiment import opened, pretended
from jshard.cli.target import Asked
from jshard.errors import JShardError
from jshard.inspect.ledger import Ledger
from jshard.launch.agreement import agree
from jshard.launch.cluster_env import found
from jshard.launch.heartbeat import BAR
from jshard.launch.initialize import fail, init, pretend_part, pulse
from jshard.launch.mismatch import Facts
from jshard.signals.config import Configuration, load_configuration
from jshard.train.checkpoint import Checkpoint
from jshard.train.experiment import Experiment
from jshard.train.loop import Step
from jshard.train.metrics import written
from jshard.train.preemption import Preempted
from jshard.train.progress import Bar
from jshard.train.train import train

SAME_YAML = "start all of them with the same YAML and the same key=value"
SAME_PROGRAM = "start all of them with the same code and data"


def train_as_member(asked: Asked, resume: Callable[[], Checkpoint] | None = None) -> int:
    """`resume` finds what to go on from, once all have joined."""
    return as_member(lambda: _train(asked, resume))


def as_member(run: Callable[[], int]) -> int:
    """Never returns after a fault: the process ends at once, so that the others don't wait for it."""
    try:
        return run()
    except Preempted:  # all of them end here, at the same step
        pulse().at("ended")
        raise
    except BaseException as error:
        fail(error)
        raise


def _train(asked: Asked, resume: Callable[[], Checkpoint] | None) -> int:
    experiment = joined(asked)
    leads = jax.process_index() == 0
    bar = MemberBar(experiment.steps, experiment.batch, speaks=leads)
    accuracy = train(experiment, bar, resume=None if resume is None else resume())
    pulse().at("ended")
    if leads:
        print(f"test accuracy {100 * accuracy:.1f} %")
    return 0


def joined(asked: Asked) -> Experiment:
    """The experiment, built, when all processes have agreed that it is the same one."""
    configuration = load_configuration(asked.path, asked.overrides)
    membership = found()
    assert membership is not None
    if (count := pretended(configuration)) is not None:
        said = f"the {count} devices of jshard.mesh ({configuration.mesh.place})"
        pretend_part(count, membership.processes, None, said)
    init(facts={"configuration": facts_of(configuration)}, preemption=True, **configuration.train.get("watchdog", {}))
    agree("devices", {"devices of a process": str(jax.local_device_count()), "kind": jax.devices()[0].device_kind},
          mend="give each process as many, of one kind")  # fmt: skip
    check_all_have_devices(configuration)
    experiment = opened(asked)
    assert isinstance(experiment, Experiment)
    ledger = experiment.explain()
    if membership.rank == 0:
        print(ledger)
    agree("program", program_of(experiment, str(ledger)), mend=SAME_PROGRAM)
    pulse().stands(first_between_processes(ledger, experiment.placement.mesh))
    return experiment


def facts_of(configuration: Configuration) -> Facts:
    """Every key that the configuration has, with its value."""
    return dict(_flat(yaml.safe_load(written(configuration)), ""))


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    if not isinstance(value, Mapping):
        return [(name, yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip())]
    return [pair for key, each in value.items() for pair in _flat(each, f"{name}.{key}" if name else str(key))]


def program_of(experiment: Experiment, ledger: str) -> Facts:
    """The collectives of a step, each a fact, and the fingerprint of what the compiler is given."""
    step = Step(experiment.model, experiment.optimizer, experiment.loss)
    text = step.program.lower(step.state, *experiment.first_batch()).as_text()
    lines = {f"line {number} of its ledger": line for number, line in enumerate(ledger.splitlines(), 1)}
    return {**lines, "its fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}


def check_all_have_devices(configuration: Configuration) -> None:
    """An error when the mesh leaves a process without work: it would be waited for at the end, for nothing."""
    mesh, count = configuration.mesh, configuration.devices
    if mesh is None or count is None or -1 in mesh.sizes:
        return
    busy = {device.process_index for device in jax.devices()[:count]}
    idle = [rank for rank in range(jax.process_count()) if rank not in busy]
    if idle:
        raise JShardError(
            f"jshard.mesh ({mesh.place}) takes {count} of {len(jax.devices())} devices, and rank {idle[0]} has none of them",
            mend=f"start {len(busy)} processes, or make the mesh larger",
        )


def first_between_processes(ledger: Ledger, mesh: Mesh | None) -> str:
    """The collective that a process which does not do a step is missed in: the first of a step whose group has devices of
    several processes."""
    if mesh is None:
        return ""
    ranks = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    for line in ledger.lines:
        axes = tuple(mesh.axis_names.index(name) for name in line.mesh_axes if name in mesh.axis_names)
        if axes and (ranks.max(axes) != ranks.min(axes)).any():
            return f"{line.collective} of {line.signal} over {line.axis} ({line.line})"
    return ""


class MemberBar(Bar):
    """What the first process says; how far this one is goes to its launcher, which draws the one bar."""

    def __init__(self, steps: int, batch: int, *, speaks: bool):
        super().__init__(steps, batch, Console(quiet=not speaks, highlight=False, soft_wrap=True))
        self.draws = speaks and bool(os.environ.get(BAR))
        pulse().of = steps

    def begin(self, step: int) -> None:
        pulse().at("step", step)

    def show(self, step: int, loss: jax.Array) -> None:
        pulse().waits(step, loss)
        super().show(step, loss)

    def show_figures(self, step: int, says: str) -> None:
        pulse().says = says
        super().show_figures(step, says)
