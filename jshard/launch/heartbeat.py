"""What a process is doing, for whoever wants to know: its launcher, by a pipe, and the other processes' watchdogs."""

from __future__ import annotations

import collections
import json
import mmap
import os
import struct
import time
from typing import Any

STATUS = "JSHARD_LAUNCH_STATUS"  # the launcher's pipe: its file descriptor, in this process's environment
ALL = "JSHARD_LAUNCH_ALL"  # set where one launcher has started all processes, and so sees the first that fails
BAR = "JSHARD_LAUNCH_BAR"  # set where the launcher draws a bar of what the first process says
MEMORY = "JSHARD_LAUNCH_MEMORY"  # its memory, which outlives this process and so tells where it was killed
PLACE = struct.Struct("<q24s")  # step and phase


class Pulse:
    """`pulse.at("step", 12)` costs a few attribute writes; others read it from a thread, now and then."""

    def __init__(self) -> None:
        self.phase, self.step, self.of, self.says = "starting", 0, 0, ""
        self.since = time.monotonic()
        self.results: collections.deque[tuple[int, Any]] = collections.deque(maxlen=64)
        self.done = 0
        self.stands_in = ""  # the collective that others wait in for this process, where it is known
        pipe, memory = os.environ.get(STATUS), os.environ.get(MEMORY)
        self.pipe = int(pipe) if pipe else None
        self.memory = mmap.mmap(int(memory), PLACE.size) if memory else None

    def at(self, phase: str, step: int | None = None) -> None:
        """Set the phase that this process is in from now on."""
        self.phase, self.since = phase, time.monotonic()
        if step is not None:
            self.step = step
        if self.memory is not None:
            PLACE.pack_into(self.memory, 0, self.step, phase.encode())

    def stands(self, place: str) -> None:
        """Set the collective that the others wait for this process in. Told at once: it may be killed before a beat."""
        self.stands_in = place
        self.tell()

    def waits(self, step: int, result: object) -> None:
        """Note a `result` that is there once this step is done."""
        self.results.append((step, result))

    def look(self) -> int:
        """Return the last step that is done, by its result. For the watching thread."""
        while self.results:
            step, result = self.results[0]
            if not result.is_ready():
                break
            self.done, self.since = step, time.monotonic()
            self.results.popleft()
        return self.done

    @property
    def is_seen_with_all(self) -> bool:
        """Whether one launcher reads what all processes say: none need repeat what another says."""
        return self.pipe is not None and bool(os.environ.get(ALL))

    @property
    def facts(self) -> dict[str, Any]:
        names = ("step", "done", "of", "says", "stands_in")
        return {"phase": self.doing, **{name: getattr(self, name) for name in names}}

    @property
    def doing(self) -> str:
        """The phase; behind a step that is done, `after`: it reads data, evaluates or saves."""
        return "after" if self.phase == "step" and self.done == self.step else self.phase

    def tell(self, **more: object) -> None:
        """Send a line to the launcher, where there is one."""
        if self.pipe is None:
            return
        try:
            os.write(self.pipe, json.dumps({**self.facts, **more}).encode() + b"\n")
        except OSError:  # the launcher is gone, and with it whoever would read
            self.pipe = None
