"""Reduce-scatter and all-gather around a ring, both directions at once; an all-reduce is both in sequence.

Arrays are `[parts, 2, rows, 128]`: half of each part goes each way, so that both links of a device are busy. Direction
0 sends to the next rank, direction 1 to the previous rank. Each step has its own slot and semaphore. Nothing is written
twice, so no device waits for another to make room, and a device that is ahead can't be taken for one step behind.
"""

from __future__ import annotations

from typing import Any

from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jshard.kernels.pallas_call import KernelCost, Result, launch_once
from jshard.kernels.tpu import dma
from jshard.kernels.tpu.dma import DMA, HBM, Group, Index, Semaphores


def semaphores(n: int) -> Semaphores:
    """Return the semaphores of a ring of `n`: a send semaphore per direction, a receive semaphore per step and direction."""
    return Semaphores(DMA((2,)), DMA((n - 1, 2)))


def ring_copy(group: Group, rank: Any, source: Ref, target: Ref, sems: Semaphores, step: Any, direction: Index) -> Any:
    """Return the description of a ring step's copy to the neighbour in `direction`."""
    pair = Semaphores(sems.sent.at[direction], sems.arrived.at[step, direction])
    return dma.remote_copy(source, target, pair, group.next_device(rank, direction))


def scatter(group: Group, rank: Index, x_ref: Ref, slots: Ref, sems: Semaphores) -> None:
    """Sum x over the group; the last slot ends as this device's part of the sum.

    Partial sums travel through `slots[step, direction]`, and each device adds its own numbers on the way.
    The sum of a part starts one device past its owner: after n - 1 hops it is complete and at the owner.
    """
    n, rows = group.size, x_ref.shape[2]

    def part(direction: int, step: Index) -> Any:
        """Return the owner of the sum at `step`: each hop brings the sum of the device one further back."""
        return group.shift(rank, -1 - step if direction == 0 else 1 + step - n)

    def copy(direction: int, step: Index) -> Any:
        return ring_copy(group, rank, slots.at[step, direction], slots.at[step + 1, direction], sems, step, direction)

    for direction in (0, 1):  # slot 0 has this device's first send, slot s + 1 the arrival of step s
        mine = part(direction, 0)
        dma.in_blocks(rows, lambda r, d=direction, mine=mine: _store(slots.at[0, d], r, x_ref[mine, d, r, :]))
        copy(direction, 0).start()

    @pl.loop(0, n - 1)  # rolled, so that a long ring compiles as fast as a short one
    def _(step: Index) -> None:
        for direction in (0, 1):  # additions of one direction overlap with transfers of the other
            copy(direction, step).wait_recv()
            mine, slot = part(direction, step + 1), slots.at[step + 1, direction]
            dma.in_blocks(rows, lambda r, mine=mine, slot=slot, d=direction: _add(slot, r, x_ref[mine, d, r, :]))

            @pl.when(step + 1 < n - 1)  # in the last step the sum is this device's own
            def _(direction: int = direction) -> None:
                copy(direction, step + 1).start()

    # Wait only now: no slot is written again, so a wait in the loop would cost time and protect nothing.
    for direction in (0, 1):
        pl.loop(0, n - 1)(lambda step, d=direction: copy(d, step).wait_send())


def _store(slot: Ref, rows: object, x: Array) -> None:
    slot[rows, :] = x.astype(slot.dtype)


def _add(slot: Ref, rows: object, x: Array) -> None:
    slot[rows, :] += x.astype(slot.dtype)


def finish(group: Group, slots: Ref, y_ref: Ref) -> None:
    """Round the sums in the last slot of `scatter`, once, into `y_ref[2, rows, 128]`."""
    last = slots.at[group.size - 1]
    for direction in (0, 1):
        dma.in_blocks(y_ref.shape[1], lambda r, d=direction: _store(y_ref.at[d], r, last[d, r, :]))


def gather(group: Group, rank: Index, y_ref: Ref, sems: Semaphores) -> None:
    """Fill `y_ref[n, 2, ...]`, where each device starts with its own part, with the parts of all devices."""
    n = group.size

    def copy(direction: int, step: Index) -> Any:
        part = y_ref.at[group.shift(rank, -step if direction == 0 else step - n), direction]
        return ring_copy(group, rank, part, part, sems, step, direction)

    @pl.loop(0, n - 1)
    def _(step: Index) -> None:
        for direction in (0, 1):
            copy(direction, step).start()
        for direction in (0, 1):  # the next step sends the arrivals of this step
            copy(direction, step).wait_recv()

    for direction in (0, 1):
        pl.loop(0, n - 1)(lambda step, d=direction: copy(d, step).wait_send())


def reduce_scatter(x: Array, group: Group, payload: object, *, out_dtype: DTypeLike) -> Array:
    """Sum `x[n, 2, rows, 128]` over the group and return this device's part, `[2, rows, 128]`.

    Partial sums travel in `accumulator_dtype`, so that a bfloat16 sum is rounded once; they cost twice the bytes.
    """
    accumulator, part = dma.accumulator_dtype(x.dtype), x.size // group.size
    cost = KernelCost(
        "reduce_scatter",
        "ring",
        payload,
        wire=part * (group.size - 1) * accumulator.itemsize,
        vmem=x.size * (x.dtype.itemsize + accumulator.itemsize) + part * 4,
    )
    result = Result(x.shape[1:], out_dtype)
    scratch = [pltpu.VMEM(x.shape, accumulator), semaphores(group.size)]
    return launch_once(_reduce_scatter, x, result, group, cost, scratch, partners="neighbours")


def _reduce_scatter(group: Group, rank: Index, x_ref, y_ref, slots, sems) -> None:
    scatter(group, rank, x_ref, slots, sems)
    finish(group, slots, y_ref)


def all_gather(x: Array, group: Group, payload: object) -> Array:
    """Gather `x[2, rows, 128]` of all devices, `[n, 2, rows, 128]`, from HBM to HBM: nothing needs to fit VMEM."""
    cost = KernelCost("all_gather", "ring", payload, wire=x.size * x.dtype.itemsize * (group.size - 1))
    result = Result((group.size, *x.shape), x.dtype, group.mesh_axes)
    scratch = [semaphores(group.size)]
    return launch_once(_all_gather, x, result, group, cost, scratch, partners="neighbours", memory=HBM)


def _all_gather(group: Group, rank: Index, x_ref, y_ref, sems) -> None:
    pltpu.sync_copy(x_ref, y_ref.at[rank])  # a part has the same place on all devices, and is sent from there
    gather(group, rank, y_ref, sems)
