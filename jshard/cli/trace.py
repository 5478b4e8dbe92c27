"""`jshard trace`: a capture of a few steps, of an experiment or of a run in progress."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jshard.cli.resume import experiment_of
from jshard.cli.target import Target
from jshard.cli.terminal import show
from jshard.errors import JShardError
from jshard.runs.names import CAPTURED, CONFIGURATION, TRACE, WANTED

if TYPE_CHECKING:
    from jshard.inspect.timeline.capture import Capture
    from jshard.training.experiments.experiment import Experiment

STEPS = 3
WAIT = 60.0  # seconds for a run to take a step
LATER = 30.0  # seconds for its other processes, after the first


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard trace [-h] PATH|RUN [key=value ...] [--trust] [--steps 3] [-o RUN] [--wait 60]"
    parser.set_defaults(needs=("a configuration or the folder of a run", "configs/digits.yaml"))
    parser.add_argument("--steps", type=int, default=STEPS, metavar="3", help=f"the number of steps; default: {STEPS}")
    parser.add_argument(
        "-o",
        "--output",
        metavar="RUN",
        help="the run's folder for the capture; default: the experiment's output",
    )
    parser.add_argument(
        "--wait", type=float, default=WAIT, metavar="60", help="seconds to wait for a step of a run in progress"
    )


def run(chosen: argparse.Namespace) -> int:
    if chosen.steps < 1:
        raise JShardError(f"jshard trace can't capture {chosen.steps} steps", hint="type: --steps 3")
    path = Path(chosen.path)
    if path.is_dir():
        return _of_run(path, chosen)
    return _of_experiment(experiment_of(Target.named(chosen.path, chosen.overrides, chosen)), chosen)


def _of_experiment(experiment: Experiment, chosen: argparse.Namespace) -> int:
    import jax
    from jax.experimental.multihost_utils import sync_global_devices

    from jshard.training.experiments.trace import trace_steps

    folder = Path(chosen.output or experiment.settings["output"] or f"runs/{Path(chosen.path).stem}")
    leads = jax.process_index() == 0
    if leads:
        clear(folder)
    sync_global_devices("jshard trace cleared")
    capture = trace_steps(experiment, folder / TRACE, chosen.steps, title=chosen.path)
    sync_global_devices("jshard trace captured")
    if leads:
        _say(capture, folder)
    return 0


def _say(capture: Capture, folder: Path) -> None:
    steps, count = capture.metadata["steps"], len(capture.read.events)
    devices = len({event.device for event in capture.read.events})
    others = f" of process 0 ({capture.processes - 1} more captured their own)" if capture.processes > 1 else ""
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}" if steps else "no whole step"
    show(f"captured {when}: {count:,} operations on {devices} device{'s' * (devices > 1)}{others}, in {folder / TRACE}")
    show(f"to see them, type: jshard timeline {folder} -o timeline.html")


# -- a run in progress --


def _of_run(folder: Path, chosen: argparse.Namespace) -> int:
    """Request a capture by a file for the run's loop, and wait for the result."""
    for option, given in (("-o", chosen.output), ("key=value", chosen.overrides)):
        if given:
            raise JShardError(
                f"{option} is for an experiment that jshard trace starts, and {folder} is the folder of a run",
                hint=f"remove it, or type: jshard trace {folder / CONFIGURATION}",
            )
    identity = secrets.token_hex(8)
    clear(folder)
    wanted = folder / TRACE / WANTED
    unfinished = wanted.with_suffix(".new")
    unfinished.parent.mkdir(exist_ok=True)
    unfinished.write_text(json.dumps({"id": identity, "steps": chosen.steps, "until": time.time() + chosen.wait}))
    unfinished.replace(wanted)  # the loop finds all of it
    try:
        answer = _waited(folder, identity, 0, chosen.wait)
        if answer is None:
            raise JShardError(
                f"no run in {folder} took a step within {chosen.wait:g} s",
                hint=f"start it, or capture another by: jshard trace {folder / CONFIGURATION}",
            )
        if "fault" in answer:
            clear(folder)
            raise JShardError.saying(f"the run in {folder} made no capture: {answer['fault']}")
        late = time.monotonic() + LATER
        missing = [
            rank
            for rank in range(1, answer["processes"])
            if _waited(folder, identity, rank, max(0, late - time.monotonic())) is None
        ]
    finally:
        wanted.unlink(missing_ok=True)
    if missing:
        ranks = ", ".join(map(str, missing))
        print(f"process {ranks} wrote no capture here: it may write to a disk of another host", file=sys.stderr)
    from jshard.inspect.timeline.capture import captures

    _say(captures(folder)[0], folder)
    return 0


def _waited(folder: Path, identity: str, rank: int, seconds: float) -> dict | None:
    """Wait for a process's answer to the request, and return it; None when time is up."""
    file, end = folder / TRACE / f"rank{rank}" / CAPTURED, time.monotonic() + seconds
    while True:
        if file.exists() and (answer := json.loads(file.read_text())).get("asked") == identity:
            return answer
        if time.monotonic() > end:
            return None
        time.sleep(0.1)


def clear(folder: Path) -> None:
    """Remove an earlier capture of any number of processes: only folders written by jshard."""
    for answer in (folder / TRACE).glob(f"rank*/{CAPTURED}"):
        shutil.rmtree(answer.parent)
