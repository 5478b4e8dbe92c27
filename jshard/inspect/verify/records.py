"""What is written down while a program runs by its equations: what a signal hands on, whether an equation makes a NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

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
