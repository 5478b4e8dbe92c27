"""Captures by JAX's profiler: of the user's loop, an experiment's first steps, or, at request, a running experiment."""

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

LOOK = 0.25  # seconds between two looks for the file; a look takes microseconds, on a network disk a millisecond


class Tracing:
    """A capture in progress; after the `with`, `capture` is the result."""

    capture: Capture

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Mark a step of a loop: `with tracing.step(n): loss = train_step(batch)`."""
        return jax.profiler.StepTraceAnnotation("step", step_num=number)


@contextlib.contextmanager
def trace(folder: str | os.PathLike[str], *, title: str | None = None, **more: object) -> Iterator[Tracing]:
    """Capture the work of all devices of this process inside the `with`, for `jshard timeline`.

        with jshard.trace("runs/mine") as tracing:
            for number, batch in enumerate(batches):
                with tracing.step(number):
                    loss = train_step(batch)

    It waits for earlier computations before the capture, and for those started inside at its end. Each process writes to
    a folder of its own in `folder`.
    """
    own = Path(folder) / f"rank{jax.process_index()}"
    _make_room(own)
    tracing = Tracing()
    settle()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls are not on the devices, and tracing them slows the loop
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
    """Wait for all running computations. Arrays donated meanwhile by another thread are skipped."""
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
    """Train a step, to compile it, and capture the next `steps` steps without evaluating, recording or saving."""
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
    """A training step with its number marked in a capture."""

    def __init__(self, step: Callable[..., jax.Array], done: int = 0):
        self.inner, self.done = step, done

    def __call__(self, *batch: object) -> jax.Array:
        self.done += 1
        with jax.profiler.StepTraceAnnotation("step", step_num=self.done):
            return self.inner(*batch)


# -- captures of a running experiment --


@dataclasses.dataclass(frozen=True)
class Wish:
    """The request of `jshard trace RUN`."""

    id: str
    steps: int
    until: float  # when the command stops waiting

    @classmethod
    def read(cls, file: Path) -> Wish | None:
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):  # no file, or not a request: the run continues
            return None


class TraceRequest(Numbered):
    """A training step that is captured at the request of `jshard trace RUN`.

    A `with` around the loop ends a capture at the end of the run. Each process looks for requests by itself, so captures of
    different processes may begin a step apart. A failed capture is reported to the command, and the run continues.
    """

    def __init__(self, step: Callable[..., jax.Array], output: str | None, done: int = 0):
        super().__init__(step, done)
        self.folder = None if output is None else Path(output) / TRACE
        self.next_look = 0.0
        self.wish: Wish | None = None  # the last request
        self.until = 0  # the last step to capture
        self.begun: contextlib.AbstractContextManager[Tracing] | None = None
        self.has_run = False

    def __call__(self, *batch: object) -> jax.Array:
        if self.begun is not None:
            if self.done == self.until:
                self._end(None, None, None)
        elif self.has_run and self.folder is not None and time.monotonic() > self.next_look:
            self._look(self.folder)
        self.has_run = True  # the first step compiles, so it is never captured
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
