"""SIGTERM, by which a scheduler says that a process must go: all processes learn of it and stop behind the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 128 + signal.SIGTERM  # what a shell shows of a process that SIGTERM has ended: 143


class Preempted(SystemExit):
    """Training has stopped because of SIGTERM, after saving; Python ends with the code 143."""

    def __init__(self, step: int):
        super().__init__(int(EXIT_CODE))
        self.step = step


class Notice:
    """`reached(step)` after every step: whether it is the one to stop at. In one process that is the step during which
    SIGTERM came. Of several each may get it: the coordination service tells the others, and all agree on the first step
    that none has passed. Where JAX was started without that service SIGTERM ends the process, as it would any other."""

    def __init__(self, *, saves: bool) -> None:
        self.came = False
        self.before: Any = None
        service: bool = jax.config.jax_enable_preemption_service  # pyright: ignore[reportAttributeAccessIssue]
        self.agrees = jax.process_count() > 1 and service
        # One process that saves nothing has nothing to do between SIGTERM and its end.
        self.listens = saves and jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Notice:
        if self.listens:
            self.before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *reason: object) -> None:
        if self.listens:
            signal.signal(signal.SIGTERM, self.before)

    def reached(self, step: int) -> bool:
        return multihost_utils.reached_preemption_sync_point(step) if self.agrees else self.came

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
