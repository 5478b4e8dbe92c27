"""Starts the processes, prints what they say, and ends all of them when one fails or the user says so."""

from __future__ import annotations

import collections
import contextlib
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from jshard.hardware.host import free_port
from jshard.launch.cluster_env import Membership, cards_of
from jshard.launch.heartbeat import ALL, BAR
from jshard.launch.peer_loss import is_gone, rank_0_is_gone, waits_in
from jshard.launch.worker import Worker
from jshard.runs.names import RESTART

ALONE = 60.0  # seconds in which no process has joined, when it is said; at their end in any case
KILLED_ANYWAY = 3.0  # seconds after Ctrl-C
HELD = 0.3  # seconds that a line waits, as another process may turn out to have failed before it
ENDING = 10.0  # the same behind an error in JAX's own log, where rank 0 has another launcher: the process may be about to end
OTHERS = 30.0  # seconds in which the other launchers of a job of Slurm find out that a process is gone
LAST = 2.0  # seconds in which they end, after Slurm has sent all of them SIGTERM
LOG_OF_JAX = re.compile(r"[EF]\d{4} [\d:.]+ +\d+ \w+\.\w+:\d+\] ")
SAVED = 143  # the exit status of a process that was sent SIGTERM, and saved at a step that all agreed on
MISTAKE = 2  # the exit status of a JShardError: it would be made again, or the disk is full


class Supervisor:
    """`run()` returns the exit status: that of the first process that failed, or 0."""

    def __init__(
        self,
        command: Sequence[str],
        memberships: Callable[[], Sequence[Membership]],
        *,
        restarts: int = 0,
        grace: float = 30.0,
        bar: Any = None,
    ):
        self.command, self.memberships = list(command), memberships
        self.restarts, self.grace = restarts, grace
        self.bar = bar
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.asked: int | None = None  # the signal that the user sent
        self.kill_at = float("inf")
        self.abroad: Membership | None = None  # whose rank 0 has another launcher
        self.sees_all = True  # no process has another launcher
        self.lost = False  # the first that failed had lost a process of another launcher
        self.mute: set[Worker] = set()
        self.alone_at: float | None = None  # when it is told that no process has joined, unless one does
        self.held: collections.deque[tuple[float, Worker, str, str]] = collections.deque()

    def run(self) -> int:
        with self._signals():
            for attempt in range(self.restarts + 1):
                status, says = self._once(attempt)
                if says is not None:
                    self._say(says)
                if status == MISTAKE and attempt < self.restarts:
                    self._say("not started again: this fault would come again until someone mends it")
                if status in (0, MISTAKE) or self.asked is not None or attempt == self.restarts:
                    return status
                self._say(f"starting all again: restart {attempt + 1} of {self.restarts}")
        raise AssertionError("the last attempt returns")

    def _let_others_end(self) -> None:
        """Wait for the launchers of the other hosts. Slurm prints what all say as one: the first fault is the last word."""
        deadline = time.monotonic() + OTHERS
        while self.asked is None and time.monotonic() < deadline:
            time.sleep(HELD)
        time.sleep(LAST)

    def _once(self, attempt: int) -> tuple[int, str | None]:
        memberships = self.memberships()
        self.kill_at, self.lost = float("inf"), False
        self.alone_at = time.monotonic() + ALONE if memberships[0].processes > 1 else None
        self.events = queue.SimpleQueue()
        variables: dict[str, str] = {} if attempt == 0 else {RESTART: str(attempt)}
        self.sees_all = len(memberships) == memberships[0].processes
        variables |= {ALL: "1" if self.sees_all else "", BAR: "" if self.bar is None else "1"}
        self.abroad = None if self.sees_all or memberships[0].rank == 0 else memberships[0]
        workers: list[Worker] = []
        try:
            for local, each in enumerate(memberships):
                own = {} if len(memberships) == 1 else cards_of(local, len(memberships), strict=True)
                workers.append(Worker(each.rank, self.command, {**variables, **own, **each.variables()}, self.events))
            first = self._follow(workers)
        finally:
            for worker in workers:
                worker.send(signal.SIGKILL)  # children that outlived it too
            for worker in workers:
                worker.process.wait()
        if self.asked is not None and (first is None or not self.lost):
            by = "" if self.asked == signal.SIGINT else f" by {signal.Signals(self.asked).name}"
            return 128 + self.asked, f"stopped{by}"
        if first is not None and "gone" in first.facts:
            return 1, first.facts["fault"]
        if first is not None and self.lost:
            assert self.abroad is not None
            return 1, str(rank_0_is_gone(self.abroad, first.where(), first.waited_in()))
        if first is None:
            return 0, None
        is_at_fault = first.facts.get("culprit") in (None, first.rank) and first.status not in (MISTAKE, SAVED)
        by_slurm = not self.sees_all and memberships[0].found_by == "Slurm"
        if by_slurm and is_at_fault and attempt == self.restarts:
            self._let_others_end()
        assert first.status is not None
        return 128 - first.status if first.status < 0 else first.status, fault_of(first)

    def _follow(self, workers: Sequence[Worker]) -> Worker | None:
        """Print until all have ended; return the first that failed."""
        first: Worker | None = None
        loud = set(workers)
        while loud:
            self._press_on(workers)
            self._tell_alone(time.monotonic())
            self._print_held(first)
            try:
                kind, worker, *rest = self.events.get(timeout=HELD / 2)
            except queue.Empty:
                continue
            if kind == "line":
                self.held.append((time.monotonic(), worker, *rest))
            elif kind == "status":
                # A beat of its other thread may come behind what it said of the fault.
                named = {key: worker.facts[key] for key in ("culprit", "fault", "gone") if key in worker.facts}
                worker.facts = {**named, **rest[0]}
                # On a busy machine the end of one that only broke off may be heard before the one that says who is at fault.
                broke_off = first is not None and first.status == 1 and "culprit" not in first.facts
                if broke_off and worker.facts.get("culprit") is not None:
                    first = worker
                if first is None and worker.status and "gone" in worker.facts:
                    first = worker
                self.lost |= worker is first and "gone" in worker.facts
                self.alone_at = None if "joined" in rest[0] else self.alone_at
                if self.bar is not None and worker is workers[0]:
                    self.bar.update(worker.facts)
            elif kind == "end":
                worker.status = rest[0]
                if worker.status != 0 and first is None and (self.asked is None or "gone" in worker.facts):
                    first = worker
                    # JAX ends a process that rank 0 does not answer, in words of its own
                    lost = worker.status == -signal.SIGABRT and self.abroad is not None and is_gone(self.abroad)
                    self.lost = lost or "gone" in worker.facts
                    if worker.status == SAVED:
                        self.kill_at = time.monotonic() + self.grace  # all of them have been told, and are ending
                        continue
                    for other in workers:
                        if other is not worker:
                            other.send(signal.SIGKILL)  # they wait for it in C, and hear no gentler word
            elif kind == "quiet":
                loud.discard(worker)
        self._print_held(first, at_once=True)
        if first is None and self.asked is None:
            self._tell_alone(float("inf"))
        return first

    def _tell_alone(self, now: float) -> None:
        """Say once that no process has joined the others."""
        if self.alone_at is None or now < self.alone_at:
            return
        self.alone_at = None
        program = " ".join(self.command[1:3] if self.command[1] == "-m" else self.command[1:2])
        text = f"no process of {program} has called jshard.init(), so that each works alone; call it before JAX does anything"
        self._print(text, sys.stderr)

    def _print_held(self, first: Worker | None, *, at_once: bool = False) -> None:
        """Print the lines that are old enough. When a process fails the others fail after it, in many words: what they
        said last is left out, as is what one says that has lost a process of another launcher, but for the one sentence."""
        while self.held:
            when, worker, stream, text = self.held[0]
            ending = not self.sees_all and (worker is first or LOG_OF_JAX.match(text) is not None)
            if not at_once and time.monotonic() < when + (ENDING if ending else HELD):
                return
            self.held.popleft()
            if self.asked is not None and not self.sees_all and LOG_OF_JAX.match(text):
                self.mute.add(
                    worker
                )  # it was stopped, as were the others: it has lost one of them, and tells so at length
            is_own = worker not in self.mute and (first is None or (worker is first and not self.lost))
            if (stream == "stdout" or is_own) and self.asked != signal.SIGINT:
                self._print(f"[{worker.rank}] {text}", sys.stdout if stream == "stdout" else sys.stderr)

    def _press_on(self, workers: Sequence[Worker]) -> None:
        """Hand on the signal that the user sent, once; kill what has not ended in time."""
        if self.asked is not None and self.kill_at == float("inf"):
            self.kill_at = time.monotonic() + (KILLED_ANYWAY if self.asked == signal.SIGINT else self.grace)
            for worker in workers:
                worker.send(self.asked)
        elif time.monotonic() >= self.kill_at:
            for worker in workers:
                worker.send(signal.SIGKILL)

    def _print(self, line: str, stream: TextIO) -> None:
        if self.bar is not None:
            self.bar.say(line)
        else:
            print(line, file=stream, flush=True)

    def _say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.stop()
        print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: object) -> None:
            if self.asked is not None:
                self.kill_at = 0.0  # the second time at once
            else:
                self.asked = number

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def fault_of(worker: Worker) -> str:
    """Make the sentence on the first process that failed. What it said itself of its fault, or of another's, is above it."""
    rank, where = worker.rank, worker.where()
    culprit = worker.facts.get("culprit")
    if culprit is not None and culprit != rank:
        return f"rank {culprit} was at fault, as rank {rank} says above; all were stopped"
    if worker.status == MISTAKE:
        return f"all were stopped: rank {rank} says why, above"
    if worker.status == SAVED:
        return f"all were stopped: rank {rank} was sent SIGTERM, or heard of one, {where}"
    says = f"rank {rank} {worker.how_ended()} {where}{waits_in(worker.waited_in(), 'waited')}; "
    if worker.status == -signal.SIGKILL:
        return says + "all were stopped; if nobody killed it, memory may have run out: type dmesg"
    return says + f"all were stopped; its last lines begin with [{rank}]"


def local(count: int) -> list[Membership]:
    """Number `count` processes on this machine, which meet at a free port of loopback."""
    port = free_port()
    return [Membership(f"127.0.0.1:{port}", count, rank, "jshard launch") for rank in range(count)]
