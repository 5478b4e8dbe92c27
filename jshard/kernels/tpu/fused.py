"""Multiply while rows or sums travel the ring, both directions at once: all-gather then matmul, matmul then reduce-scatter.

The grid is (step, direction, tile of columns); half the rows of a part go each way. Each step has a slot of its own in HBM
for what arrives, so nothing is overwritten and no device waits for another to make room. Pallas's own pipeline streams the
tiles of w through VMEM while rows travel; their copies are written out below, as the pipeline knows of one device only.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jshard.kernels.kernel_traffic import Schedule
from jshard.kernels.pallas_call import KernelCost, Result, launch
from jshard.kernels.tiles import LANES
from jshard.kernels.tpu import dma
from jshard.kernels.tpu.dma import DMA, HBM, Group, Index, Semaphores
from jshard.kernels.tpu.ring import ring_copy, semaphores


def columns(rows: int, inputs: int, outputs: int, itemsize: int, budget: int) -> int:
    """Return the widest tile of columns with which a kernel fits `budget` bytes of VMEM; 0 if none does."""
    for tile in (1024, 512, 256, LANES):
        tile = min(tile, -(-outputs // LANES) * LANES)
        # x and w twice, as the pipeline keeps two of each; 24 bytes a number for results and sums in float32
        if 2 * itemsize * (rows * inputs + inputs * tile) + 24 * rows * tile <= budget:
            return tile
    return 0


def _w_tile(inputs: int, tile: int) -> pl.BlockSpec:
    return pl.BlockSpec((inputs, tile), lambda step, direction, j, coordinates: (0, j))


# -- gather, then multiply --


class GatherScratch(NamedTuple):
    """`rows` that are multiplied, by direction; semaphores of their copies, of the copy of one's own part, of the ring."""

    rows: Any
    loaded: Any
    copied: Any
    ring: Semaphores


def gather_matmul(
    x: Array, w_kn: Array, group: Group, payload: object, *, tile: int, out_dtype: DTypeLike
) -> tuple[Array, Array]:
    """Multiply `x[2, rows, K]` of all devices by w: `[n, 2, rows, N]`; also return the gathered x, which costs nothing more."""
    n, (_, rows, inputs), outputs = group.size, x.shape, w_kn.shape[1]
    tiles, itemsize = outputs // tile, x.dtype.itemsize

    def y_block(step: Any, direction: Any, j: Any, coordinates: Any) -> tuple[Any, ...]:
        return _part_at(group, coordinates[0], direction, step), direction, 0, j

    y, gathered = launch(
        functools.partial(_gather_matmul, group=group, tiles=tiles),
        [x, w_kn],
        [Result((n, 2, rows, outputs), out_dtype), Result((n, *x.shape), x.dtype)],
        pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,  # the coordinates, which index maps read: the order of parts depends on the rank
            grid=(n, 2, tiles),
            in_specs=[HBM, _w_tile(inputs, tile)],
            out_specs=(pl.BlockSpec((None, None, rows, tile), y_block), HBM),
            scratch_shapes=[GatherScratch(pltpu.VMEM((2, rows, inputs), x.dtype), DMA((2,)), DMA, semaphores(n))],
        ),
        group=group,
        cost=KernelCost(
            "all_gather_matmul",
            "fused",
            payload,
            wire=x.size * itemsize * (n - 1),
            # A half is sent on when its first tile is multiplied, and waited for before the last tile of the other half.
            schedule=Schedule(n - 1, 2, (2 * tiles - 1) * 2 * rows * inputs * tile, str(x.dtype)),
            flops=4 * n * rows * inputs * outputs,
            vmem=2 * itemsize * (rows * inputs + inputs * tile) + 8 * rows * tile,
        ),
    )
    return y, gathered


def _part_at(group: Group, rank: Index, direction: Index, step: Index) -> Any:
    """Return whose rows are here at `step`: direction 0 brings those of the ranks before, direction 1 of those after."""
    return group.shift(rank, step * (2 * direction - 1))


def _gather_matmul(
    coordinates_ref, x_ref, w_ref, y_ref, gathered_ref, scratch: GatherScratch, *, group: Group, tiles: int
) -> None:
    group, rank = group.inside_kernel(coordinates_ref)
    n = group.size
    step, direction, tile = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    def pass_on(direction: Index, step: Index) -> Any:
        part = gathered_ref.at[_part_at(group, rank, direction, step), direction]
        return ring_copy(group, rank, part, part, scratch.ring, step, direction)

    def load(direction: Index, step: Index) -> Any:
        part = gathered_ref.at[_part_at(group, rank, direction, step), direction]
        return pltpu.make_async_copy(part, scratch.rows.at[direction], scratch.loaded.at[direction])

    @pl.when((step == 0) & (direction == 0) & (tile == 0))
    def _() -> None:
        dma.barrier(group, rank, "neighbours")
        dma.copy_locally(x_ref, gathered_ref.at[rank], scratch.copied)
        load(0, 0).start()

    @pl.when(tile == 0)
    def _() -> None:
        load(direction, step).wait()

        @pl.when(step < n - 1)
        def _() -> None:
            pass_on(direction, step).start()

    # Before the last tile: the rows that come next are loaded while it is multiplied. The last half has none after it.
    @pl.when((tile == tiles - 1) & ((step < n - 1) | (direction == 0)))
    def _() -> None:
        next_direction, next_step = 1 - direction, step + direction

        @pl.when(next_step > 0)  # one's own rows, step 0, travel nowhere
        def _() -> None:
            pass_on(next_direction, next_step - 1).wait_recv()

        load(next_direction, next_step).start()

    product = jnp.dot(scratch.rows[direction], w_ref[...], preferred_element_type=dma.accumulator_dtype(w_ref.dtype))
    y_ref[...] = product.astype(y_ref.dtype)

    @pl.when((step == n - 1) & (direction == 1) & (tile == tiles - 1))
    def _() -> None:
        for each in (0, 1):
            dma.fori(0, n - 1, lambda s, each=each: pass_on(each, s).wait_send())
        dma.barrier(group, rank, "neighbours")


# -- multiply, then scatter --


class ScatterScratch(NamedTuple):
    """Buffers and semaphores of a scatter; what has a first axis of 2 takes turns, so that a copy runs beside a product.

    `outgoing` partial sums leave for the neighbour, an `incoming` one is added, a `result` goes to HBM.
    """

    outgoing: Any
    incoming: Any
    result: Any
    loaded: Any
    stored: Any
    ring: Semaphores


def matmul_scatter(x: Array, w_kn: Array, group: Group, payload: object, *, tile: int, out_dtype: jnp.dtype) -> Array:
    """Multiply `x[n, 2, rows, K]` by w, sum over the group, return this device's part, `[2, rows, N]`."""
    (n, _, rows, inputs), outputs = x.shape, w_kn.shape[1]
    tiles, itemsize, accumulator = outputs // tile, x.dtype.itemsize, dma.accumulator_dtype(x.dtype)

    def x_block(step: Any, direction: Any, j: Index, coordinates: Any) -> tuple[Any, ...]:
        # The sum of a part starts one device past its owner, and is complete when it gets there (`ring.scatter`).
        return group.shift(coordinates[0], (2 * direction - 1) * (step + 1)), direction, 0, 0

    y, _ = launch(
        functools.partial(_matmul_scatter, group=group, tile=tile),
        [x, w_kn],
        # The second result is room for what arrives. Scratch would be VMEM, where it does not fit.
        [Result((2, rows, outputs), out_dtype), Result((n - 1, 2, tiles, rows, tile), accumulator)],
        pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n, 2, tiles),
            in_specs=[pl.BlockSpec((None, None, rows, inputs), x_block), _w_tile(inputs, tile)],
            out_specs=(HBM, HBM),
            scratch_shapes=[
                ScatterScratch(
                    outgoing=pltpu.VMEM((2, rows, tile), accumulator),
                    incoming=pltpu.VMEM((rows, tile), accumulator),
                    result=pltpu.VMEM((2, rows, tile), out_dtype),
                    loaded=DMA,
                    stored=DMA((2,)),
                    ring=semaphores(n),
                )
            ],
        ),
        group=group,
        cost=KernelCost(
            "matmul_reduce_scatter",
            "fused",
            payload,
            wire=(n - 1) * 2 * rows * outputs * accumulator.itemsize,
            # A tile leaves when it is multiplied. It must be gone two products later, for its buffer, and all tiles of a half
            # must have arrived when the other half is multiplied.
            schedule=Schedule(n - 1, 2, min(tiles + 1, 2 * tiles - 1) * 2 * rows * inputs * tile, str(x.dtype)),
            flops=4 * n * rows * inputs * outputs,
            vmem=2 * itemsize * (rows * inputs + inputs * tile) + 20 * rows * tile,
        ),
    )
    return y


def _matmul_scatter(
    coordinates_ref, x_ref, w_ref, y_ref, partial_ref, scratch: ScatterScratch, *, group: Group, tile: int
) -> None:
    group, rank = group.inside_kernel(coordinates_ref)
    n, tiles = group.size, partial_ref.shape[2]
    step, direction, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    count = (step * 2 + direction) * tiles + j
    turn = lax.rem(count, 2)  # which of two buffers
    outgoing, incoming, result, ring = scratch.outgoing, scratch.incoming, scratch.result, scratch.ring

    def copied(step: Index, source: Ref, slot: Ref, turn: Index) -> Any:
        # Sends are waited for by buffer, as that is what is written again; arrivals by step and direction.
        sems = Semaphores(ring.sent.at[turn], ring.arrived.at[step, direction])
        return dma.remote_copy(source, slot, sems, group.next_device(rank, direction))

    def pass_on(step: Index, turn: Index) -> Any:
        return copied(step, outgoing.at[turn], partial_ref.at[step, direction, j], turn)

    def store(turn: Index) -> Any:
        target = y_ref.at[direction, :, pl.ds(j * tile, tile)]
        return pltpu.make_async_copy(result.at[turn], target, scratch.stored.at[turn])

    load = pltpu.make_async_copy(partial_ref.at[lax.max(step - 1, 0), direction, j], incoming, scratch.loaded)

    pl.when(count == 0)(lambda: dma.barrier(group, rank, "neighbours"))

    @pl.when((step > 0) & (j == 0))
    def _() -> None:
        # One wait for all tiles of the step before: a semaphore counts bytes, and a copy of the full slot has them all.
        slot = partial_ref.at[step - 1, direction]
        copied(step - 1, slot, slot, 0).wait_recv()

    pl.when(step > 0)(load.start)
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=outgoing.dtype)

    @pl.when(step < n - 1)
    def _() -> None:
        pl.when(count >= 2)(lambda: pass_on(step, turn).wait_send())
        outgoing[turn] = product

        @pl.when(step > 0)
        def _() -> None:
            load.wait()
            outgoing[turn] += incoming[...]

        pass_on(step, turn).start()

    @pl.when(step == n - 1)
    def _() -> None:
        pl.when(count >= (n - 1) * 2 * tiles + 2)(lambda: store(turn).wait())
        load.wait()
        result[turn] = (product + incoming[...]).astype(result.dtype)
        store(turn).start()

    @pl.when(count == n * 2 * tiles - 1)
    def _() -> None:
        for each in (0, 1):
            pass_on(step - 1, each).wait_send()
            store(each).wait()
        dma.barrier(group, rank, "neighbours")
