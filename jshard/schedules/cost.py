"""The costs of a schedule: waiting time, kept microbatches and sends of each stage."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jshard.schedules.table import SLOTS, Op, StageOp, Table


@dataclasses.dataclass(frozen=True)
class Times:
    """The time of an operation in any unit. A backward with weight gradients takes B + W."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0

    def of(self, slot: str, table: Table) -> float:
        """Return the time of an operation in this slot."""
        return self.B + self.W if slot == "B" and not table.splits_weights else getattr(self, slot)


@dataclasses.dataclass(frozen=True)
class TimedOp:
    """An operation with its start and end."""

    stage: int
    op: Op
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class TimedTable:
    """The operations of all stages over time."""

    stages: int
    bars: tuple[TimedOp, ...]

    @property
    def length(self) -> float:
        return max(bar.end for bar in self.bars)

    @property
    def idle(self) -> float:
        """The share of the time in which stages wait."""
        return max(0.0, 1 - sum(bar.end - bar.start for bar in self.bars) / (self.length * self.stages))


def inputs_kept(table: Table) -> list[list[int]]:
    """Count by stage and tick the microbatches with a kept input. An input is kept from the tick
    after its arrival, or on the first stage from its forward, to its last use."""
    return _kept(table, table.inputs("F", table.last_slot))


def gradients_kept(table: Table) -> list[list[int]]:
    """Count by stage and tick the microbatches with a kept gradient of the stage's output."""
    return _kept(table, table.inputs("B", table.last_slot))


def left_kept(table: Table) -> list[list[int]]:
    """Count by stage and tick the microbatches between their B and their W."""
    return _kept(table, table.spans("B", "W"))


def _kept(table: Table, spans: Mapping[StageOp, tuple[int, int]]) -> list[list[int]]:
    kept = [[0] * table.ticks for _ in range(table.stages)]
    for key, (begins, ends) in spans.items():
        for tick in range(begins, ends + 1):
            kept[key.virtual % table.stages][tick] += 1
    return kept


def sends(table: Table) -> dict[str, list[int]]:
    """Count by slot and stage the sends to other stages in a step: outputs (F) and gradients of
    inputs (B). There is one for each microbatch and hop."""
    sent = Counter((key.slot, key.virtual % table.stages) for key in _sending(table))
    return {slot: [sent[slot, stage] for stage in range(table.stages)] for slot in "FB"}


def _sending(table: Table) -> list[StageOp]:
    """Return the operations with a result for another stage."""
    ends = {"F": table.virtual_stages - 1, "B": 0}
    return [key for key in table.when if table.stages > 1 and key.virtual != ends.get(key.slot, key.virtual)]


def sends_alone(table: Table) -> float:
    """Return the share of sends in a step without work at the same time on any stage. Sends of slot
    F run beside B and W of the same tick, and sends of B beside F of the next tick."""
    busy = {slot: {tick for key, tick in table.when.items() if key.slot == slot} for slot in SLOTS}
    of = [(key.slot, table.when[key]) for key in _sending(table)]
    alone = sum(tick + 1 not in busy["F"] if slot == "B" else tick not in busy["B"] | busy["W"] for slot, tick in of)
    return alone / (len(of) or 1)


@dataclasses.dataclass(frozen=True)
class Cost:
    """A table with its costs at given times."""

    table: Table
    times: Times = Times()

    @functools.cached_property
    def lock_step(self) -> TimedTable:
        """The table over time as a single program: a slot used on any stage takes its time on all stages."""
        bars, now = [], 0.0
        for tick in range(self.table.ticks):
            for slot in SLOTS:
                rows = enumerate(self.table.rows)
                ops = [(stage, op) for stage, row in rows for op in row[tick] if op.slot == slot]
                takes = self.times.of(slot, self.table) if ops else 0.0
                bars += [TimedOp(stage, op, now, now + takes) for stage, op in ops]
                now += takes
        return TimedTable(self.table.stages, tuple(bars))

    def __str__(self) -> str:
        return f"{self.table}, {percent(self.lock_step.idle)} idle in lock-step"

    def figures(self) -> list[tuple[str, str]]:
        """Return the name and value of each figure."""
        sent_by = [sum(both) for both in zip(*sends(self.table).values(), strict=True)]
        inputs, gradients = ([max(ticks) for ticks in kept(self.table)] for kept in (inputs_kept, gradients_kept))
        return [
            ("ticks", f"{self.table.ticks:,}"),
            ("idle in lock-step", percent(self.lock_step.idle)),
            ("microbatches kept, by stage", _spaced(inputs)),
            ("gradients kept, by stage", _spaced(gradients)),
            ("sends, by stage", _spaced(sent_by)),
            ("sends with no work beside them", percent(sends_alone(self.table))),
        ]


def compared(costs: Sequence[Cost]) -> list[list[str]]:
    """Return the figures of tables side by side: a row of names, and a row for each figure."""
    head = ["", *(cost.table.name for cost in costs)]
    figures = zip(*(cost.figures() for cost in costs), strict=True)
    return [head, *([each[0][0], *(value for _, value in each)] for each in figures)]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _spaced(counts: Iterable[int]) -> str:
    return " ".join(f"{count:,}" for count in counts)
