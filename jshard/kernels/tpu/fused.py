"""Products whose wire runs under the arithmetic: a gather before, or a scatter after, around the ring both ways.

The grid is (step, way, tile of columns). Way 0 passes on to the next device, way 1 to the one before, each half the rows
of a part. Each step has a place of its own in HBM for what arrives, so nothing is written twice and nobody waits for room.
Tiles of w stream through VMEM by Pallas's own pipeline while copies of rows are under way.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jshard.kernels.kernel_traffic import Schedule
from jshard.kernels.pallas_call import Shape, Told, launch
from jshard.kernels.tiles import LANES
from jshard.kernels.tpu.dma import COPIED, FAR, Group, each, meet, send, wide
from jshard.kernels.tpu.ring import semaphores


def columns(rows: int, inputs: int, outputs: int, size: int, room: int) -> int:
    """How many columns a tile has so that everything fits in `room` bytes of VMEM; 0 if nothing does."""
    for tile in (1024, 512, 256, LANES):
        tile = min(tile, -(-outputs // LANES) * LANES)
        if 2 * size * (rows * inputs + inputs * tile) + 24 * rows * tile <= room:
            return tile
    return 0


def _to(group: Group, rank: Any, way: Any) -> Any:
    return group.device(group.after(rank, 1 - 2 * way))


# -- gather, then multiply --


def gather_matmul(
    x: Array, w_kn: Array, group: Group, payload: Any, *, tile: int, out_dtype: Any
) -> tuple[Array, Array]:
    """`x[2, rows, K]` of everyone times w: `[n, 2, rows, N]`; and the gathered x, which is there anyway."""
    n, (_, rows, inputs), outputs = group.size, x.shape, w_kn.shape[1]
    tiles, size = outputs // tile, x.dtype.itemsize
    # A half is sent on when its first tile is multiplied, and waited for before the last tile of the other half.
    under = Schedule(n - 1, 2, (2 * tiles - 1) * 2 * rows * inputs * tile, str(x.dtype))
    told = Told("all_gather_matmul", "fused", group.mesh_axes, payload, x.size * size * (n - 1), under)
    y, gathered = launch(
        functools.partial(_gather_matmul, group=group, tiles=tiles),
        [x, w_kn],
        [Shape((n, 2, rows, outputs), out_dtype), Shape((n, *x.shape), x.dtype)],
        told=told,
        here=group.here(),
        prefetched=1,
        grid=(n, 2, tiles),
        in_specs=[FAR, pl.BlockSpec((inputs, tile), lambda s, d, j, here: (0, j))],
        out_specs=[
            pl.BlockSpec(
                (None, None, rows, tile), lambda s, d, j, here: (_gathered_part(group, here[0], d, s), d, 0, j)
            ),
            FAR,
        ],
        scratch=[pltpu.VMEM((2, rows, inputs), x.dtype), COPIED((2,)), COPIED, *semaphores(n)],
        collective_id=group.collective_id,
        flops=4 * n * rows * inputs * outputs,
        vmem=2 * size * (rows * inputs + inputs * tile) + 8 * rows * tile,
    )
    return y, gathered


def _gathered_part(group: Group, rank: Any, way: Any, step: Any) -> Any:
    """Whose rows are at hand: way 0 brings those of the devices before, way 1 of those after."""
    return group.after(rank, step * (2 * way - 1))


def _gather_matmul(
    here_ref, x_ref, w_ref, y_ref, all_ref, rows, loaded, copied, sent, arrived, *, group, tiles
) -> None:
    group, rank = group.entered(here_ref)
    n = group.size
    step, way, tile = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    def pass_on(way: Any, step: Any) -> Any:
        part = all_ref.at[_gathered_part(group, rank, way, step), way]
        return send(part, part, sent.at[way], arrived.at[step, way], _to(group, rank, way))

    def load(way: Any, step: Any) -> Any:
        return pltpu.make_async_copy(
            all_ref.at[_gathered_part(group, rank, way, step), way], rows.at[way], loaded.at[way]
        )

    @pl.when((step == 0) & (way == 0) & (tile == 0))
    def _() -> None:
        meet(group, rank, "neighbours")
        mine = pltpu.make_async_copy(x_ref, all_ref.at[rank], copied)
        mine.start()
        mine.wait()
        load(0, 0).start()

    @pl.when(tile == 0)
    def _() -> None:
        load(way, step).wait()

        @pl.when(step < n - 1)
        def _() -> None:
            pass_on(way, step).start()

    @pl.when((tile == tiles - 1) & ((step < n - 1) | (way == 0)))
    def _() -> None:  # the rows that come next, while this tile is multiplied
        next_way, next_step = 1 - way, step + way

        @pl.when(next_step > 0)
        def _() -> None:
            pass_on(next_way, next_step - 1).wait_recv()

        load(next_way, next_step).start()

    y_ref[...] = jnp.dot(rows[way], w_ref[...], preferred_element_type=wide(w_ref.dtype)).astype(y_ref.dtype)

    @pl.when((step == n - 1) & (way == 1) & (tile == tiles - 1))
    def _() -> None:
        for which in (0, 1):
            each(0, n - 1, lambda s, which=which: pass_on(which, s).wait_send())
        meet(group, rank, "neighbours")


# -- multiply, then scatter --


def matmul_scatter(x: Array, w_kn: Array, group: Group, payload: Any, *, tile: int, out_dtype: Any) -> Array:
    """`x[n, 2, rows, K]` times w, summed over the group; of the parts this device's `[2, rows, N]`."""
    (n, _, rows, inputs), outputs = x.shape, w_kn.shape[1]
    tiles, size, adds = outputs // tile, x.dtype.itemsize, wide(x.dtype)
    wire = (n - 1) * 2 * rows * outputs * adds.itemsize
    # A tile leaves when it is multiplied. It must be gone two products later, for its buffer, and all tiles of a half must
    # have arrived when the other half is multiplied.
    under = Schedule(n - 1, 2, min(tiles + 1, 2 * tiles - 1) * 2 * rows * inputs * tile, str(x.dtype))
    told = Told("matmul_reduce_scatter", "fused", group.mesh_axes, payload, wire, under)

    def part(s: Any, d: Any, j: Any, here: Any) -> tuple[Any, ...]:
        return group.after(here[0], (2 * d - 1) * (s + 1)), d, 0, 0

    y, _ = launch(
        functools.partial(_matmul_scatter, group=group, tiles=tiles, tile=tile),
        [x, w_kn],
        [Shape((2, rows, outputs), out_dtype), Shape((n - 1, 2, tiles, rows, tile), adds)],
        told=told,
        here=group.here(),
        prefetched=1,
        grid=(n, 2, tiles),
        in_specs=[
            pl.BlockSpec((None, None, rows, inputs), part),
            pl.BlockSpec((inputs, tile), lambda s, d, j, here: (0, j)),
        ],
        out_specs=[FAR, FAR],
        scratch=[
            pltpu.VMEM((2, rows, tile), adds),
            pltpu.VMEM((rows, tile), adds),
            pltpu.VMEM((2, rows, tile), out_dtype),
            COPIED,
            COPIED((2,)),
            *semaphores(n),
        ],
        collective_id=group.collective_id,
        flops=4 * n * rows * inputs * outputs,
        vmem=2 * size * (rows * inputs + inputs * tile) + 20 * rows * tile,
    )
    return y


def _matmul_scatter(
    here_ref, x_ref, w_ref, y_ref, partial_ref, leaving, got, whole, loaded, stored, sent, arrived, *, group, tiles, tile
) -> None:  # fmt: skip
    group, rank = group.entered(here_ref)
    n = group.size
    step, way, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    count = (step * 2 + way) * tiles + j
    turn = lax.rem(count, 2)  # of two buffers

    def pass_on(step: Any, way: Any, j: Any, turn: Any) -> Any:
        slot = partial_ref.at[step, way, j]
        return send(leaving.at[turn], slot, sent.at[turn], arrived.at[step, way], _to(group, rank, way))

    def store(way: Any, j: Any, turn: Any) -> Any:
        there = y_ref.at[way, :, pl.ds(j * tile, tile)]
        return pltpu.make_async_copy(whole.at[turn], there, stored.at[turn])

    load = pltpu.make_async_copy(partial_ref.at[lax.max(step - 1, 0), way, j], got, loaded)

    @pl.when(count == 0)
    def _() -> None:
        meet(group, rank, "neighbours")

    @pl.when(step > 0)
    def _() -> None:
        @pl.when(j == 0)
        def _() -> None:  # all tiles of the step before, from the other side
            slot = partial_ref.at[step - 1, way]
            send(slot, slot, sent.at[0], arrived.at[step - 1, way], _to(group, rank, way)).wait_recv()

        load.start()

    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=leaving.dtype)

    @pl.when(step < n - 1)
    def _() -> None:
        @pl.when(count >= 2)
        def _() -> None:
            pass_on(step, way, j, turn).wait_send()

        leaving[turn] = product

        @pl.when(step > 0)
        def _() -> None:
            load.wait()
            leaving[turn] += got[...]

        pass_on(step, way, j, turn).start()

    @pl.when(step == n - 1)
    def _() -> None:
        @pl.when(count >= (n - 1) * 2 * tiles + 2)
        def _() -> None:
            store(way, j, turn).wait()

        load.wait()
        whole[turn] = (product + got[...]).astype(whole.dtype)
        store(way, j, turn).start()

    @pl.when(count == n * 2 * tiles - 1)
    def _() -> None:
        for which in (0, 1):
            pass_on(step - 1, way, j, which).wait_send()
            store(way, j, which).wait()
        meet(group, rank, "neighbours")
