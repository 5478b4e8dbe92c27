"""Before the first step all processes say what they are about to run, and go on only if it is the same."""

from __future__ import annotations

import time

from jshard.errors import JShardError
from jshard.launch import kv_store
from jshard.launch.initialize import joined
from jshard.launch.rendezvous import AlreadyReported, Facts, mismatch


def agree(topic: str, facts: Facts, *, hint: str, seconds: float = 60.0) -> None:
    """Raise an error in all processes when one of them says otherwise, naming it and the first difference, or when one has said
    nothing within `seconds` of rank 0's question. Does nothing when this process stands alone."""
    membership = joined()
    if membership is None:
        return
    key = f"agreement/{topic}"
    if membership.rank == 0:
        kv_store.write(f"{key}/verdict", verdict := _judge(topic, facts, membership.processes, hint, seconds))
        if verdict:
            raise JShardError(verdict[0], hint=verdict[1])
        return
    kv_store.write(f"{key}/{membership.rank}", dict(facts))
    verdict = kv_store.read(f"{key}/verdict", 2 * seconds)
    if verdict is None:
        raise JShardError(
            f"rank 0 has said nothing of its {topic} for {2 * seconds:g} s", hint="look at what rank 0 printed last"
        )
    if verdict:
        raise AlreadyReported(verdict[0], hint=verdict[1])


def _judge(topic: str, facts: Facts, processes: int, hint: str, seconds: float) -> list[str]:
    """Compare what all ranks say: return nothing, or what is wrong and how to fix it."""
    by_rank, deadline = {0: facts}, time.monotonic() + seconds
    for rank in range(1, processes):
        found = kv_store.read(f"agreement/{topic}/{rank}", deadline - time.monotonic())
        if found is None:
            return [
                f"rank {rank} has said nothing of its {topic} within {seconds:g} s of rank 0",
                f"look at what rank {rank} printed last",
            ]
        by_rank[rank] = found
    difference = mismatch(topic, by_rank)
    return [difference, hint] if difference else []
