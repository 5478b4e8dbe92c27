"""A process as seen by its launcher: started as a process group, read by lines, ended with its children."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jshard.launch.heartbeat import MEMORY, PLACE, STATUS

OUTLIVE = Path(__file__).with_name("parent_death.py")
# Gloo's messages on each group of devices, not printed. They come in pieces, mixed with other threads'.
PIECES = rb"(\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : )"
CHATTER = re.compile(rb"(\d*%b)+\d*" % PIECES)


def without_chatter(lines: Iterable[bytes]) -> Iterator[bytes]:
    torn = False
    for line in lines:
        line = line.rstrip(b"\r\n")
        if CHATTER.fullmatch(line) or (torn and re.fullmatch(rb"\d*", line)):
            torn = len(re.findall(rb"\d+", line)) != 3 * line.count(b"Rank ")
            continue
        torn = False
        yield line


class Worker:
    """A process with events: ("line", worker, stream, text), ("status", worker, facts), ("end", worker, status)."""

    def __init__(self, rank: int, command: Sequence[str], variables: Mapping[str, str], events: queue.SimpleQueue[Any]):
        self.rank, self.events = rank, events
        self.facts: dict[str, Any] = {}
        self.status: int | None = None  # set at its end
        self.memory = tempfile.TemporaryFile()
        self.memory.truncate(PLACE.size)
        reading, writing = os.pipe()
        memory = self.memory.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(OUTLIVE), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables, STATUS: str(writing), MEMORY: str(memory), "PYTHONUNBUFFERED": "1"},
            pass_fds=(writing, memory),
            process_group=0,
        )
        os.close(writing)
        assert self.process.stdout is not None and self.process.stderr is not None
        self._threads = [
            self._start(self._lines, self.process.stdout, "stdout"),
            self._start(self._lines, self.process.stderr, "stderr"),
            self._start(self._statuses, os.fdopen(reading, "rb")),
        ]
        self._start(self._end)

    def _start(self, reads: Any, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=reads, args=args, daemon=True)
        thread.start()
        return thread

    def _lines(self, stream: IO[bytes], name: str) -> None:
        for line in without_chatter(stream):
            self.events.put(("line", self, name, line.rpartition(b"\r")[2].decode(errors="replace")))

    def _statuses(self, stream: IO[bytes]) -> None:
        for line in stream:
            with contextlib.suppress(ValueError):  # a killed process may leave half a line
                self.events.put(("status", self, json.loads(line)))

    def _end(self) -> None:
        self.process.wait()
        self.events.put(("end", self, self.process.returncode))
        deadline = time.monotonic() + 1  # a grandchild may hold the pipes; its output has no reader then
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        self.events.put(("quiet", self))

    def send(self, number: int) -> None:
        """Send a signal to the process and all its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def where(self) -> str:
        """Return its last place, up to the last moment, in words."""
        step, phase = self._place()
        if not step:
            return "before its first step"
        return f"in step {step}" if phase in ("step", "ended") else f"in step {step} ({phase})"

    def waited_in(self) -> str:
        """Return the collective in which others waited for it after its first step began, or ""."""
        step, _ = self._place()
        return str(self.facts.get("stands_in") or "") if step else ""

    def _place(self) -> tuple[int, str]:
        """Return the last step and phase it wrote; step 0 before its first."""
        step, phase = PLACE.unpack(os.pread(self.memory.fileno(), PLACE.size, 0))
        return step, phase.rstrip(b"\0").decode()

    def how_ended(self) -> str:
        """Return `was ended by SIGKILL` or `ended with status 3`."""
        assert self.status is not None
        if self.status < 0:
            return f"was ended by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"
