"""A pipeline schedule as a table: the operations of each stage in each tick."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jshard.printing.table import table as aligned

SLOTS = "FBW"  # in a tick's order
WAITS = "."
READING = "A row a stage, a word a tick: F3B0 is microbatch 3 forward, then 0 backward; F3.1 is for chunk 1; . waits."


class Op(NamedTuple):
    """Forward (F), backward (B) or weight gradients (W) of a microbatch in a chunk of a stage's layers."""

    slot: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.slot}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class StageOp(NamedTuple):
    """An operation by its virtual stage, chunk * stages + stage: a microbatch's order through chunks."""

    slot: str
    microbatch: int
    virtual: int


@dataclasses.dataclass(frozen=True)
class Table:
    """A row for each stage, with the operations of each tick: at most one in each slot. All rows
    have the same length.

    All stages pass through a tick together: slot F, then B, then W. A result for another stage arrives in the
    next tick. If any stage has a W, B computes only the gradients of inputs; otherwise also those of weights.
    """

    name: str
    rows: tuple[tuple[tuple[Op, ...], ...], ...]

    @classmethod
    def of(cls, name: str, stages: int, when: Mapping[StageOp, int]) -> Table:
        """Make a table from operations and their ticks."""
        rows = [[[] for _ in range(1 + max(when.values()))] for _ in range(stages)]
        for key, tick in sorted(when.items(), key=lambda each: SLOTS.index(each[0].slot)):
            chunk, stage = divmod(key.virtual, stages)
            rows[stage][tick].append(Op(key.slot, key.microbatch, chunk))
        return cls(name, tuple(tuple(map(tuple, row)) for row in rows))

    @property
    def stages(self) -> int:
        return len(self.rows)

    @property
    def ticks(self) -> int:
        return len(self.rows[0])

    @functools.cached_property
    def virtual_stages(self) -> int:
        return 1 + max(key.virtual for key in self.when)

    @functools.cached_property
    def microbatches(self) -> int:
        return 1 + max(key.microbatch for key in self.when)

    @functools.cached_property
    def splits_weights(self) -> bool:
        """True if weight gradients have their own slot."""
        return any(key.slot == "W" for key in self.when)

    @functools.cached_property
    def when(self) -> dict[StageOp, int]:
        """The tick of each operation."""
        return {
            key_of(op, stage, self.stages): tick
            for stage, row in enumerate(self.rows)
            for tick, ops in enumerate(row)
            for op in ops
        }

    def spans(self, slot: str, until: str) -> dict[StageOp, tuple[int, int]]:
        """Return the ticks of each operation `slot`, and of `until` for its microbatch and chunk."""
        ends = {key: self.when.get(key._replace(slot=until)) for key in self.when if key.slot == slot}
        return {key: (self.when[key], end) for key, end in ends.items() if end is not None}

    def inputs(self, slot: str, until: str) -> dict[StageOp, tuple[int, int]]:
        """Return the ticks in which a stage keeps the input of each F, or the gradient for each B, up to `until`.
        They begin in the tick after another stage's operation, or at the operation itself without a sender."""
        first, step = (0, -1) if slot == "F" else (self.virtual_stages - 1, 1)
        return {
            key: (tick if key.virtual == first else self.when[key._replace(virtual=key.virtual + step)] + 1, ends)
            for key, (tick, ends) in self.spans(slot, until).items()
        }

    @property
    def last_slot(self) -> str:
        """The last slot of a microbatch in a chunk."""
        return "W" if self.splits_weights else "B"

    def op(self, key: StageOp) -> tuple[int, Op]:
        """Return the stage of an operation, and its word."""
        chunk, stage = divmod(key.virtual, self.stages)
        return stage, Op(key.slot, key.microbatch, chunk)

    def words(self) -> list[list[str]]:
        """Return the word of each tick, by stage."""
        return [["".join(map(str, ops)) or WAITS for ops in row] for row in self.rows]

    def text(self) -> str:
        """Return the table as a file to read and edit, in the format of `read`."""
        return "\n".join([f"# {self}. {READING}", *aligned(self.words()), ""])

    def __str__(self) -> str:
        chunks = self.virtual_stages // self.stages
        each = f" of {chunks} chunks" if chunks > 1 else ""
        sizes = (
            counted(self.stages, "stage") + each,
            counted(self.microbatches, "microbatch"),
            counted(self.ticks, "tick"),
        )
        return f"{self.name}: {', '.join(sizes)}"


def key_of(op: Op, stage: int, stages: int) -> StageOp:
    """Return the operation of a stage by its virtual stage."""
    return StageOp(op.slot, op.microbatch, op.chunk * stages + stage)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def needs(key: StageOp, virtual_stages: int) -> Iterator[tuple[StageOp, int]]:
    """Yield the inputs of an operation and the least ticks before it: 1 from another chunk, else 0."""
    if key.slot == "F" and key.virtual:
        yield key._replace(virtual=key.virtual - 1), 1
    if key.slot == "B":
        yield key._replace(slot="F"), 0
        if key.virtual + 1 < virtual_stages:
            yield key._replace(virtual=key.virtual + 1), 1
    if key.slot == "W":
        yield key._replace(slot="B"), 0
