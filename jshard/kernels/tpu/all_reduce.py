"""All-reduce on TPUs: every device's part goes straight to everyone, or by parts, or around the ring both ways.

All work in VMEM on whole tiles (`jshard.kernels.tiles`). The sum is taken in float32 (int32) and rounded once.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from jshard.kernels.pallas_call import Shape, Told, launch
from jshard.kernels.tpu import ring
from jshard.kernels.tpu.dma import COPIED, HERE, SCALAR, Group, each, in_blocks, meet, send, wide


def one_shot(x: Array, group: Group, payload: Any, *, rounds: int = 1) -> Array:
    """`x[rows, 128]` summed: each device pushes all of its x to all others, and adds what it has in rank order."""
    n, size = group.size, x.size * x.dtype.itemsize
    told = Told("all_reduce", "one_shot", group.mesh_axes, payload, wire=size * (n - 1))
    body = functools.partial(_one_shot, group=group, rounds=rounds)
    return _launched(body, x, group, told, [pltpu.VMEM((n, *x.shape), x.dtype), COPIED, COPIED], (n + 2) * size)


def _launched(body: Any, x: Array, group: Group, told: Told, scratch: list[Any], vmem: int) -> Array:
    """All of x in VMEM, and as much for the sum, which everyone has."""
    (y,) = launch(
        body,
        [x],
        [Shape(x.shape, x.dtype, group.mesh_axes)],
        told=told,
        here=group.here(),
        in_specs=[SCALAR, HERE],
        out_specs=[HERE],
        scratch=scratch,
        collective_id=group.collective_id,
        vmem=vmem,
    )
    return y


def _one_shot(here_ref, x_ref, y_ref, slots, sent, arrived, *, group: Group, rounds: int) -> None:
    group, rank = group.entered(here_ref)
    n = group.size
    meet(group, rank, "everyone")

    def round_(_: Any) -> None:
        slots[rank] = x_ref[...]

        def push(step: Any) -> Any:
            return send(x_ref, slots.at[rank], sent, arrived, group.device(group.after(rank, step)))

        each(1, n, lambda step: push(step).start())
        each(1, n, lambda step: push(step).wait())  # copies of one size: n - 1 arrivals are all of them
        in_blocks(x_ref.shape[0], lambda rows: _sum(slots, rows, y_ref, n))
        meet(group, rank, "everyone")  # everyone has read its slots: the next round, or call, may write them

    round_(0) if rounds == 1 else each(0, rounds, round_)


def _sum(slots: Any, rows: Any, y_ref: Any, n: int) -> None:
    """In rank order, so that every device gets the same bits."""
    first = slots[0, rows, :].astype(wide(slots.dtype))

    def add(rank: Any, total: Any) -> Any:
        return total + slots[rank, rows, :].astype(total.dtype)

    total = lax.fori_loop(1, n, add, first)
    y_ref[rows, :] = total.astype(y_ref.dtype)


def two_shot(x: Array, group: Group, payload: Any, *, rounds: int = 1) -> Array:
    """`x[n, rows, 128]` summed: part r of everyone goes to device r, which adds in rank order and pushes the sum to all."""
    n, size = group.size, x.size * x.dtype.itemsize
    told = Told("all_reduce", "two_shot", group.mesh_axes, payload, wire=2 * (size // n) * (n - 1))
    body = functools.partial(_two_shot, group=group, rounds=rounds)
    scratch = [pltpu.VMEM(x.shape, x.dtype), COPIED, COPIED, COPIED, COPIED]
    return _launched(body, x, group, told, scratch, 3 * size)


def _two_shot(here_ref, x_ref, y_ref, slots, sent, arrived, sent2, arrived2, *, group: Group, rounds: int) -> None:
    group, rank = group.entered(here_ref)
    n = group.size
    meet(group, rank, "everyone")

    def round_(_: Any) -> None:
        slots[rank] = x_ref[rank]

        def scatter(step: Any) -> Any:
            peer = group.after(rank, step)
            return send(x_ref.at[peer], slots.at[rank], sent, arrived, group.device(peer))

        def gather(step: Any) -> Any:
            mine = y_ref.at[rank]
            return send(mine, mine, sent2, arrived2, group.device(group.after(rank, step)))

        each(1, n, lambda step: scatter(step).start())
        each(1, n, lambda step: scatter(step).wait())
        in_blocks(x_ref.shape[1], lambda rows: _sum(slots, rows, y_ref.at[rank], n))
        each(1, n, lambda step: gather(step).start())
        each(1, n, lambda step: gather(step).wait())
        meet(group, rank, "everyone")

    round_(0) if rounds == 1 else each(0, rounds, round_)


def around(x: Array, group: Group, payload: Any, *, rounds: int = 1) -> Array:
    """`x[n, 2, rows, 128]` summed by a reduce-scatter and an all-gather around the ring, half of each part each way."""
    n, half = group.size, x.size // x.shape[0] // 2
    adds = wide(x.dtype)
    wire = 2 * (n - 1) * half * (adds.itemsize + x.dtype.itemsize)
    told = Told("all_reduce", "ring", group.mesh_axes, payload, wire=wire)
    body = functools.partial(_around, group=group, rounds=rounds)
    scratch = [pltpu.VMEM(x.shape, adds), *ring.semaphores(n), *ring.semaphores(n)]
    return _launched(body, x, group, told, scratch, x.size * (2 * x.dtype.itemsize + adds.itemsize))


def _around(here_ref, x_ref, y_ref, slots, sent, arrived, sent2, arrived2, *, group: Group, rounds: int) -> None:
    group, rank = group.entered(here_ref)
    meet(group, rank, "neighbours")

    def round_(_: Any) -> None:
        ring.scatter(group, rank, x_ref, slots, sent, arrived)
        ring.finish(group, slots, y_ref.at[rank])
        ring.gather(group, rank, y_ref, sent2, arrived2)
        meet(group, rank, "neighbours")

    round_(0) if rounds == 1 else each(0, rounds, round_)
