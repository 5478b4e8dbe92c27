"""All-reduce on TPUs by two algorithms; docs/kernels.md has their traffic and the sizes where each wins.

Everything is in VMEM, in tiles (`jshard.kernels.tiles`). Sums are taken in float32 (integers: int32) and rounded once.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jshard.kernels.pallas_call import KernelCost, Result, launch_once
from jshard.kernels.tpu import dma, ring
from jshard.kernels.tpu.dma import DMA, Group, Index, Semaphores


def one_shot(x: Array, group: Group, payload: object, *, rounds: int = 1) -> Array:
    """Sum `x[rows, 128]`: each device sends its whole x to every other device, and adds all copies in rank order.

    `rounds` repeats it on the same buffers, for tests of the barrier between rounds.
    """
    n, size = group.size, x.size * x.dtype.itemsize
    cost = KernelCost("all_reduce", "one_shot", payload, wire=size * (n - 1), vmem=(n + 2) * size)
    scratch = [pltpu.VMEM((n, *x.shape), x.dtype), Semaphores(DMA, DMA)]
    body = functools.partial(_one_shot, rounds=rounds)
    return launch_once(body, x, _sum_of(x, group), group, cost, scratch, partners="everyone")


def _sum_of(x: Array, group: Group) -> Result:
    return Result(x.shape, x.dtype, group.mesh_axes)  # equal on every device of the group


def _one_shot(group: Group, rank: Index, x_ref, y_ref, slots, sems, *, rounds: int) -> None:
    def push(by: Index) -> Any:
        return dma.remote_copy(x_ref, slots.at[rank], sems, group.device_id(group.shift(rank, by)))

    def run_round() -> None:
        slots[rank] = x_ref[...]  # the device's own x is added in rank order too
        pl.loop(1, group.size)(lambda by: push(by).start())
        # Copies are of equal size and share a semaphore: n - 1 waits cover all of them, in any order of arrival.
        pl.loop(1, group.size)(lambda by: push(by).wait())
        dma.in_blocks(x_ref.shape[0], lambda rows: _sum(slots, rows, y_ref, group.size))

    run_round()
    if rounds == 1:
        return

    @pl.loop(1, rounds)
    def _(_: Index) -> None:
        dma.barrier(group, rank, "everyone")  # all have read their slots; this round overwrites them
        run_round()


def _sum(slots: Ref, rows: object, y_ref: Ref, n: int) -> None:
    """Sum the slots in rank order, so that every device gets the same bits."""
    first = slots[0, rows, :].astype(dma.accumulator_dtype(slots.dtype))

    def add(rank: Index, total: Array) -> Any:
        return total + slots[rank, rows, :].astype(total.dtype)

    y_ref[rows, :] = lax.fori_loop(1, n, add, first).astype(y_ref.dtype)


def bidirectional_ring(x: Array, group: Group, payload: object) -> Array:
    """Sum `x[n, 2, rows, 128]` by a reduce-scatter and an all-gather around the ring, half of each part each way."""
    n, half, accumulator = group.size, x.size // x.shape[0] // 2, dma.accumulator_dtype(x.dtype)
    cost = KernelCost(
        "all_reduce",
        "ring",
        payload,
        wire=2 * (n - 1) * half * (accumulator.itemsize + x.dtype.itemsize),
        vmem=x.size * (2 * x.dtype.itemsize + accumulator.itemsize),
    )
    # The two halves have semaphores of their own: a neighbour that is ahead may gather while this device still scatters.
    scratch = [pltpu.VMEM(x.shape, accumulator), ring.semaphores(n), ring.semaphores(n)]
    return launch_once(_bidirectional_ring, x, _sum_of(x, group), group, cost, scratch, partners="neighbours")


def _bidirectional_ring(group: Group, rank: Index, x_ref, y_ref, slots, scatter_sems, gather_sems) -> None:
    ring.scatter(group, rank, x_ref, slots, scatter_sems)
    ring.finish(group, slots, y_ref.at[rank])
    ring.gather(group, rank, y_ref, gather_sems)
