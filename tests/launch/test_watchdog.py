"""Which rank differs, and how that is shown."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from jshard.launch import initialize as joining
from jshard.launch import watchdog
from jshard.launch.cluster_env import Membership
from jshard.launch.heartbeat import Pulse
from jshard.launch.watchdog import _Answers, odd_one, table


def notes(*said: tuple[str, int]) -> dict[int, dict]:
    return {
        rank: {"phase": phase, "step": step, "done": 4, "host": "node", "pid": 10 + rank}
        for rank, (phase, step) in enumerate(said)
    }


@pytest.mark.parametrize(
    ("said", "dead", "odd"),
    [
        ([("step", 5), ("step", 5), ("step", 5)], [], None),
        ([("step", 5), ("step", 5), ("step", 5)], [2], 2),
        ([("step", 5), ("step", 4), ("step", 5)], [], 1),
        ([("step", 5), ("step", 4), ("step", 5)], [0], 0),
        ([("step", 5), ("step", 5), ("step", 5)], [2, 1], 2),
        ([("step", 5), ("data", 5), ("step", 5)], [], 1),
        ([("step", 5), ("step", 5), ("ended", 5)], [], 2),
        ([("step", 5), ("step", 7)], [], 0),
        ([("data", 5), ("step", 5)], [], 0),
    ],
)
def test_watchdog_finds_the_rank_that_differs(said, dead, odd):
    assert odd_one(notes(*said), dead) == odd


def test_watchdog_shows_all_ranks_and_marks_the_one_that_differs():
    said = notes(("step", 5), ("data", 5))
    said[0] |= {"stands_in": "all_reduce of objective over data (a.yaml:4)"}
    said[1] |= {"stands_in": "all_reduce of objective over data (a.yaml:4)"}
    assert table(said, {0: True, 1: True}, 1) == [
        "rank  host  process  alive  phase  step  done  stands in (inferred)",
        "0     node  10       yes    step   5     4     all_reduce of objective over data (a.yaml:4)",
        "1     node  11       yes    data   5     4     -  <--",
    ]


def test_launch_and_training_compare_no_clocks_on_the_wall():
    """`time.time` may say when something was; how long it took, and who is late, says a clock that only counts on."""
    rooms = [Path(watchdog.__file__).parent, Path(watchdog.__file__).parents[1] / "training"]
    users = {
        file.name
        for room in rooms
        for file in room.rglob("*.py")
        if re.search(r"time\.time\(|datetime", file.read_text())
    }
    assert users == {"log.py", "trace.py"}  # the stamps of a log, and how long a request for a trace is good


def test_launch_does_not_leave_it_to_jax_to_miss_a_heartbeat():
    """JAX counts seconds between heartbeats on the wall's clock."""
    assert joining.HEARTBEAT > 24 * 3600


def test_pulse_counts_the_steps_whose_results_are_there():
    class Result:
        def __init__(self, ready: bool):
            self.ready = ready

        def is_ready(self) -> bool:
            return self.ready

    pulse = Pulse()
    for step in (1, 2, 3):
        pulse.at("step", step)
        pulse.waits(step, Result(step < 3))
    assert (pulse.look(), pulse.step) == (2, 3)


def test_pulse_costs_a_step_a_few_microseconds():
    pulse = Pulse()
    began = time.perf_counter()
    for step in range(10_000):
        pulse.at("step", step)
        pulse.waits(step, None)
    assert time.perf_counter() - began < 1  # 100 microseconds a step, were it that slow


def test_watchdog_writes_fewer_notes_while_steps_come_on_and_asks_of_the_others_when_none_does(monkeypatch):
    pulse, written, asked = Pulse(), [], []
    seconds = 0

    class Over:
        def wait(self, talk: float) -> bool:
            nonlocal seconds
            seconds += round(talk)
            pulse.since = time.monotonic() - (60 if seconds > 10 else 0)
            return seconds == 20

    answers = _Answers(watchdog.TALK)
    answers.over = Over()
    monkeypatch.setattr(watchdog.kv_store, "write", lambda key, note: written.append((seconds, key, note["beats"])))
    monkeypatch.setattr(watchdog.kv_store, "read", lambda key: None)
    monkeypatch.setattr(watchdog.kv_store, "read_ranks", lambda key: asked.append(seconds) or {})
    watchdog._talk(Membership("127.0.0.1:1", 2, 1, "a test"), pulse, answers)
    calm, waits = list(range(0, 11, watchdog.CALM)), list(range(11, 21))
    assert [when for when, *_ in written] == calm + waits
    assert asked == waits
    assert {key for _, key, _ in written} == {"pulse/1"}
    assert len({number for *_, number in written}) == len(written)  # or the others would take it for silent
    assert watchdog.CALM < watchdog.SURE


def test_watchdog_misses_who_writes_no_more_notes_but_not_who_has_ended(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    answers = _Answers(1.0)
    for beats in range(5):
        written = {0: ("step", beats), 1: ("step", min(beats, 2)), 2: ("ended", 1)}
        answers.take({rank: {"phase": phase, "beats": number} for rank, (phase, number) in written.items()})
        now[0] += 1
    assert answers.silent(1.5) == [1]
    assert answers.silent(2.5) == []
    now[0] += 60  # it asked nobody meanwhile: who is silent is not known
    assert answers.silent(2.5) == []
    answers.take(answers.notes)
    assert answers.silent(2.5) == [1, 0]  # the longest silent first


def test_watchdog_judges_once_the_answers_cover_the_time_after_which_a_rank_is_silent(monkeypatch):
    """A look between two answers came to its end before the second, and called a rank that had stopped alive."""
    now, judged = [100.0], []
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    answers, pulse = _Answers(1.0), Pulse()
    pulse.at("step", 5)
    pulse.done = 4

    class Over:
        def wait(self, seconds: float) -> bool:
            now[0] += 0.25
            if now[0] % 1 == 0:
                said = {0: now[0], 1: now[0], 2: 1}  # rank 2 has stopped
                answers.take({rank: {"phase": "step", "step": 5, "beats": beats} for rank, beats in said.items()})
            return bool(judged) or now[0] > 110

    answers.over = Over()
    monkeypatch.setattr(watchdog, "_tell_hang", lambda *_: judged.append(answers.silent(3.0)))
    watchdog._look(Membership("127.0.0.1:1", 3, 0, "a test"), pulse, answers, limit=3.0)
    assert judged == [[2]]


def test_report_of_a_fault_says_why_and_not_how_the_last_step_was(monkeypatch):
    notes = []
    monkeypatch.setattr(watchdog.kv_store, "claim", lambda key, note: notes.append(note) or True)
    pulse = Pulse()
    pulse.says = "loss 1.14   5 examples/s"
    assert watchdog.report(Membership("node1:8476", 2, 1, "test"), "rank 0 has not answered for 22 s", pulse)
    assert (notes[0]["rank"], notes[0]["says"]) == (1, "rank 0 has not answered for 22 s")
