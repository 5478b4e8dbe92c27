"""What is written down while a program runs by its equations: what a sum would need to be exact, what a signal hands on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.inspect.verify.exact_surrogates import precision
from jshard.provenance import Cause


@dataclasses.dataclass(frozen=True)
class Where:
    """What is noted, and where in the program. `lead` are the axes put before the array's own: a scan's trips, or the mesh
    axes of a shard_map, whose devices are stacked."""

    kind: str  # sum, narrowing, opaque; value; birth
    cause: Cause
    primitive: str
    dtype: str
    lead: tuple[tuple[str, ...], ...] = ()  # () is a scan; a shard_map has its mesh axes


@dataclasses.dataclass(frozen=True)
class Note:
    value: Any
    where: Where

    def behind(self, lead: tuple[str, ...]) -> Note:
        return Note(self.value, dataclasses.replace(self.where, lead=(lead, *self.where.lead)))


jax.tree_util.register_dataclass(Note, data_fields=["value"], meta_fields=["where"])


def excess(note: Note) -> Any:
    """By how many bits a sum is not exact; at most 0 when it is."""
    if note.where.kind == "branch":
        return note.value
    return note.value + 1000.0 if note.where.kind == "opaque" else note.value - precision(note.where.dtype)


def worst(notes: Sequence[Note]) -> Any:
    """By how many bits the worst of these sums is not exact (below 0: all are)."""
    most = jnp.float32(-1000)
    for note in notes:
        most = jnp.maximum(most, jnp.max(excess(note)).astype(jnp.float32))
    manual = jax.sharding.get_abstract_mesh().manual_axes  # all branches of a cond must have one type
    missing = tuple(name for name in manual if name not in jax.typeof(most).mat.varying)
    return lax.pcast(most, missing, to="varying") if missing else most


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
