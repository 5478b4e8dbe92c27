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

from jshard.cli.target import Target
from jshard.cli.terminal import show
from jshard.errors import JShardError
from jshard.run_names import CAPTURED, CONFIGURATION, TRACE, WANTED

if TYPE_CHECKING:
    from jshard.inspect.timeline.capture import Capture
    from jshard.train.experiment import Experiment

STEPS = 3
WAIT = 60.0  # seconds for a run to take a step
LATER = 30.0  # and for the other processes of it, behind the first


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard trace [-h] PATH|RUN [key=value ...] [--steps 3] [--with-first] [-o RUN] [--wait 60]"
    parser.set_defaults(needs=("a configuration or the folder of a run", "configs/digits.yaml"))
    parser.add_argument("--steps", type=int, default=STEPS, metavar="3", help=f"so many steps; {STEPS} when left out")
    parser.add_argument("--with-first", action="store_true", help="the first step too, which is compiled meanwhile")
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
    from jshard.launch.cluster_env import found

    asked = Target(chosen.path, tuple(chosen.overrides))
    if found() is not None:
        from jshard.cli.rank_main import joined_experiment

        return _of_experiment(joined_experiment(asked), chosen)
    from jshard.cli.experiment import opened
    from jshard.train.experiment import Experiment

    experiment = opened(asked)
    assert isinstance(experiment, Experiment)
    return _of_experiment(experiment, chosen)


def _of_experiment(experiment: Experiment, chosen: argparse.Namespace) -> int:
    import jax

    from jshard.train.trace import trace_steps

    whole = Path(chosen.output or experiment.output or f"runs/{Path(chosen.path).stem}")
    leads = jax.process_index() == 0
    if leads:
        clear(whole)
    _all_here("cleared")
    first = 1 if chosen.with_first else 2
    capture = trace_steps(experiment, whole / TRACE, chosen.steps, first=first, title=chosen.path)
    _all_here("captured")
    if leads:
        _say(capture, whole)
    return 0


def _all_here(name: str) -> None:
    """Waits for the other processes."""
    import jax

    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices(f"jshard trace {name}")


def _say(capture: Capture, whole: Path) -> None:
    steps, count = capture.metadata["steps"], len(capture.read.events)
    devices = len({event.device for event in capture.read.events})
    others = f" of process 0 ({capture.processes - 1} more captured their own)" if capture.processes > 1 else ""
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}" if steps else "no whole step"
    show(f"captured {when}: {count:,} operations on {devices} device{'s' * (devices > 1)}{others}, in {whole / TRACE}")
    show(f"to see them, type: jshard timeline {whole} -o timeline.html")


# -- a run that goes on --


def _of_run(whole: Path, chosen: argparse.Namespace) -> int:
    """Asks by a file that the run's loop looks for, and waits for what it captures."""
    for option, given in (("--with-first", chosen.with_first), ("-o", chosen.output), ("key=value", chosen.overrides)):
        if given:
            raise JShardError(
                f"{option} is for a run that jshard trace starts, and {whole} is the folder of one that goes on",
                hint=f"leave it away, or type: jshard trace {_configuration(whole)}",
            )
    identity = secrets.token_hex(8)
    clear(whole)
    wanted = whole / TRACE / WANTED
    unfinished = wanted.with_suffix(".new")
    unfinished.parent.mkdir(exist_ok=True)
    unfinished.write_text(json.dumps({"id": identity, "steps": chosen.steps, "until": time.time() + chosen.wait}))
    unfinished.replace(wanted)  # the loop finds it whole
    try:
        told = _waited(whole, identity, 0, chosen.wait)
        if told is None:
            raise JShardError(
                f"no run in {whole} took a step within {chosen.wait:g} s",
                hint=f"start it, or capture another by: jshard trace {_configuration(whole)}",
            )
        if "fault" in told:
            clear(whole)
            fault, _, hint = told["fault"].rpartition("; ")
            raise JShardError(f"the run in {whole} made no capture: {fault}", hint=hint)
        late = time.monotonic() + LATER
        missing = [
            rank
            for rank in range(1, told["processes"])
            if _waited(whole, identity, rank, max(0, late - time.monotonic())) is None
        ]
    finally:
        wanted.unlink(missing_ok=True)
    if missing:
        ranks = ", ".join(map(str, missing))
        print(f"nothing was seen of process {ranks}, which may write to a disk of its own", file=sys.stderr)
    from jshard.inspect.timeline.capture import captures

    _say(captures(whole)[0], whole)
    return 0


def _configuration(whole: Path) -> Path:
    return whole / CONFIGURATION


def _waited(whole: Path, identity: str, rank: int, seconds: float) -> dict | None:
    """What a process told of the capture that was asked for; None when time is up."""
    file, end = whole / TRACE / f"rank{rank}" / CAPTURED, time.monotonic() + seconds
    while True:
        if file.exists() and (told := json.loads(file.read_text())).get("asked") == identity:
            return told
        if time.monotonic() > end:
            return None
        time.sleep(0.1)


def clear(whole: Path) -> None:
    """Removes an earlier capture, of as many processes as it was: only folders that jshard wrote."""
    for told in (whole / TRACE).glob(f"rank*/{CAPTURED}"):
        shutil.rmtree(told.parent)
