"""`jshard resume`: a run continued from a checkpoint, with its configuration or another."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jshard.cli.target import Target
from jshard.cli.terminal import show
from jshard.errors import JShardError
from jshard.launch.cluster_env import found as membership
from jshard.runs.names import CHECKPOINTS, CONFIGURATION, MANIFEST, restarts
from jshard.signals.config import load_configuration
from jshard.training.settings import Settings

if TYPE_CHECKING:
    from jshard.training.checkpoints.checkpoint import Checkpoint
    from jshard.training.experiments.experiment import Experiment


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard resume [-h] RUN [key=value ...] [--from latest|previous|STEP] [--config FILE] [--trust]"
    parser.add_argument(
        "--from", dest="which", default="latest", metavar="STEP", help="latest, previous or the number of a step"
    )
    parser.add_argument("--config", metavar="FILE", help="continue with this configuration instead of the run's own")


def run(chosen: argparse.Namespace) -> int:
    run = Path(chosen.path)
    folder, own, which = found(run, chosen.which)
    path, overrides = str(own) if chosen.config is None else chosen.config, chosen.overrides
    says_output = "output" in load_configuration(path, overrides).train
    home = run.parent if (run / MANIFEST).is_file() else run  # nothing is written into a checkpoint
    if says_output if chosen.config is None and own == home / CONFIGURATION else not says_output:
        overrides = [f"output={home}", *overrides]  # the run may have moved, and another file may have no output

    def resume() -> Checkpoint:
        from jshard.training.checkpoints.checkpoint import Checkpoint

        return Checkpoint.find(folder, which, f"{run}{' --trust' * chosen.trust}")

    return trained(Target.named(path, overrides, chosen), resume)


def experiment_of(target: Target) -> Experiment:
    """Build the experiment, alone or as a process of several; process 0 prints its collectives."""
    if membership() is None:
        from jshard.cli.experiment import opened

        experiment = opened(target)
    else:
        import jax

        from jshard.cli.rank_main import built_alike, join

        join(target.configuration(), {}, preemption=True)
        experiment = built_alike(target)
        if jax.process_index() == 0:
            print(experiment.asked)
    from jshard.training.experiments.experiment import Experiment

    assert isinstance(experiment, Experiment)
    return experiment


def trained(target: Target, resume: Callable[[], Checkpoint] | None) -> int:
    """Train an experiment from the beginning or from a checkpoint, alone or as a process of several."""
    experiment, bar = experiment_of(target), None
    import jax

    from jshard.training.experiments.train import last_saved, train
    from jshard.training.telemetry.progress import in_words

    if membership() is not None:
        from jshard.cli.rank_main import MemberBar

        bar = MemberBar(experiment.settings["steps"])
    elif resume is None:
        show(experiment.apart or str(experiment.asked))
    start = last_saved(experiment) if restarts() else None
    if start is None and resume is not None:
        start = resume()
    evaluated = train(experiment, bar, resume=start)
    for line in in_words(evaluated) if jax.process_index() == 0 else ():  # the reason for none was printed at the start
        print(line)
    return 0


def found(run: Path, which: str) -> tuple[Path, Path, str]:
    """Return folder, configuration and step of a checkpoint. `run` is a run, its checkpoints, or one of them."""
    if (run / MANIFEST).is_file():
        return run.parent, run / CONFIGURATION, run.name
    if (run / CONFIGURATION).is_file():
        folder = Settings(load_configuration(str(run / CONFIGURATION))).table("checkpoint").get("folder")
        return Path(folder or run / CHECKPOINTS), run / CONFIGURATION, which
    steps = [each for each in run.glob("*/") if each.name.isdecimal()]
    if not steps:
        why = "there is no such folder" if not run.is_dir() else f"it has no {CONFIGURATION} and no checkpoints"
        raise JShardError(f"{run} is not a run: {why}", hint="name the output folder of a run")
    return run, max(steps, key=lambda each: int(each.name)) / CONFIGURATION, which
