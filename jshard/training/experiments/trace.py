"""Capture what the devices do while a program runs, by JAX's own profiler."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jshard.errors import JShardError, refused
from jshard.inspect.timeline.capture import Capture, describe
from jshard.runs.names import CAPTURED
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.loop import NotANumber, run


class Tracing:
    """What is being captured; behind the `with`, `capture` is what was."""

    capture: Capture

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Mark the start of one step of a loop: `with tracing.step(n): loss = train_step(batch)`."""
        return jax.profiler.StepTraceAnnotation("step", step_num=number)


@contextlib.contextmanager
def trace(folder: str | os.PathLike[str], *, title: str | None = None, **more: object) -> Iterator[Tracing]:
    """Capture what all devices of this process do inside, for `jshard timeline`; what computes already is waited for
    before, and what was started inside behind it. Of several processes each has a folder of its own in `folder`.

    with jshard.trace("runs/mine") as tracing:
        for number, batch in enumerate(batches):
            with tracing.step(number):
                loss = train_step(batch)
    """
    own = Path(folder) / f"rank{jax.process_index()}"
    _make_room(own)
    tracing = Tracing()
    settle()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the calls of Python's functions are no device's, and slow the loop down
    try:
        jax.profiler.start_trace(own, profiler_options=options)
    except RuntimeError as error:
        raise JShardError(f"no profile can be captured: {error}", hint="end the other one before") from None
    try:
        yield tracing
        settle()
    finally:
        jax.profiler.stop_trace()
    tracing.capture = describe(own, title or str(folder), **more)


def settle() -> None:
    """Wait for all that computes. A loop in another thread may give an array away meanwhile: what takes it is there too."""
    for array in jax.live_arrays():
        try:
            array.block_until_ready()
        except RuntimeError as error:
            if "deleted or donated" not in str(error) and not array.is_deleted():
                raise


def _make_room(own: Path) -> None:
    """Remove an earlier capture."""
    with refused(f"no capture can be written to {own}", hint="name another folder by -o runs/mine"):
        (own / CAPTURED).unlink(missing_ok=True)
        if (own / "plugins").is_dir():
            shutil.rmtree(own / "plugins")
        own.mkdir(parents=True, exist_ok=True)


def trace_steps(experiment: Experiment, folder: Path, steps: int, *, first: int, title: str) -> Capture:
    """Train from step 1, and capture `steps` steps from step `first` on. Nothing is evaluated, recorded or saved."""
    step = experiment.step()
    numbered = Numbered(step)
    taken = run(numbered, experiment.data, experiment.placement, steps=first - 1 + steps, ahead=experiment.ahead)
    try:
        with contextlib.closing(taken):
            for _ in range(first - 1):
                next(taken)
            with trace(folder, title=title) as tracing:
                for _ in taken:
                    pass
    except NotANumber as fault:
        raise JShardError(f"{fault}, and nothing was captured", hint="capture fewer steps by --steps 1") from None
    return tracing.capture


class Numbered:
    """A step that marks in a capture which one it is."""

    def __init__(self, step: Callable[..., jax.Array], done: int = 0):
        self.inner, self.done = step, done

    def __call__(self, *batch: object) -> jax.Array:
        self.done += 1
        with jax.profiler.StepTraceAnnotation("step", step_num=self.done):
            return self.inner(*batch)
