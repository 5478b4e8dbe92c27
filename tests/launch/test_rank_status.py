"""Which rank the others wait for in every step, and how that is said."""

from __future__ import annotations

import pytest

from jshard.launch import heartbeat as module
from jshard.launch import rank_status as slow
from jshard.launch.cluster_env import Membership
from jshard.launch.heartbeat import Pulse
from jshard.launch.rank_status import Slow, slow_in_words, slow_one


class Result:
    def __init__(self) -> None:
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready


def notes(*late: float | None, took: float = 0.1) -> dict[int, dict]:
    return {
        rank: {"host": "node"} | ({} if each is None else {"late": each, "took": took})
        for rank, each in enumerate(late)
    }


@pytest.mark.parametrize(
    ("late", "rank"),
    [
        ((0.0, 0.0, 0.09, 0.0), 2),
        ((0.02, 0.02, 0.06), 2),
        ((0.09, 0.09, 0.09, 0.09), None),  # all alike
        ((0.03, 0.05), None),  # not twice as late
        ((0.05, 0.09), None),  # nor here, though the others wait for much of a step
        ((0.001, 0.02), None),  # a fifth of a step is no matter
        ((0.0, None, 0.09), None),  # one has not said yet
        ((0.09,), None),
        ((0.0, 0.0), None),
    ],
)
def test_slow_rank_is_the_one_that_begins_its_steps_late(late, rank):
    assert slow_one(notes(*late)) == rank


def test_slow_rank_is_told_in_one_sentence():
    said = notes(0.02, 0.02, 0.062)
    assert slow_in_words(2, said) == (
        "rank 2 holds the others up: it begins a step 62 ms after the one before is done, 3.1 times the median of 20 ms, and "
        "of the 100 ms of a step the others wait for it 42 ms; look at its data, and at what else runs on node"
    )
    said = notes(0.0, 0.062)
    said[1]["stands_in"] = "all_reduce of objective over data (a.yaml:4)"
    assert slow_in_words(1, said) == (
        "rank 1 holds the others up: it begins a step 62 ms after the one before is done, most ranks at once, and of the 100 "
        "ms of a step the others wait for it 62 ms in all_reduce of objective over data (a.yaml:4); look at its data, and at "
        "what else runs on node"
    )


def test_slow_rank_is_told_once(monkeypatch, capsys):
    now, said = [0.0], notes(0.0, 0.09)
    monkeypatch.setattr(slow.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(slow.kv_store, "read_ranks", lambda folder: said)
    watched, looks = Slow(64), []
    for _ in range(6):
        now[0] += slow.JUDGE
        watched.look(Membership("127.0.0.1:1", 2, 0, "test"))
        looks.append(len(capsys.readouterr().err.splitlines()))
    assert looks == [0, 1, 0, 0, 0, 0]


def test_pulse_tells_how_late_it_is_by_how_often_nothing_is_left_to_wait_for(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def pace(idle: int) -> dict[str, float]:
        """Of a process whose devices are idle in so many of ten looks at a step."""
        told, result = Pulse(), Result()
        for step in range(1, 9):
            told.at("step", step)
            told.look()  # it is being handed to the devices
            told.waits(step, result)
            for look in range(9):
                result.ready = look >= 9 - idle
                now[0] += 0.01
                told.look()
            now[0] += 0.01
            result = Result()
        return told.pace

    assert pace(0) == {}  # no step is ever seen done
    lazy, busy = pace(6), pace(1)
    assert abs(lazy["took"] - 0.1) < 0.01 and abs(busy["took"] - 0.1) < 0.01
    assert abs(lazy["late"] - 0.06) < 0.01 and abs(busy["late"] - 0.01) < 0.005
