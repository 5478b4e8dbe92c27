"""A watchdog between processes: each reports its step, and a hang ends the run with a table of all."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jshard.errors import JShardError
from jshard.launch import kv_store
from jshard.launch.cluster_env import Membership
from jshard.launch.heartbeat import Pulse
from jshard.launch.peer_loss import answered, waits_in
from jshard.printing import table as text

BEAT = 0.5  # seconds: the most age of the launcher's bar
TALK = 1.0  # seconds between two notes to the others, up to CROWD processes; in proportion for more
CALM = 2  # times as long between notes while steps progress: below SURE, so as not to count as silent
CROWD = 64
FIRST_STEP = 10  # times as long for the first step, which compiles
WAITS = 1.0  # seconds without a step before a process reads the notes of the others
SURE = 3  # missing notes of a silent process, once something is wrong
LOST = 20  # missing notes that are a fault by themselves


def watch(membership: Membership, pulse: Pulse, limit: float) -> Callable[[], None]:
    """Start the watching threads; return a function to end them. `limit` is the seconds of a hung step."""
    answers = _Answers(TALK * max(1.0, membership.processes / CROWD))
    threads = [
        threading.Thread(target=_talk, args=(membership, pulse, answers), daemon=True, name="jshard talk"),
        threading.Thread(target=_look, args=(membership, pulse, answers, limit), daemon=True, name="jshard watch"),
    ]
    for thread in threads:
        thread.start()

    def stop() -> None:
        """End the threads: Python can't end while a thread asks JAX's service, for a few seconds at most."""
        answers.over.set()
        for thread in threads:
            thread.join(5)

    return stop


class _Answers:
    """The notes of the other processes, read while this process waits, with the time of each. If
    rank 0 has stopped, a read never ends: so the reading thread is not the judging thread."""

    def __init__(self, talk: float) -> None:
        self.talk = talk  # seconds between two notes
        self.over = threading.Event()  # this process ends
        self.forget()

    def forget(self) -> None:
        self.last = time.monotonic()  # the last answer of the service
        self.notes: dict[int, Mapping[str, Any]] = {}
        self.heard: dict[int, tuple[int, float]] = {}  # number and time of each rank's last note
        self.since: float | None = None

    def take(self, notes: dict[int, Mapping[str, Any]]) -> None:
        self.last = now = time.monotonic()
        self.since, self.notes = self.since or now, notes
        for rank, note in notes.items():
            if self.heard.get(rank, (None, 0))[0] != note["beats"]:
                self.heard[rank] = note["beats"], now

    def silent(self, seconds: float) -> list[int]:
        """Return the ranks silent for over `seconds` at the last read, longest first, but not ended ranks."""
        heard = sorted(dict(self.heard).items(), key=lambda each: each[1][1])
        return [
            rank for rank, (_, when) in heard if self.last - when > seconds and self.notes[rank]["phase"] != "ended"
        ]


def _talk(membership: Membership, pulse: Pulse, answers: _Answers) -> None:
    beats, over = 0, False
    while not over:
        over = answers.over.wait(answers.talk if beats else 0)
        beats += 1
        waits = time.monotonic() - pulse.since > WAITS
        if (beats - 1) % CALM and not (waits or over):
            continue
        note = {**pulse.facts, "beats": beats, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            kv_store.write(f"pulse/{membership.rank}", note)
            fault = kv_store.read("fault")
            if waits:
                answers.take(kv_store.read_ranks("pulse"))
            else:
                answers.forget()
        except Exception:  # no service: `_look` reports it, if it is a fault
            continue
        if fault is not None and fault["rank"] != membership.rank:
            _follow(pulse, fault)


def _follow(pulse: Pulse, fault: Mapping[str, Any]) -> None:
    """End this process after the failure of another, with its message."""
    if not pulse.is_seen_with_all:
        pulse.tell(culprit=fault["rank"])
        print(f"rank {fault['rank']} on {fault['host']} has failed: {fault['says']}", file=sys.stderr, flush=True)
    time.sleep(TALK)  # the launcher must see the other end first
    os._exit(1)


def report(membership: Membership, says: str, pulse: Pulse) -> bool:
    """Report this process's failure; return whether it is the first. Takes at most two seconds."""
    note = {**pulse.facts, "rank": membership.rank, "host": socket.gethostname(), "says": says}
    return bool(answered(lambda: kv_store.claim("fault", note)))


def _look(membership: Membership, pulse: Pulse, answers: _Answers, limit: float) -> None:
    shown, lost = None, min(LOST * answers.talk, limit)
    while not answers.over.wait(BEAT * random.uniform(0.5, 1.5)):  # independent of the time of steps
        pulse.look()
        if (now := pulse.facts) != shown:
            shown = now
            pulse.tell()
        quiet = time.monotonic() - pulse.since
        if pulse.phase == "ended" or quiet < WAITS:
            continue
        unanswered = time.monotonic() - answers.last
        if membership.rank != 0 and min(quiet, unanswered) > lost:
            says = f"rank 0 has not answered for {unanswered:.0f} s"
            here = f"rank {membership.rank} is in step {pulse.step}{waits_in(pulse.stands_in)}"
            _give_up(JShardError(f"{says}: {here}", hint="look at rank 0: it has stopped, or its host has"), pulse, 0)
        hung = pulse.phase != "starting" and quiet > (limit if pulse.done else FIRST_STEP * limit)
        # By the last answer, not by now: an equally long silence of others may not be known yet.
        asked = answers.since is not None and answers.last - answers.since > SURE * answers.talk
        if not asked or not (hung or answers.silent(lost)):
            continue
        sure = min(SURE * answers.talk, limit)
        if len(answers.silent(sure)) > 1 and quiet < limit + sure:
            continue  # on a busy host, a late note arrives by then
        _tell_hang(membership, pulse, answers, quiet, limit)


def _tell_hang(membership: Membership, pulse: Pulse, answers: _Answers, quiet: float, limit: float) -> None:
    """Print the table of all ranks, if this process is the first to report the hang."""
    notes, silent = dict(answers.notes), answers.silent(min(SURE * answers.talk, limit))
    alive = {rank: rank not in silent for rank in notes}
    odd, waits = odd_one(notes, silent), waits_in(pulse.stands_in)
    if odd is None:
        fault = f"no rank has done a step for {quiet:.0f} s, though all are alive: {_doing(pulse.facts)}"
        hint = "look at the last output of each, or set a longer step_timeout"
    elif not alive[odd]:
        fault = f"rank {odd} has not answered for {quiet:.0f} s: {_doing(notes[odd])} when it last did{waits}"
        hint = (
            f"look at process {notes[odd]['pid']} on {notes[odd]['host']}: the process or its host has ended or stopped"
        )
    elif notes[odd]["phase"] == "ended":
        fault = f"rank {odd} has ended after step {notes[odd]['step']}, and others are in step {pulse.step}{waits}"
        hint = "let all ranks do equally many steps"
    else:
        fault = f"rank {odd} keeps the others waiting for {quiet:.0f} s: {_doing(notes[odd])}{waits}"
        hint = f"look at the last output of rank {odd}, or set a longer step_timeout"
    if report(membership, fault, pulse):
        print("\n".join(table(notes, alive, odd)), file=sys.stderr, flush=True)
        _give_up(JShardError(fault, hint=hint), pulse, odd)
    time.sleep(limit)


def odd_one(notes: Mapping[int, Mapping[str, Any]], silent: Sequence[int]) -> int | None:
    """Return the rank that differs: the first of the silent, the ended or the slow ranks."""
    ranks = sorted(notes)
    gone = [*silent] or [rank for rank in ranks if notes[rank]["phase"] == "ended"]
    first = min(note["step"] for note in notes.values())
    behind = gone or [rank for rank in ranks if notes[rank]["step"] == first]
    if gone or len(behind) < len(notes):
        return behind[0]
    phases = [note["phase"] for note in notes.values()]
    rare = min(set(phases), key=lambda phase: (phases.count(phase), phase == "step"))
    return next(rank for rank in ranks if notes[rank]["phase"] == rare) if len(set(phases)) > 1 else None


def table(notes: Mapping[int, Mapping[str, Any]], alive: Mapping[int, bool], odd: int | None) -> list[str]:
    """Return a line for each rank, with an arrow at the rank `odd`."""
    rows: list[tuple[str, ...]] = [
        ("rank", "host", "process", "alive", "phase", "step", "done", "stands in (inferred)")
    ]
    for rank, note in sorted(notes.items()):
        has = "yes" if alive[rank] else "no"
        waits = note["phase"] == "step" and note["done"] < note["step"]
        place = (note.get("stands_in") or "-") if waits else "-"
        each = (rank, note["host"], note["pid"], has, note["phase"], note["step"], note["done"], place)
        rows.append(tuple(map(str, each)))
    arrows = ["", *("  <--" if rank == odd else "" for rank in sorted(notes))]
    return [line + arrow for line, arrow in zip(text.table(rows), arrows, strict=True)]


def _doing(note: Mapping[str, Any]) -> str:
    if note["phase"] == "after":
        return f"it was after step {note['step']}, reading data, evaluating or saving"
    return f"it was in step {note['step']}" + ("" if note["phase"] == "step" else f" ({note['phase']})")


def _give_up(error: JShardError, pulse: Pulse, culprit: int | None) -> None:
    print(error, file=sys.stderr, flush=True)
    pulse.tell(fault=str(error), culprit=culprit)
    os._exit(1)
