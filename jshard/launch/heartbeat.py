"""The state of a process, for its launcher by a pipe, and for the watchdogs of other processes."""

from __future__ import annotations

import collections
import json
import mmap
import os
import struct
import time
from typing import Any

STATUS = "JSHARD_LAUNCH_STATUS"  # the launcher's pipe: its file descriptor, in this process's environment
ALL = "JSHARD_LAUNCH_ALL"  # set if one launcher has started all processes, and so sees the first failure
BAR = "JSHARD_LAUNCH_BAR"  # set if the launcher draws a bar of the first process
MEMORY = "JSHARD_LAUNCH_MEMORY"  # the launcher's memory: it outlives a killed process, with its last step
PLACE = struct.Struct("<q24s")  # step and phase


class Pulse:
    """The state of this process. `pulse.at("step", 12)` costs a few writes of attributes."""

    def __init__(self) -> None:
        self.phase, self.step, self.of, self.says = "starting", 0, 0, ""
        self.since = time.monotonic()
        self.results: collections.deque[tuple[int, Any]] = collections.deque(maxlen=64)
        self.done = 0
        self.stands_in = ""  # the collective in which others wait for this process, if known
        pipe, memory = os.environ.get(STATUS), os.environ.get(MEMORY)
        self.pipe = int(pipe) if pipe else None
        self.memory = mmap.mmap(int(memory), PLACE.size) if memory else None

    def at(self, phase: str, step: int | None = None) -> None:
        """Set the phase of this process."""
        self.phase, self.since = phase, time.monotonic()
        if step is not None:
            self.step = step
        if self.memory is not None:
            PLACE.pack_into(self.memory, 0, self.step, phase.encode())

    def stands(self, place: str) -> None:
        """Set the collective in which others wait for this process, and send it before a possible kill."""
        self.stands_in = place
        self.tell()

    def waits(self, step: int, result: object) -> None:
        """Note a `result` that is ready at the end of this step."""
        self.results.append((step, result))

    def look(self) -> int:
        """Return the last finished step, by its result. For the watching thread."""
        while self.results:
            step, result = self.results[0]
            if not result.is_ready():
                break
            self.done, self.since = step, time.monotonic()
            self.results.popleft()
        return self.done

    @property
    def is_seen_with_all(self) -> bool:
        """True if one launcher reads the output of all processes, so that none repeats another's."""
        return self.pipe is not None and bool(os.environ.get(ALL))

    @property
    def facts(self) -> dict[str, Any]:
        names = ("step", "done", "of", "says", "stands_in")
        return {"phase": self.doing, **{name: getattr(self, name) for name in names}}

    @property
    def doing(self) -> str:
        """The phase, or `after` for a finished step: reading data, evaluating or saving."""
        return "after" if self.phase == "step" and self.done == self.step else self.phase

    def tell(self, **more: object) -> None:
        """Send a line to the launcher, if there is one."""
        if self.pipe is None:
            return
        try:
            os.write(self.pipe, json.dumps({**self.facts, **more}).encode() + b"\n")
        except OSError:  # the launcher has ended
            self.pipe = None
