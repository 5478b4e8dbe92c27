"""A table as numbers that one loop over its ticks reads: who does what in each tick, and where in its buffers that lies."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping

from jshard.schedules.table import StageOp, Table

NONE = -1


@dataclasses.dataclass(frozen=True)
class Steps:
    """Columns of ticks, each a number for every stage, NONE where it has nothing to do there.

    Of slot F, as of others: `F_microbatch`, `F_chunk`, the place `F_input` of its input, NONE where that is the batch. What
    slot F sends is put at `F_arrives` as the tick ends, what slot B has sent in the tick before at `B_arrives`, before slot B.
    B and W have `_gradient`, the place of the gradient of their output, NONE where B makes it of the loss: it is put at
    `B_loss` before slot W, which needs it. What F keeps for both lies at `_kept`, what B leaves for W at `_left`, and what the
    last F of a microbatch makes at `_output`, until the loss is computed of it.
    """

    columns: Mapping[str, list[list[int]]]
    inputs: int  # places in the buffer of inputs
    gradients: int
    kept: int
    left: int
    outputs: int


def steps(table: Table, *, recomputes: bool = False) -> Steps:
    """Number what each stage does, and give what it keeps places that are free then: as few as it ever keeps at once. An input
    is kept until slot F has used it, and where a table `recomputes` its chunks, as long as what F keeps is otherwise."""
    last, end = table.virtual_stages - 1, table.last_slot
    inputs = {key: span for key, span in table.inputs("F", end if recomputes else "F").items() if key.virtual}
    # of the last stage's own only where W, which may be in the same tick, takes it after B
    gradients = {key: span for key, span in table.inputs("B", end).items() if key.virtual < last or end == "W"}
    outputs = {key: span for key, span in table.spans("F", "B").items() if key.virtual == last}
    places = [
        _places(each, table.stages)
        for each in (inputs, gradients, table.spans("F", end), table.spans("B", "W"), outputs)
    ]
    (at_input, *_), (at_gradient, *_), (at_kept, *_), (at_left, *_), (at_output, *_) = places
    every = ("microbatch", "chunk", "input", "kept")
    also = {
        "F": ("arrives", "output"),
        "B": ("arrives", "output", "gradient", "loss", "left"),
        "W": ("gradient", "left"),
    }
    names = [f"{slot}_{what}" for slot in "FBW" for what in (*every, *also[slot])]
    columns = {name: [[NONE] * table.stages for _ in range(table.ticks)] for name in names}
    for key, tick in table.when.items():
        chunk, stage = divmod(key.virtual, table.stages)
        forward, back = key._replace(slot="F"), key._replace(slot="B")
        found = {
            "microbatch": key.microbatch,
            "chunk": chunk,
            "input": at_input.get(forward, NONE),
            "kept": at_kept[forward],
        }
        if key.slot != "F":
            found |= {"gradient": at_gradient.get(back, NONE), "left": at_left.get(back, NONE)}
        if key.slot != "W":
            found["output"] = at_output.get(forward, NONE)
        if key.slot == "B" and key.virtual == last:
            found |= {"gradient": NONE, "loss": at_gradient.get(back, NONE)}
        for what, number in found.items():
            columns[f"{key.slot}_{what}"][tick][stage] = number
        # what goes out of this stage arrives at another: of F beside slot B, of B beside the next slot F
        if key.slot == "F" and key.virtual < last:
            columns["F_arrives"][tick][(stage + 1) % table.stages] = at_input[key._replace(virtual=key.virtual + 1)]
        if key.slot == "B" and key.virtual:
            columns["B_arrives"][tick + 1][(stage - 1) % table.stages] = at_gradient[
                key._replace(virtual=key.virtual - 1)
            ]
    return Steps(columns, *(count for _, count in places))


def _places(kept: Mapping[StageOp, tuple[int, int]], stages: int) -> tuple[dict[StageOp, int], int]:
    """Give what a stage keeps from one tick to another, both included, a place that nothing else has meanwhile."""
    places, most = {}, 0
    for stage in range(stages):
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # the tick in which a place is needed last
        count = 0
        own = sorted((when, key) for key, when in kept.items() if key.virtual % stages == stage)
        for (begins, ends), key in own:
            while busy and busy[0][0] < begins:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                free, count = [count], count + 1
            places[key] = heapq.heappop(free)
            heapq.heappush(busy, (ends, places[key]))
        most = max(most, count)
    return places, most
