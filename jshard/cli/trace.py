"""`jshard trace`: capture what the devices do in a few steps, of an experiment or of a run that goes on."""

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
LATER = 30.0  # and for the other processes of it, behind the first


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard trace [-h] PATH|RUN [key=value ...] [--trust] [--steps 3] [-o RUN] [--wait 60]"
    parser.set_defaults(needs=("a configuration or the folder of a run", "configs/digits.yaml"))
    parser.add_argument("--steps", type=int, default=STEPS, metavar="3", help=f"so many steps; {STEPS} when left out")
    parser.add_argument(
        "-o",
        "--output",
        metavar="RUN",
        help="the run's folder to capture into; the experiment's own output when left out",
    )
    parser.add_argument(
        "--wait", type=float, default=WAIT, metavar="60", help="of a run that goes on: seconds to wait for a step of it"
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


# -- a run that goes on --


def _of_run(folder: Path, chosen: argparse.Namespace) -> int:
    """Ask by a file that the run's loop looks for, and wait for what it captures."""
    for option, given in (("-o", chosen.output), ("key=value", chosen.overrides)):
        if given:
            raise JShardError(
                f"{option} is for a run that jshard trace starts, and {folder} is the folder of one that goes on",
                hint=f"leave it away, or type: jshard trace {folder / CONFIGURATION}",
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
        print(f"nothing was seen of process {ranks}, which may write to a disk of its own", file=sys.stderr)
    from jshard.inspect.timeline.capture import captures

    _say(captures(folder)[0], folder)
    return 0


def _waited(folder: Path, identity: str, rank: int, seconds: float) -> dict | None:
    """Wait for what a process tells of the capture that was asked for; None when time is up."""
    file, end = folder / TRACE / f"rank{rank}" / CAPTURED, time.monotonic() + seconds
    while True:
        if file.exists() and (answer := json.loads(file.read_text())).get("asked") == identity:
            return answer
        if time.monotonic() > end:
            return None
        time.sleep(0.1)


def clear(folder: Path) -> None:
    """Remove an earlier capture, of as many processes as it was: only folders that jshard wrote."""
    for answer in (folder / TRACE).glob(f"rank*/{CAPTURED}"):
        shutil.rmtree(answer.parent)
