"""Words for use inside a TPU kernel: who the others of a group are, the two barriers, and copies to another device.

The group's order is that of `mesh_axes`, major first. `rank` is this device's number in it, from SMEM.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HERE = pl.BlockSpec(memory_space=pltpu.VMEM)
FAR = pl.BlockSpec(memory_space=pltpu.HBM)
SCALAR = pl.BlockSpec(memory_space=pltpu.SMEM)
COPIED = pltpu.SemaphoreType.DMA


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices along one mesh axis or several. Inside a kernel it also knows this device's `place` along the others."""

    mesh_axes: tuple[str, ...]
    sizes: tuple[int, ...]
    others: tuple[str, ...]
    place: tuple[Any, ...] = ()

    @classmethod
    def of(cls, mesh_axes: tuple[str, ...]) -> Group:
        """Named in a shard_map."""
        others = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name not in mesh_axes)
        return cls(mesh_axes, tuple(lax.axis_size(name) for name in mesh_axes), others)

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def here(self) -> Array:
        """This device's number in the group and its place along the other mesh axes: the operand that a kernel gets.
        A kernel that asks by itself mixes varying numbers with others, interpreted or compiled."""
        return jnp.stack([lax.axis_index(self.mesh_axes), *(lax.axis_index(name) for name in self.others)])

    def entered(self, here_ref: Any) -> tuple[Group, Any]:
        """The group inside the kernel, and this device's number in it."""
        place = tuple(here_ref[1 + k] for k in range(len(self.others)))
        return dataclasses.replace(self, place=place), here_ref[0]

    def device(self, rank: Any) -> Any:
        """Where device number `rank` is; along the other mesh axes, where this one is."""
        where = dict(zip(self.others, self.place, strict=True))
        for name, size in zip(reversed(self.mesh_axes), reversed(self.sizes), strict=True):
            where[name] = lax.rem(rank, size) if len(self.sizes) > 1 else rank
            rank = lax.div(rank, size) if len(self.sizes) > 1 else rank
        return where

    def after(self, rank: Any, by: Any) -> Any:
        """The number `by` places after `rank` around the ring; `by` may be negative, to one round."""
        return lax.rem(rank + by + self.size, self.size)

    @property
    def collective_id(self) -> int:
        """One barrier semaphore for each set of mesh axes. Groups that cross must not share one: a device that is
        ahead in one group would be counted as present in the other."""
        names = jax.sharding.get_abstract_mesh().axis_names
        return 64 + sum(1 << names.index(name) for name in self.mesh_axes)


def meet(group: Group, rank: Any, who: Literal["everyone", "neighbours"]) -> None:
    """Waits until the others are here. At the start of a kernel it says that their memory may be written to; at its end,
    that they have read what was written, so that it may be written again."""
    barrier = pltpu.get_barrier_semaphore()
    if who == "neighbours":
        for way in (1, -1):
            pl.semaphore_signal(barrier, 1, device_id=group.device(group.after(rank, way)))
        pl.semaphore_wait(barrier, 2)
        return

    def signal(step: Any, _: None) -> None:
        pl.semaphore_signal(barrier, 1, device_id=group.device(group.after(rank, step)))

    lax.fori_loop(1, group.size, signal, None)
    pl.semaphore_wait(barrier, group.size - 1)


def send(source: Any, target: Any, sent: Any, arrived: Any, to: Any) -> Any:
    """A copy of `source` here to `target` on device `to`. Start it, then `wait_send` here; there, `wait_recv` on the same
    words waits for the one that comes in."""
    return pltpu.make_async_remote_copy(source, target, sent, arrived, device_id=to)


def each(start: Any, stop: Any, f: Callable[[Any], Any]) -> None:
    """`f(i)` for each i: a rolled loop, so that a long ring compiles as fast as a short one."""

    def step(i: Any, _: None) -> None:
        f(i)

    lax.fori_loop(start, stop, step, None)


def in_blocks(rows: int, f: Callable[[Any], Any], block: int = 256) -> None:
    """`f(slice)` for the rows of a buffer, a block at a time: a whole buffer would not fit the registers."""
    if rows <= block:
        f(pl.ds(0, rows))
        return
    assert rows % block == 0, (rows, block)
    each(0, rows // block, lambda b: f(pl.ds(b * block, block)))


def wide(dtype: Any) -> Any:
    """The dtype that a sum is taken in: float32 for bfloat16, int32 for int8."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize >= 4:
        return dtype
    return jnp.dtype(jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32)
