"""Data in memory, batches of it in an order that the seed decides, and their way onto the mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jshard.errors import JShardError, Place
from jshard.layouts.layout import Layout
from jshard.signals.signal import Signal


@dataclasses.dataclass(frozen=True)
class Examples:
    """Inputs and targets, one row each."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)


def examples(said: str, data: Any, part: str) -> Examples:
    """`data["train"]` or `data.train`, a pair of arrays of as many rows; `said` opens the error when it is not."""
    pair = data.get(part) if isinstance(data, Mapping) else getattr(data, part, None)
    mend = 'return {"train": (x, y), "test": (x, y)}'
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise JShardError(f'{said} returns no pair of arrays named "{part}"', mend=mend)
    found = Examples(*map(np.asarray, pair))
    if found.x.ndim == 0 or found.y.ndim == 0 or len(found.x) != len(found.y) or len(found) == 0:
        raise JShardError(
            f'{said} returns inputs of shape {found.x.shape} and targets of shape {found.y.shape} for "{part}"',
            mend="return as many targets as inputs, and at least one",
        )
    return found


def batches(data: Examples, size: int, seed: int) -> Iterator[Examples]:
    """Batches without end. Each pass over the data is shuffled anew; what is left over at its end, less than a batch,
    is dropped and has its chance in the next pass."""
    order = np.random.default_rng(seed)
    while True:
        shuffled = order.permutation(len(data))
        for start in range(0, len(data) - size + 1, size):
            chosen = shuffled[start : start + size]
            yield Examples(data.x[chosen], data.y[chosen])


def padded(data: Examples, size: int) -> Iterator[tuple[Examples, np.ndarray]]:
    """All the data once, in order, in batches of one size; the weights are 0 where a last batch is filled up."""
    for start in range(0, len(data), size):
        chosen = np.arange(start, start + size)
        weights = (chosen < len(data)).astype(np.float32)
        chosen = np.minimum(chosen, len(data) - 1)
        yield Examples(data.x[chosen], data.y[chosen]), weights


class Placement:
    """Where batches lie: rows over the mesh axes that every `row` of the configuration names, so that no layer has to
    gather its input; whole on every device when there are none."""

    def __init__(self, mesh: Mesh | None, signals: Mapping[str, Signal]):
        rows = [signal.row for signal in signals.values() if signal.row]
        self.mesh = mesh
        self.mesh_axes = tuple(name for name in rows[0] if all(name in row for row in rows)) if rows else ()

    @property
    def ways(self) -> int:
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in self.mesh_axes)

    def check(self, batch: int, place: Place) -> None:
        """An error when `batch` rows can't be split evenly."""
        if batch % self.ways:
            below, above = batch // self.ways * self.ways, -(-batch // self.ways) * self.ways
            names = " x ".join(f'"{name}"' for name in self.mesh_axes)
            raise JShardError(
                f"jshard.train.batch ({place}) splits {batch} rows over mesh axis {names} of size {self.ways}",
                mend=f"use {above}" if below == 0 else f"use {below} or {above}",
            )

    def __call__(self, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
        """The arrays on the devices, each row where it belongs."""
        if self.mesh is None:
            return tuple(map(jax.device_put, arrays))
        where = Layout(self.mesh, self.mesh_axes).sharding
        return tuple(placed(array, where) for array in arrays)

    def shapes(self, rows: int, *arrays: np.ndarray) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What a call with so many rows of these would place, as shapes alone: the devices need not be here."""
        where = None if self.mesh is None else Layout(self.mesh, self.mesh_axes).sharding
        return tuple(
            jax.ShapeDtypeStruct((rows, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype), sharding=where)
            for array in arrays
        )


def placed(array: Any, where: NamedSharding) -> jax.Array:
    """`array`, which every process has, on devices of one process or of several: each gives its own devices their part."""
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    host = np.asarray(array)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, where, lambda part: host[part])


def settle(module: Any, mesh: Mesh | None) -> Any:
    """The same module with every array of it on the mesh: those that no signal has placed lie whole on every device."""
    if mesh is None:
        return module
    everywhere = Layout(mesh).sharding

    def place(array: jax.Array) -> jax.Array:
        return placed(array, everywhere) if isinstance(array.sharding, SingleDeviceSharding) else array

    nnx.update(module, jax.tree.map(place, nnx.state(module)))
    return module
