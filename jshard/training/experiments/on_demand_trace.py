"""A run that goes on is asked for a capture by a file in its folder, at which its loop looks now and then."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import jax

from jshard.errors import JShardError
from jshard.inspect.timeline.capture import refuse
from jshard.runs.names import TRACE, WANTED
from jshard.training.experiments.trace import Numbered, Tracing, trace

LOOK = 0.25  # seconds between two looks, which cost some microseconds here and a millisecond on a far disk


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

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        begun, self.begun = self.begun, None
        if begun is None:
            return
        try:
            begun.__exit__(kind, error, trace)
        except JShardError as fault:
            if fault is error:
                raise
            assert self.folder is not None and self.wish is not None
            refuse(self.folder, self.wish.id, str(fault))

    def __enter__(self) -> TraceRequest:
        return self

    __exit__ = _end
