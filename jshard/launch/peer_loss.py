"""The loss of another process behind a broken connection: an error with its rank, not JAX's message."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jshard.errors import JShardError
from jshard.launch.cluster_env import Membership

ANSWERS = 2.0  # seconds for a process to answer
MISSED = 4.5  # seconds without a note before a process is gone; there is a note each second
BROKEN = ("Gloo", "NCCL", "onnection", "coordination service", "ocket closed")


def is_of_connection(error: BaseException) -> bool:
    """Return whether JAX failed to reach another process."""
    text = str(error)
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and any(word in text for word in BROKEN)


def is_gone(membership: Membership) -> bool:
    """Return whether nothing answers at rank 0's address."""
    try:
        socket.create_connection(membership.address, timeout=ANSWERS).close()
    except OSError:
        return True
    return False


def rank_0_is_gone(membership: Membership, where: str, place: str = "") -> JShardError:
    """Return the error for the loss of rank 0, with the place of this process and its collective."""
    waited = f", waiting in {place}" if place else ""
    return JShardError(
        f"rank 0 is gone: nothing answers at {membership.coordinator} any more, and rank {membership.rank} was {where}{waited}",
        hint="look at rank 0 and at its host, then start all of them again",
    )


def waits_in(place: str, verb: str = "wait") -> str:
    """Return words on the collective in which the others wait, to append to a sentence; "" if unknown."""
    return f", and the others {verb} for it in {place}" if place else ""


def who_is_gone(membership: Membership, step: int, place: str) -> tuple[int, JShardError] | None:
    """Return the lost process and the error about it. Takes up to five seconds, as JAX does not name it."""
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
                f"rank {fault['rank']} on {fault['host']} has failed: {fault['says']}", hint="look at its output"
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
    """Return the service's answer, or None after two seconds."""
    answers: list[Any] = []

    def listen() -> None:
        with contextlib.suppress(Exception):  # no service: the answer is None
            answers.append(ask())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(ANSWERS)
    return answers[0] if answers else None
