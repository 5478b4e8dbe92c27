"""The log of a run: a file of JSON lines for each process, written by a thread.

runs/digits/log/rank-0003.jsonl     process facts, collectives of the program, each step, each transfer and save

Each line is an event of `jshard.runs.events` with its time. `jshard.training.log_reader` merges the files of all processes.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import hashlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import jax

from jshard.errors import JShardError, reason, refused
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.plan import explain
from jshard.runs import events
from jshard.signals import active_config
from jshard.training.log_reader import path_of
from jshard.training.preemption import Preempted
from jshard.training.telemetry.metrics import written
from jshard.version import versions

SCHEMA = "jshard.log/1"
BEAT = 0.2  # seconds between two writes of the thread
WAITS = 5.0  # seconds after which an unfinished step gets a line "waits"
encoded = json.JSONEncoder(default=str).encode
PAGE = os.sysconf("SC_PAGE_SIZE")


def log(folder: str | os.PathLike[str], *, goes_on: bool = False) -> Log:
    """Open the log of your own training loop, in this process's file in `folder`; `goes_on` appends to the file.

        with jshard.log("runs/mine/log") as log:
            log.program(step, model, optimizer, x, y)     # every collective of a step, by its YAML line
            for number in range(1, 101):
                log.step(number, loss=step(model, optimizer, x, y), examples=64)

    A call of `step` costs about a microsecond and does not wait for the loss. Transfers and loaded configurations are
    logged too.
    """
    log = Log(Path(folder), label=f"jshard.log writes to {os.fspath(folder)}, which", goes_on=goes_on)
    events.tell("begin", **facts())
    return log


class Log:
    """A listener that writes every event until it is closed. A full disk ends the log, not the program."""

    def __init__(self, folder: Path, *, label: str, goes_on: bool):
        self.path = path_of(folder, jax.process_index())
        self.file = _opened(folder, self.path, label, goes_on=goes_on)
        self.heard: collections.deque[dict[str, Any]] = collections.deque()
        self.pending: collections.deque[dict[str, Any]] = collections.deque()  # steps without a computed loss
        self.at, self.since, self.waits_for = 0, time.perf_counter(), 0
        self.awake, self.over = threading.Event(), False
        self.thread = threading.Thread(target=self._write, daemon=True, name="jshard log")
        self.thread.start()
        self.deafen = events.listen(self.hear)
        atexit.register(self.close)

    def hear(self, what: str, fields: Mapping[str, Any]) -> None:
        """Queue an event; this runs on the program's thread, so it does nothing else."""
        if what == "step":
            self.at = fields["step"]
        step = fields.get("step", self.at)
        self.heard.append({"what": what, "wall": time.time(), "mono": time.monotonic(), **fields, "step": step})
        if what != "step":
            self.awake.set()

    # -- for the user's own loop --

    def program(self, f: Callable[..., Any], *args: Any, name: str = "step", **kwargs: Any) -> Ledger:
        """Log every collective of `f(*args)`, as listed by `jshard.explain`, without running `f`."""
        ledger = explain(f, *args, **kwargs)
        tell_program(name, ledger)
        return ledger

    def step(self, number: int, *, loss: object = None, examples: int | None = None, **more: object) -> None:
        """Log a dispatched step; its loss need not be computed yet."""
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        rate = {} if examples is None else {"examples_per_second": examples / seconds if seconds else 0.0}
        events.tell("step", step=number, seconds=seconds, loss=loss, **rate, **more)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        events.tell("ended", step=self.at, how=how(error))
        self.close()

    def close(self) -> None:
        """Write all queued events and stop listening."""
        atexit.unregister(self.close)
        if self.over:
            return
        self.deafen()
        self.over = True
        self.awake.set()
        self.thread.join()
        self._drain(all_of_it=True)
        self.file.close()

    # -- the thread --

    def _write(self) -> None:
        while not self.over:
            self.awake.wait(BEAT)
            self.awake.clear()
            self._drain()

    def _drain(self, *, all_of_it: bool = False) -> None:
        """Write the queued events. A step is written once its loss is computed, so this never waits for a device."""
        lines: list[dict[str, Any]] = []
        while self.heard:
            line = self.heard.popleft()
            (self.pending if line["what"] == "step" else lines).append(line)
        held: dict[str, int] | None = None
        while self.pending and (all_of_it or _is_there(self.pending[0].get("loss"))):
            line = self.pending.popleft()
            held = memory() if held is None else held
            lines.append({**line, **_loss(line.get("loss")), **held})
        if self.pending and (step := self.pending[0]["step"]) != self.waits_for:
            wall, mono = time.time(), time.monotonic()
            if (seconds := mono - self.pending[0]["mono"]) > WAITS:
                self.waits_for = step
                lines.append({"what": "waits", "wall": wall, "mono": mono, "step": step, "seconds": seconds})
        self._put(lines)

    def _put(self, lines: list[dict[str, Any]]) -> None:
        if not lines or self.file.closed:
            return
        try:
            self.file.write("".join(f"{encoded(_plain(line))}\n" for line in lines))
            self.file.flush()
        except OSError as error:
            self.deafen()
            with contextlib.suppress(OSError):  # closing tries to write the buffer again
                self.file.close()
            fault = f"the log {self.path} ends here, as it can't be written to: {reason(error)}"
            print(fault, file=sys.stderr, flush=True)


def facts(**more: object) -> dict[str, Any]:
    """Collect the first line of a log: host, process, versions, devices, mesh, and configuration with its digest."""
    present = active_config.configuration()
    devices = jax.devices()
    return {
        "schema": SCHEMA,
        "rank": jax.process_index(),
        "of": jax.process_count(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": versions(),
        "devices": len(devices),
        "device": devices[0].device_kind,
        "mesh": dict(active_config.mesh().shape) if present is not None and present.mesh is not None else {},
        "source": "no configuration" if present is None else present.source,
        "digest": "" if present is None else hashlib.sha256(written(present).encode()).hexdigest()[:16],
        **more,
    }


def tell_program(name: str, ledger: Ledger) -> None:
    """Report an event for the program, and an event for each line of its ledger."""
    if events.listeners:
        events.tell("program", program=name, collectives=ledger.count, wire=ledger.total)
        for line in ledger:
            document = line.document()
            events.tell("collective", program=name, **{key: document[key] for key in document if key != "schedule"})


def how(error: BaseException | None) -> str:
    """Return in a line how a run ended: finished, SIGTERM, Ctrl-C or an error."""
    if error is None:
        return "finished"
    if isinstance(error, (KeyboardInterrupt, Preempted)):
        return "SIGTERM" if isinstance(error, Preempted) else "Ctrl-C"
    lines = str(error).splitlines()
    return lines[0] if isinstance(error, JShardError) else ": ".join([type(error).__name__, *lines[:1]])


def _opened(folder: Path, path: Path, label: str, *, goes_on: bool) -> TextIO:
    """Open the file to append to, after ending a cut-off last line and removing files of an earlier, larger run."""
    with refused(f"{label} can't be written to", hint="name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        if not goes_on and jax.process_index() == 0:
            kept = {path_of(folder, rank) for rank in range(jax.process_count())}
            for stale in {*folder.glob("rank-*.jsonl")} - kept:
                stale.unlink()
        file = path.open("a" if goes_on else "w", encoding="utf-8", buffering=1)
        if goes_on and path.stat().st_size:
            with path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read() != b"\n":
                    file.write("\n")
    return file


def _is_there(loss: object) -> bool:
    is_ready = getattr(loss, "is_ready", None)
    return is_ready is None or is_ready()


def _loss(loss: Any) -> dict[str, Any]:
    if loss is None:
        return {}
    if not _is_there(loss):
        return {"loss": None, "done": False}
    try:
        return {"loss": float(loss)}
    except Exception as error:  # the program raises it too, when it reads this loss
        return {"loss": None, "fault": how(error)}


def memory() -> dict[str, int]:
    """Return the bytes of host memory of this process, and the bytes in use on its fullest device, if known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            held = {"rss": int(file.read().split()[1]) * PAGE}
    except OSError:  # not Linux
        held = {}
    used = [stats["bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    return {**held, "device_memory": max(used)} if used else held


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinities become words, and floats have at most six decimals."""
    if type(value) is float:
        return round(value, 6) if math.isfinite(value) else str(value)
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if type(value) in (list, tuple) else value
