"""A connection to another process that broke: that one is gone, and its name is worth more than what the connection says."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jshard.errors import JShardError
from jshard.launch.cluster_env import Membership

ANSWERS = 2.0  # seconds that a process has to answer in
MISSED = 4.5  # seconds without a note, of which there is one a second, after which a process is gone
BROKEN = ("Gloo", "NCCL", "onnection", "coordination service", "ocket closed")


def is_of_connection(error: BaseException) -> bool:
    """Whether JAX says that it could not reach another process."""
    text = str(error)
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and any(word in text for word in BROKEN)


def is_gone(membership: Membership) -> bool:
    """Whether nothing answers any more where rank 0 listened."""
    try:
        socket.create_connection(membership.address, timeout=ANSWERS).close()
    except OSError:
        return True
    return False


def rank_0_is_gone(membership: Membership, where: str, place: str = "") -> JShardError:
    """Say that rank 0 is gone, `where` this process was, and in which collective it waited, when rank 0 was gone."""
    waited = f", waiting in {place}" if place else ""
    return JShardError(
        f"rank 0 is gone: nothing answers at {membership.coordinator} any more, and rank {membership.rank} was {where}{waited}",
        hint="look at rank 0 and at its host, then start all of them again",
    )


def waits_in(place: str, verb: str = "wait") -> str:
    """Say, behind a sentence on a process, in which collective the others wait for it; nothing where it is not known."""
    return f", and the others {verb} for it in {place}" if place else ""


def who_is_gone(membership: Membership, step: int, place: str) -> tuple[int, JShardError] | None:
    """Find the process that this one has lost, and the sentence on it. Takes up to five seconds, as JAX does not say."""
    from jshard.launch import kv_store

    first: Mapping[int, Any] = {}
    began = time.monotonic()
    while True:
        found = answered(lambda: (kv_store.read("fault"), kv_store.read_ranks("pulse")))
        if found is None:
            where = f"in step {step}" if step else "before its first step"
            return (0, rank_0_is_gone(membership, where, place if step else "")) if membership.rank != 0 else None
        fault, notes = found
        if fault is not None and fault["rank"] != membership.rank:
            return fault["rank"], JShardError(
                f"rank {fault['rank']} on {fault['host']} has failed: {fault['says']}", hint="look at what it printed"
            )
        first = first or notes
        if time.monotonic() - began > MISSED:
            break
        time.sleep(0.5)
    for rank, note in sorted(notes.items()):
        same = rank in first and first[rank]["beats"] == note["beats"]
        if same and note["phase"] != "ended" and rank != membership.rank:
            return rank, JShardError(
                f"rank {rank} is gone: it was in step {note['step']}{waits_in(place, 'waited')}",
                hint=f"look at process {note['pid']} on {note['host']}: it was killed, or its host is gone",
            )
    return None


def answered(ask: Callable[[], Any]) -> Any:
    """Return what the service answers within two seconds; None when it does not."""
    answers: list[Any] = []

    def listen() -> None:
        with contextlib.suppress(Exception):  # the service is gone: None says so
            answers.append(ask())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(ANSWERS)
    return answers[0] if answers else None
