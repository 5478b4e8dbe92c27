"""The two halves of a ring, in both directions at once, and the ops that are one half: reduce-scatter and all-gather.

Way 0 sends to the next device, way 1 to the one before. Each step has a slot and a semaphore of its own: nothing is
written twice, so no device ever waits for another to have made room, and one that is ahead can't be mistaken.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jshard.kernels.pallas_call import Shape, Told, launch
from jshard.kernels.tpu.dma import COPIED, FAR, HERE, SCALAR, Group, each, in_blocks, meet, send, wide

LONGEST = 64  # 4 semaphores a step of about 500 that there are


def semaphores(n: int) -> tuple[Any, Any]:
    """Sent, one each way; arrived, one for each step and way."""
    return COPIED((2,)), COPIED((n - 1, 2))


def scatter(group: Group, rank: Any, x_ref: Any, slots: Any, sent: Any, arrived: Any) -> None:
    """Partial sums go around `slots[step, way]`, each device adding its own; the last slot ends as this device's part.

    x is `[n, 2, rows, 128]`. A part starts one device past its owner, so that it is whole when it gets there.
    """
    n, rows = group.size, x_ref.shape[2]

    def part(way: int, step: Any) -> Any:
        return group.after(rank, -1 - step) if way == 0 else group.after(rank, 1 + step - n)

    def copy(way: int, step: Any) -> Any:
        to = group.device(group.after(rank, 1 if way == 0 else -1))
        return send(slots.at[step, way], slots.at[step + 1, way], sent.at[way], arrived.at[step, way], to)

    for way in (0, 1):
        mine = part(way, 0)
        in_blocks(rows, lambda r, way=way, mine=mine: _put(slots.at[0, way], r, x_ref[mine, way, r, :]))
        copy(way, 0).start()

    def step_(step: Any) -> None:
        for way in (0, 1):
            copy(way, step).wait_recv()
            mine, slot = part(way, step + 1), slots.at[step + 1, way]
            in_blocks(rows, lambda r, mine=mine, slot=slot, way=way: _add(slot, r, x_ref[mine, way, r, :]))

            @pl.when(step + 1 < n - 1)
            def _(way: int = way) -> None:
                copy(way, step + 1).start()

    each(0, n - 1, step_)
    for way in (0, 1):
        each(0, n - 1, lambda step, way=way: copy(way, step).wait_send())


def _put(slot: Any, rows: Any, x: Array) -> None:
    slot[rows, :] = x.astype(slot.dtype)


def _add(slot: Any, rows: Any, x: Array) -> None:
    slot[rows, :] += x.astype(slot.dtype)


def finish(group: Group, slots: Any, y_ref: Any) -> None:
    """The whole sums of this device's part, rounded once into `y_ref[2, rows, 128]`."""
    last = slots.at[group.size - 1]
    for way in (0, 1):
        in_blocks(y_ref.shape[1], lambda r, way=way: _put(y_ref.at[way], r, last[way, r, :]))


def gather(group: Group, rank: Any, y_ref: Any, sent: Any, arrived: Any) -> None:
    """`y_ref[n, 2, ...]`, of which this device has its own part, filled with everyone's."""
    n = group.size

    def copy(way: int, step: Any) -> Any:
        part = group.after(rank, -step if way == 0 else step - n)
        to = group.device(group.after(rank, 1 if way == 0 else -1))
        return send(y_ref.at[part, way], y_ref.at[part, way], sent.at[way], arrived.at[step, way], to)

    def step_(step: Any) -> None:
        for way in (0, 1):
            copy(way, step).start()
        for way in (0, 1):
            copy(way, step).wait_recv()

    each(0, n - 1, step_)
    for way in (0, 1):
        each(0, n - 1, lambda step, way=way: copy(way, step).wait_send())


def reduce_scatter(x: Array, group: Group, payload: Any, *, out_dtype: Any = None) -> Array:
    """`x[n, 2, rows, 128]` summed over the group; of the parts, this device's `[2, rows, 128]`."""
    n, adds = group.size, wide(x.dtype)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    part = x.size // n
    told = Told("reduce_scatter", "ring", group.mesh_axes, payload, wire=part * (n - 1) * adds.itemsize)
    (y,) = launch(
        functools.partial(_reduce_scatter, group=group),
        [x],
        [Shape(x.shape[1:], out_dtype)],
        told=told,
        here=group.here(),
        in_specs=[SCALAR, HERE],
        out_specs=[HERE],
        scratch=[pltpu.VMEM(x.shape, adds), *semaphores(n)],
        collective_id=group.collective_id,
        vmem=x.size * (x.dtype.itemsize + adds.itemsize) + part * 4,
    )
    return y


def _reduce_scatter(here_ref, x_ref, y_ref, slots, sent, arrived, *, group: Group) -> None:
    group, rank = group.entered(here_ref)
    meet(group, rank, "neighbours")
    scatter(group, rank, x_ref, slots, sent, arrived)
    finish(group, slots, y_ref)
    meet(group, rank, "neighbours")


def all_gather(x: Array, group: Group, payload: Any) -> Array:
    """`[n, 2, rows, 128]` of everyone's `x[2, rows, 128]`, without a pass through VMEM."""
    n, size = group.size, x.size * x.dtype.itemsize
    told = Told("all_gather", "ring", group.mesh_axes, payload, wire=size * (n - 1))
    (y,) = launch(
        functools.partial(_all_gather, group=group),
        [x],
        [Shape((n, *x.shape), x.dtype, group.mesh_axes)],
        told=told,
        here=group.here(),
        in_specs=[SCALAR, FAR],
        out_specs=[FAR],
        scratch=[COPIED, *semaphores(n)],
        collective_id=group.collective_id,
    )
    return y


def _all_gather(here_ref, x_ref, y_ref, copied, sent, arrived, *, group: Group) -> None:
    group, rank = group.entered(here_ref)
    meet(group, rank, "neighbours")
    mine = pltpu.make_async_copy(x_ref, y_ref.at[rank], copied)
    mine.start()
    mine.wait()
    gather(group, rank, y_ref, sent, arrived)
    meet(group, rank, "neighbours")
