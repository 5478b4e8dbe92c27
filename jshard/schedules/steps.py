"""A schedule as columns of numbers for one loop over ticks: operations, and their places in buffers."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping

from jshard.schedules.table import StageOp, Table

NONE = -1


@dataclasses.dataclass(frozen=True)
class Steps:
    """Columns over ticks, with a number for every stage: NONE if the stage has nothing to do.

    `F_microbatch`, `F_chunk` and `F_input` (the place of its input, NONE for the batch) belong to slot F,
    and other slots have the same. Sends of slot F are put at `F_arrives` at the end of the tick. Sends of
    slot B in the tick before are put at `B_arrives`, before slot B. In B and W, `_gradient` is the place
    of their output's gradient, NONE if B computes it from the loss: then it is put at `B_loss`, before
    slot W needs it. Values that F keeps for both are at `_kept`, and values that B leaves for W are at
    `_left`. The output of a microbatch's last F is at `_output`, until its loss is computed.
    """

    columns: Mapping[str, list[list[int]]]
    inputs: int  # places in the buffer of inputs
    gradients: int
    kept: int
    left: int
    outputs: int


def steps(table: Table, *, recomputes: bool = False) -> Steps:
    """Number the operations of each stage, and place kept values in as few buffer places as possible.
    An input is kept until slot F has used it, or with `recomputes`, as long as values kept by F."""
    last, end = table.virtual_stages - 1, table.last_slot
    inputs = {key: span for key, span in table.inputs("F", end if recomputes else "F").items() if key.virtual}
    # the last stage keeps its own gradient only for W, which follows B
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
        # sends of this stage arrive at another: of F beside slot B, of B beside the next slot F
        if key.slot == "F" and key.virtual < last:
            columns["F_arrives"][tick][(stage + 1) % table.stages] = at_input[key._replace(virtual=key.virtual + 1)]
        if key.slot == "B" and key.virtual:
            columns["B_arrives"][tick + 1][(stage - 1) % table.stages] = at_gradient[
                key._replace(virtual=key.virtual - 1)
            ]
    return Steps(columns, *(count for _, count in places))


def _places(kept: Mapping[StageOp, tuple[int, int]], stages: int) -> tuple[dict[StageOp, int], int]:
    """Assign each value a place for its span of ticks (both included), with no other value there."""
    places, most = {}, 0
    for stage in range(stages):
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # last tick of use, and the place
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
