"""What is written down while a program runs by its equations: what a signal hands on, when a NaN was made."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jshard.layers.pipeline.ticks import Slot
from jshard.programs.provenance import Cause


@dataclasses.dataclass(frozen=True)
class Where:
    """What is noted, and where in the program. `lead` are the axes put before the array's own: a scan's trips, or the mesh
    axes of a shard_map, whose devices are stacked."""

    kind: str  # value, birth, slot
    cause: Cause
    primitive: str
    dtype: str
    lead: tuple[tuple[str, ...], ...] = ()  # () is a scan; a shard_map has its mesh axes
    of_sum: bool = True  # whether a sum goes into it: if it is right, so are sums before
    slot: Slot | None = None  # of a pipeline


@dataclasses.dataclass(frozen=True)
class Note:
    value: Any
    where: Where

    def behind(self, lead: tuple[str, ...]) -> Note:
        return Note(self.value, dataclasses.replace(self.where, lead=(lead, *self.where.lead)))


jax.tree_util.register_dataclass(Note, data_fields=["value"], meta_fields=["where"])


# -- when a NaN was born --

NEVER = 2**30  # equations


def later(note: Note, turns: int) -> Note:
    """Shift a time by the equations that ran before its jaxpr."""
    return Note(jnp.minimum(note.value + min(turns, NEVER), NEVER), note.where)


def first_turn(note: Note, turns: int, reverse: bool) -> Note:
    """Of all trips of a scan, each of so many equations: the trips are in front, and stand for no device."""
    trips = jnp.arange(note.value.shape[0], dtype=jnp.int32)
    before = (trips[::-1] if reverse else trips) * min(turns, NEVER // max(note.value.shape[0], 1))
    before = before.reshape(-1, *(1,) * (note.value.ndim - 1))
    return Note(jnp.min(jnp.where(note.value < NEVER, note.value + before, NEVER), axis=0, initial=NEVER), note.where)
