"""The supervisor of `jshard launch`: it starts processes, prints output, and ends all on a failure."""

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

ALONE = 60.0  # seconds without a joined process before a warning; at the end in any case
KILLED_ANYWAY = 3.0  # seconds after Ctrl-C
HELD = 0.3  # seconds that a line waits: another process may have failed before it
ENDING = 10.0  # after an error in JAX's log, with rank 0 under another launcher: the process may be ending
OTHERS = 30.0  # seconds for the other launchers of a Slurm job to notice a lost process
LAST = 2.0  # seconds for them to end, after Slurm's SIGTERM
LOG_OF_JAX = re.compile(r"[EF]\d{4} [\d:.]+ +\d+ \w+\.\w+:\d+\] ")
SAVED = 143  # the exit status after SIGTERM and a save at an agreed step
MISTAKE = 2  # the exit status of a JShardError: a restart would repeat it


class Supervisor:
    """The processes of a launch. `run()` returns the status of the first failed process, or 0."""

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
        self.abroad: Membership | None = None  # if rank 0 has another launcher
        self.sees_all = True  # no process has another launcher
        self.lost = False  # the first failed process had lost a process of another launcher
        self.mute: set[Worker] = set()
        self.alone_at: float | None = None  # time of the warning that no process has joined
        self.held: collections.deque[tuple[float, Worker, str, str]] = collections.deque()

    def run(self) -> int:
        with self._signals():
            for attempt in range(self.restarts + 1):
                status, says = self._once(attempt)
                if says is not None:
                    self._say(says)
                if status == MISTAKE and attempt < self.restarts:
                    self._say("not started again: the same fault would follow; mend it first")
                if status in (0, MISTAKE) or self.asked is not None or attempt == self.restarts:
                    return status
                self._say(f"starting all again: restart {attempt + 1} of {self.restarts}")
        raise AssertionError("the last attempt returns")

    def _let_others_end(self) -> None:
        """Wait for the launchers of other hosts: in Slurm's joint output, the first fault comes last."""
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
                worker.send(signal.SIGKILL)  # and their remaining children
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
        """Print the output until all have ended; return the first failed process."""
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
                # A beat of its other thread may come after the fault.
                named = {key: worker.facts[key] for key in ("culprit", "fault", "gone") if key in worker.facts}
                worker.facts = {**named, **rest[0]}
                # On a busy machine, a process that broke off may end before the one that names the culprit.
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
                    # JAX aborts a process without an answer of rank 0
                    lost = worker.status == -signal.SIGABRT and self.abroad is not None and is_gone(self.abroad)
                    self.lost = lost or "gone" in worker.facts
                    if worker.status == SAVED:
                        self.kill_at = time.monotonic() + self.grace  # all know, and are ending
                        continue
                    for other in workers:
                        if other is not worker:
                            other.send(signal.SIGKILL)  # they wait for it in C, and ignore gentler signals
            elif kind == "quiet":
                loud.discard(worker)
        self._print_held(first, at_once=True)
        if first is None and self.asked is None:
            self._tell_alone(float("inf"))
        return first

    def _tell_alone(self, now: float) -> None:
        """Warn once if no process has joined the others."""
        if self.alone_at is None or now < self.alone_at:
            return
        self.alone_at = None
        program = " ".join(self.command[1:3] if self.command[1] == "-m" else self.command[1:2])
        text = f"no process of {program} has called jshard.init(), so that each works alone; call it before JAX does anything"
        self._print(text, sys.stderr)

    def _print_held(self, first: Worker | None, *, at_once: bool = False) -> None:
        """Print the lines that are old enough. After a process fails, the others fail with many words: their last
        lines are dropped. A process that lost a process of another launcher prints only its final sentence."""
        while self.held:
            when, worker, stream, text = self.held[0]
            ending = not self.sees_all and (worker is first or LOG_OF_JAX.match(text) is not None)
            if not at_once and time.monotonic() < when + (ENDING if ending else HELD):
                return
            self.held.popleft()
            if self.asked is not None and not self.sees_all and LOG_OF_JAX.match(text):
                self.mute.add(worker)  # stopped like the others: it logs at length that it has lost one
            is_own = worker not in self.mute and (first is None or (worker is first and not self.lost))
            if (stream == "stdout" or is_own) and self.asked != signal.SIGINT:
                self._print(f"[{worker.rank}] {text}", sys.stdout if stream == "stdout" else sys.stderr)

    def _press_on(self, workers: Sequence[Worker]) -> None:
        """Send the user's signal once, and kill processes that don't end in time."""
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
                self.kill_at = 0.0  # at once after a second signal
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
    """Return the sentence on the first failed process. Its own message, or the culprit's, is above."""
    rank, where = worker.rank, worker.where()
    culprit = worker.facts.get("culprit")
    if culprit is not None and culprit != rank:
        return f"rank {culprit} was at fault, as rank {rank} reports above; all were stopped"
    if worker.status == MISTAKE:
        return f"all were stopped: the reason is above, by rank {rank}"
    if worker.status == SAVED:
        return f"all were stopped: rank {rank} received SIGTERM, or the notice of one, {where}"
    says = f"rank {rank} {worker.how_ended()} {where}{waits_in(worker.waited_in(), 'waited')}; "
    if worker.status == -signal.SIGKILL:
        return says + "all were stopped; if nobody killed it, memory may have run out: type dmesg"
    return says + f"all were stopped; its last lines begin with [{rank}]"


def local(count: int) -> list[Membership]:
    """Return `count` memberships on this machine, at a free port of loopback."""
    port = free_port()
    return [Membership(f"127.0.0.1:{port}", count, rank, "jshard launch") for rank in range(count)]
