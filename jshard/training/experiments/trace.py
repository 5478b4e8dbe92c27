"""Capture what the devices do while a program runs, by JAX's own profiler: in a loop of one's own, in the first steps of an
experiment, or in a run that goes on, which is asked by a file in its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jshard.errors import JShardError, refused
from jshard.inspect.timeline.capture import Capture, describe, refuse
from jshard.runs.names import CAPTURED, TRACE, WANTED
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.loop import NotANumber, run

LOOK = 0.25  # seconds between two looks, which cost some microseconds here and a millisecond on a far disk


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


def trace_steps(experiment: Experiment, folder: Path, steps: int, *, title: str) -> Capture:
    """Train a step, which compiles, and capture the next `steps` steps. Nothing is evaluated, recorded or saved."""
    numbered = Numbered(experiment.step())
    taken = run(numbered, experiment.data, experiment.placement, steps=1 + steps, ahead=experiment.ahead)
    try:
        with contextlib.closing(taken):
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


# -- a run that goes on --


@dataclasses.dataclass(frozen=True)
class Wish:
    """What `jshard trace RUN` asks for."""

    id: str
    steps: int
    until: float  # when nobody waits any more

    @classmethod
    def read(cls, file: Path) -> Wish | None:
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):  # none is there, or none of ours: no reason to end a run
            return None


class TraceRequest(Numbered):
    """The step of a run, which captures itself when `jshard trace RUN` asks for it. A `with` around the loop ends a capture
    that the run's end cuts short. Each process looks for itself, so that they may begin a step apart. What goes wrong with
    a capture is told to who asked, and the run goes on."""

    def __init__(self, step: Callable[..., jax.Array], output: str | None, done: int = 0):
        super().__init__(step, done)
        self.folder = None if output is None else Path(output) / TRACE
        self.next_look = 0.0
        self.wish: Wish | None = None  # the last one
        self.until = 0  # the last step to capture
        self.begun: contextlib.AbstractContextManager[Tracing] | None = None
        self.has_run = False

    def __call__(self, *batch: object) -> jax.Array:
        if self.begun is not None:
            if self.done == self.until:
                self._end(None, None, None)
        elif self.has_run and self.folder is not None and time.monotonic() > self.next_look:
            self._look(self.folder)
        self.has_run = True  # the first step is compiled, which is not what one asks for
        return super().__call__(*batch)

    def _look(self, folder: Path) -> None:
        self.next_look = time.monotonic() + LOOK
        wish = Wish.read(folder / WANTED)
        if wish is None or (self.wish is not None and wish.id == self.wish.id) or time.time() > wish.until:
            return
        self.wish, self.until = wish, self.done + wish.steps
        begun = trace(folder, title=str(folder.parent), asked=wish.id)
        try:
            begun.__enter__()
        except JShardError as error:
            refuse(folder, wish.id, str(error))
        else:
            self.begun = begun

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, back: TracebackType | None) -> None:
        begun, self.begun = self.begun, None
        if begun is None:
            return
        try:
            begun.__exit__(kind, error, back)
        except JShardError as fault:
            assert self.folder is not None and self.wish is not None
            refuse(self.folder, self.wish.id, str(fault))

    def __enter__(self) -> TraceRequest:
        return self

    __exit__ = _end
