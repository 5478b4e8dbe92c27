"""`jshard train` as a process of several: it joins, agrees with the others, and process 0 prints."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
import yaml
from jax.sharding import Mesh
from rich.console import Console

from jshard.cli.experiment import built, pretended
from jshard.cli.target import Target
from jshard.errors import JShardError
from jshard.inspect.ledger import Ledger
from jshard.launch import kv_store
from jshard.launch.cluster_env import found
from jshard.launch.heartbeat import BAR
from jshard.launch.initialize import fail, init, joined, pretend_part, pulse
from jshard.launch.rendezvous import AlreadyReported, Facts, mismatch
from jshard.signals.active_config import mesh
from jshard.signals.config import Configuration
from jshard.signals.effective_config import flat
from jshard.training.experiments.experiment import Experiment
from jshard.training.function import Function
from jshard.training.preemption import Preempted
from jshard.training.telemetry.metrics import written
from jshard.training.telemetry.progress import Bar, Figures


def as_member(run: Callable[[], int]) -> int:
    """Run a command in a process of several. A fault ends the process at once, so the others don't wait."""
    try:
        status = run()
        pulse().at("ended")
        return status
    except Preempted:  # in all processes, at the same step
        pulse().at("ended")
        raise
    except BaseException as error:
        fail(error)
        raise


def built_alike(target: Target) -> Experiment | Function:
    """Build the experiment or function in a joined process; raise an error if processes differ."""
    program, configuration = built(target), target.configuration()
    ledger = program.asked
    agree("program", program_of(program, str(ledger)), hint="start all of them with the same code and data")
    pulse().stands(first_between_processes(ledger, None if configuration.mesh is None else mesh()))
    return program


def join(
    configuration: Configuration, facts: Mapping[str, Facts], meshes: Mapping[str, Mapping[str, int]] | None = None, *,
    preemption: bool = False,
) -> None:  # fmt: skip
    """Join the other processes; raise an error if configurations, facts or devices differ. `meshes`
    has the sizes of further meshes by label: all processes must have devices in each."""
    membership, asked_mesh = found(), configuration.mesh
    assert membership is not None
    if (count := pretended(configuration)) is not None and asked_mesh is not None:
        pretend_part(count, membership.processes, None, f"the {count} devices of jshard.mesh ({asked_mesh.place})")
    facts = {"configuration": facts_of(configuration), **facts}
    init(facts=facts, preemption=preemption, **configuration.train.get("watchdog", {}))
    agree("devices", {"devices of a process": str(jax.local_device_count()), "kind": jax.devices()[0].device_kind},
          hint="give each process equally many devices, of one kind")  # fmt: skip
    if asked_mesh is not None:
        for label, sizes in {f"jshard.mesh ({asked_mesh.place})": {}, **(meshes or {})}.items():
            full = dict(zip(asked_mesh.names, asked_mesh.sizes, strict=True)) | dict(sizes)
            check_all_have_devices(label, full)


def agree(topic: str, facts: Facts, *, hint: str, seconds: float = 60.0) -> None:
    """Raise an error in all processes if the facts differ, with the rank and the first difference. The same
    holds if a process does not answer within `seconds` of rank 0. Without other processes, do nothing."""
    membership = joined()
    if membership is None:
        return
    key = f"agreement/{topic}"
    if membership.rank == 0:
        kv_store.write(f"{key}/verdict", verdict := _judge(topic, facts, membership.processes, hint, seconds))
        if verdict:
            raise JShardError(verdict[0], hint=verdict[1])
        return
    kv_store.write(f"{key}/{membership.rank}", dict(facts))
    verdict = kv_store.read(f"{key}/verdict", 2 * seconds)
    if verdict is None:
        raise JShardError(
            f"rank 0 has not reported its {topic} for {2 * seconds:g} s", hint="look at the last output of rank 0"
        )
    if verdict:
        raise AlreadyReported(verdict[0], hint=verdict[1])


def _judge(topic: str, facts: Facts, processes: int, hint: str, seconds: float) -> list[str]:
    """Compare the facts of all ranks; return nothing, or a fault and a hint."""
    by_rank, deadline = {0: facts}, time.monotonic() + seconds
    for rank in range(1, processes):
        found = kv_store.read(f"agreement/{topic}/{rank}", deadline - time.monotonic())
        if found is None:
            return [
                f"rank {rank} has not reported its {topic} within {seconds:g} s of rank 0",
                f"look at the last output of rank {rank}",
            ]
        by_rank[rank] = found
    difference = mismatch(topic, by_rank)
    return [difference, hint] if difference else []


def facts_of(configuration: Configuration) -> Facts:
    """Return every key of the configuration with its value."""
    keys = flat(yaml.safe_load(written(configuration)))
    dumped = {key: yaml.safe_dump(value, default_flow_style=True, width=10**6) for key, value in keys}
    return {key: text.removesuffix("...\n").strip() for key, text in dumped.items()}


def program_of(program: Experiment | Function, ledger: str) -> Facts:
    """Return the collectives of a step, a fact each, and the fingerprint of the lowered program."""
    text = program.lowered().as_text()
    lines = {f"line {number} of its ledger": line for number, line in enumerate(ledger.splitlines(), 1)}
    return {**lines, "its fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16]}


def check_all_have_devices(label: str, sizes: Mapping[str, int]) -> None:
    """Raise an error if a mesh has no device of a process: all would wait for it at the end, in vain."""
    if -1 in sizes.values():
        return
    count = math.prod(sizes.values())
    busy = {device.process_index for device in jax.devices()[:count]}
    idle = [rank for rank in range(jax.process_count()) if rank not in busy]
    if idle:
        raise JShardError(
            f"{label} takes {count} of {len(jax.devices())} devices, and rank {idle[0]} has none of them",
            hint=f"start {len(busy)} process{'es' * (len(busy) > 1)}, or make the mesh larger",
        )


def first_between_processes(ledger: Ledger, mesh: Mesh | None) -> str:
    """Return the first collective of a step between processes: there, others wait for a missing process."""
    if mesh is None:
        return ""
    ranks = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    for line in ledger.lines:
        axes = tuple(mesh.axis_names.index(name) for name in line.mesh_axes if name in mesh.axis_names)
        if axes and (ranks.max(axes) != ranks.min(axes)).any():
            return f"{line.collective} of {line.signal} over {line.axis} ({line.line})"
    return ""


class MemberBar(Bar):
    """A progress bar in a process of several: process 0 prints; each sends its step to the launcher's bar."""

    def __init__(self, steps: int):
        speaks = jax.process_index() == 0
        super().__init__(steps, Console(quiet=not speaks, highlight=False, soft_wrap=True))
        self.draws = speaks and bool(os.environ.get(BAR))
        pulse().of = steps

    def begin(self, step: int) -> None:
        pulse().at("step", step)

    def show(self, step: int, loss: jax.Array, figures: Figures) -> None:
        pulse().waits(step, loss)
        super().show(step, loss, figures)

    def show_words(self, step: int, says: str) -> None:
        pulse().says = says
        super().show_words(step, says)
