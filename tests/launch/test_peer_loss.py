"""Which process is gone when a connection broke. No process is started here."""

from __future__ import annotations

import jax
import pytest

from jshard.launch import kv_store
from jshard.launch import peer_loss as lost
from jshard.launch.cluster_env import Membership
from jshard.launch.peer_loss import is_gone, is_of_connection, who_is_gone
from jshard.launch.supervisor import local

MEMBER = Membership("node1:8476", 3, 1, "test")
PLACE = "all_reduce of objective over data (a.yaml:4)"


@pytest.fixture
def service(monkeypatch):
    """`service(fault, *notes)` is what the store says when it is read, the last note for ever; no time passes."""

    def says(fault, *notes):
        left = list(notes)
        monkeypatch.setattr(kv_store, "read", lambda key: fault)
        monkeypatch.setattr(kv_store, "read_ranks", lambda folder: left.pop(0) if len(left) > 1 else left[0])

    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(lost.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lost.time, "sleep", sleep)
    return says


def beats(*numbers: int, phase: str = "step") -> dict[int, dict]:
    return {
        rank: {"beats": number, "phase": phase, "step": 7, "pid": 40 + rank, "host": f"node{rank}"}
        for rank, number in enumerate(numbers)
    }


def test_lost_rank_is_the_one_that_writes_no_more_notes(service):
    service(None, beats(3, 3, 3), beats(7, 7, 3))
    rank, error = who_is_gone(MEMBER, 7, PLACE)
    assert (rank, str(error)) == (
        2,
        "rank 2 is gone: it was in step 7, and the others waited for it in all_reduce of objective over data (a.yaml:4); look "
        "at process 42 on node2: it was killed, or its host is gone",
    )


def test_lost_rank_that_said_why_is_told_in_its_words(service):
    service({"rank": 2, "host": "node2", "says": "the model is broken"}, beats(3, 3, 3))
    assert [str(each) for each in who_is_gone(MEMBER, 7, PLACE)] == [
        "2",
        "rank 2 on node2 has failed: the model is broken; look at its output",
    ]


def test_lost_rank_is_0_when_nobody_answers(monkeypatch):
    def refused(key):
        raise OSError("refused")

    monkeypatch.setattr(kv_store, "read", refused)
    rank, error = who_is_gone(MEMBER, 7, PLACE)
    assert (rank, str(error)) == (
        0,
        "rank 0 is gone: nothing answers at node1:8476 any more, and rank 1 was in step 7, waiting in all_reduce of objective "
        "over data (a.yaml:4); look at rank 0 and at its host, then start all of them again",
    )


def test_lost_rank_is_nobody_when_all_write_on(service):
    service(None, beats(3, 3, 3), beats(7, 7, 7))
    assert who_is_gone(MEMBER, 7, PLACE) is None


def test_lost_connection_is_told_from_a_fault_of_the_program():
    assert is_of_connection(jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
    assert not is_of_connection(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    assert not is_of_connection(RuntimeError("Gloo"))
    assert is_gone(local(1)[0])
