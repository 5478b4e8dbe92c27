"""Which operation of a pipeline's table is the first to make something else than the same operation on one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jshard.inspect.verify.first_divergence import FirstDivergence, likeness_of
from jshard.inspect.verify.interpreter import Note
from jshard.schedules import StageOp
from jshard.schedules.table import SLOTS

MAKES = {
    "F": "its output",
    "B": "the gradient of its input",
    "sums": "what it adds to the gradients of its layers",
}


def first_slot(
    reference: Sequence[Note], other: Sequence[Note], mesh: Mapping[str, int], tolerance: float, modulus: int | None = None
) -> FirstDivergence | None:  # fmt: skip
    """The first operation, in the order in which the table of `other` runs them, whose output, or what it adds to the gradients
    of its layers, is not that of the reference. What goes into it was made rightly: it was not brought, or not kept, or
    something else was taken. None where nothing differs, and where there is no pipeline, or several."""
    alone, here = _TableRun(reference, dict.fromkeys(mesh, 1)), _TableRun(other, mesh)
    if not (alone.is_one and here.is_one):
        return None
    sizes = {name: size for name, size in mesh.items() if name != here.mesh_axis}
    order = sorted(here.table.when.items(), key=lambda each: (each[1], SLOTS.index(each[0].slot), each[0].virtual))
    for key, _ in order:
        expected = alone.made(key)
        for number, (made, found) in enumerate(here.made(key)):
            likeness = likeness_of(expected[number][1], found, sizes, tolerance, modulus)
            if likeness.kind != "differs":
                continue
            looks = likeness.cause
            if not np.any(found.value):
                looks = "nothing"
            for microbatch in range(here.table.microbatches):
                _, swapped = alone.made(key._replace(microbatch=microbatch))[number]
                if likeness_of(swapped, found, sizes, tolerance, modulus).kind == "equal":
                    looks = f"that of microbatch {microbatch}"
            return FirstDivergence(
                mesh, found.where.cause, likeness.off, f"{MAKES[made]}: {looks}", here.table.where(key)
            )
    return None


class _TableRun:
    """What each operation of a table has made, on a mesh."""

    def __init__(self, notes: Sequence[Note], mesh: Mapping[str, int]):
        # a loop over ticks in one shard_map; a pipeline in other loops is not looked into
        some = [(note.where.slot, note) for note in notes if len(note.where.lead) == 2]
        self.notes = [(slot, note) for slot, note in some if slot is not None]
        self.mesh = mesh
        found = {(slot.table, slot.mesh_axis) for slot, _ in self.notes}
        self.is_one = len(found) == 1
        if self.is_one:
            ((self.table, self.mesh_axis),) = found

    def made(self, key: StageOp) -> list[tuple[str, Note]]:
        """The arrays of one operation, and what they are: of each the devices of its stage, stacked."""
        tick, (chunk, stage) = self.table.when[key], divmod(key.virtual, self.table.stages)
        adds = "sums" if key.slot == ("W" if self.table.splits_weights else "B") else ""
        some = []
        for slot, note in self.notes:
            made, (names, _) = slot.made, note.where.lead
            if made in (key.slot, adds):
                stacked = note.value.reshape(*(self.mesh[name] for name in names), *note.value.shape[1:])
                ticks = np.moveaxis(np.take(stacked, stage, names.index(self.mesh_axis)), len(names) - 1, 0)
                others = tuple(name for name in names if name != self.mesh_axis)
                devices = math.prod(self.mesh[name] for name in others)
                ticks = ticks.reshape(len(ticks), devices, *note.value.shape[2:])
                value = ticks[tick]
                if made == "sums":
                    value = (value - ticks[tick - 1] if tick else value)[:, chunk]
                some.append((made, Note(value, dataclasses.replace(note.where, lead=(others,)))))
        return some
