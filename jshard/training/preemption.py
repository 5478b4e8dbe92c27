"""The response to SIGTERM from a scheduler: all processes learn of the signal and stop after the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 128 + signal.SIGTERM  # 143, the code that a shell shows for a process ended by SIGTERM


class Preempted(SystemExit):
    """The exit after a SIGTERM, once a checkpoint is saved; Python ends with code 143."""

    def __init__(self, step: int):
        super().__init__(int(EXIT_CODE))
        self.step = step


class Notice:
    """A listener for SIGTERM; call `reached(step)` after every step to learn if training must stop.

    One process stops after the step during which the signal came. With several processes, any may get the signal: JAX's
    coordination service passes it on, and all stop after the first step that none has passed. Without the service,
    SIGTERM ends the process at once.
    """

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
