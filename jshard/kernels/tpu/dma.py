"""Tools of TPU kernels with remote copies: the group, the barrier, copies and loops over blocks.

A rank counts the devices of a group in the order of `mesh_axes`, the first one major.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jshard.kernels.tiles import BLOCK

VMEM = pl.BlockSpec(memory_space=pltpu.VMEM)
HBM = pl.BlockSpec(memory_space=pltpu.HBM)
SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
Index = int | Array  # a number, or a traced one
DMA = pltpu.SemaphoreType.DMA


class Semaphores(NamedTuple):
    """The DMA semaphores of remote copies: `sent` counts departures from this device, `arrived` arrivals at it."""

    sent: Any
    arrived: Any


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices along one or several mesh axes.

    Inside a kernel it also has `other_indices`, this device's index along each mesh axis outside the group.
    """

    mesh_axes: tuple[str, ...]
    sizes: tuple[int, ...]
    other_axes: tuple[str, ...]
    other_indices: tuple[Any, ...] = ()

    @classmethod
    def of(cls, mesh_axes: tuple[str, ...]) -> Group:
        """Return the group of this device along `mesh_axes`, inside a shard_map."""
        others = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name not in mesh_axes)
        return cls(mesh_axes, tuple(lax.axis_size(name) for name in mesh_axes), others)

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def coordinates(self) -> Array:
        """Return this device's rank, then its index along each other mesh axis: the first operand of a kernel.

        A kernel that calls axis_index itself mixes varying and invariant values, which `check_vma` refuses.
        """
        return jnp.stack([lax.axis_index(self.mesh_axes), *(lax.axis_index(name) for name in self.other_axes)])

    def inside_kernel(self, coordinates_ref: jax.Ref) -> tuple[Group, Any]:
        """Read `coordinates` inside the kernel: the group with its `other_indices`, and this device's rank."""
        indices = tuple(coordinates_ref[1 + k] for k in range(len(self.other_axes)))
        return dataclasses.replace(self, other_indices=indices), coordinates_ref[0]

    def device_id(self, rank: Index) -> Any:
        """Return the mesh coordinates of the group's device `rank`, for Pallas's `device_id`."""
        index = dict(zip(self.other_axes, self.other_indices, strict=True))  # the group shares these
        for name, size in zip(reversed(self.mesh_axes), reversed(self.sizes), strict=True):
            index[name] = lax.rem(rank, size) if len(self.sizes) > 1 else rank
            rank = lax.div(rank, size) if len(self.sizes) > 1 else rank
        return index

    def shift(self, rank: Index, by: Index) -> Any:
        """Return the rank `by` places after `rank` around the ring; `by` is at least minus the group's size."""
        # rem has the sign of its first operand, which must therefore not be negative
        return lax.rem(rank + by + self.size, self.size)

    def next_device(self, rank: Index, direction: Index) -> Any:
        """Return the target device of a ring: the next rank in direction 0, the previous rank in direction 1."""
        return self.device_id(self.shift(rank, 1 - 2 * direction))

    @property
    def collective_id(self) -> int:
        """The number of the barrier semaphore, different for each set of mesh axes.

        Groups that cross must not share a semaphore: a device ahead in one group would count as present in the other.
        """
        names = jax.sharding.get_abstract_mesh().axis_names
        return 64 + sum(1 << names.index(name) for name in self.mesh_axes)


def barrier(group: Group, rank: Index, who: Literal["everyone", "neighbours"]) -> None:
    """Wait until the other devices of the group reach this barrier.

    At the start of a kernel it means that their memory may be written to; before that it may belong to another
    program. At the end it means that they have read their input, so that the next round may overwrite it.
    """
    semaphore = pltpu.get_barrier_semaphore()
    if who == "neighbours":  # a ring writes to only two devices
        for by in (1, -1):
            pl.semaphore_signal(semaphore, 1, device_id=group.device_id(group.shift(rank, by)))
        pl.semaphore_wait(semaphore, 2)  # in a group of two, both neighbours are the other device: it signals twice
        return

    @pl.loop(1, group.size)
    def _(by: Index) -> None:
        pl.semaphore_signal(semaphore, 1, device_id=group.device_id(group.shift(rank, by)))

    pl.semaphore_wait(semaphore, group.size - 1)


def remote_copy(source: Any, target: Any, semaphores: Semaphores, device_id: Any) -> Any:
    """Return the description of a copy of `source` on this device to `target` on another device.

    `start` starts it; `wait_send` waits until it has left. `wait_recv` waits for the copy arriving here:
    as all devices run the same program, the description of the outgoing copy also fits the incoming copy.
    """
    return pltpu.make_async_remote_copy(source, target, *semaphores, device_id=device_id)


def in_blocks(rows: int, body: Callable[[Any], Any]) -> None:
    """Run `body(slice)` for the rows of a buffer, block by block: a full buffer would not fit the registers."""
    if rows <= BLOCK:
        body(pl.ds(0, rows))
        return
    assert rows % BLOCK == 0, rows
    pl.loop(0, rows // BLOCK)(lambda b: body(pl.ds(b * BLOCK, BLOCK)))


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> Any:
    """Return the dtype to sum in: float32 for bfloat16, int32 for int8, else `dtype`."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize >= 4:
        return dtype
    return jnp.dtype(jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32)
