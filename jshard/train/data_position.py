"""Positions in the data when each process reads a stream of its own, and so is at a place of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.errors import JShardError

Position = Mapping[str, Any]


def positions(mine: Position) -> Position:
    """What a checkpoint keeps: `mine`, if all processes are at the same place; else all states, by the number of the
    process. Every process has to ask."""
    if jax.process_count() == 1 or "state" not in mine:
        return mine
    text = np.frombuffer(json.dumps(mine["state"]).encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.int32(len(text))).max())
    padded = np.pad(text, (0, longest - len(text)), constant_values=ord(" "))
    states = [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded)]
    if all(state == states[0] for state in states):
        return mine
    return {**{key: value for key, value in mine.items() if key != "state"}, "states": states}


def own_position(saved: Position, told: object) -> Position:
    """Where this process goes on; `told` names the checkpoint in the sentence that says why it can't."""
    states = saved.get("states")
    if states is None:
        return saved
    if len(states) != jax.process_count():
        raise JShardError(
            f"{told} was saved by {len(states)} processes, each at its own place in a stream of its own, and here are "
            f"{jax.process_count()}",
            hint=f"start {len(states)}, or read the data by number: docs/checkpoints.md",
        )
    return {**{key: value for key, value in saved.items() if key != "states"}, "state": states[jax.process_index()]}
