"""Batches of the user's data: read in advance, and placed on the mesh."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jshard.errors import JShardError
from jshard.layouts.gathering import canonical, put
from jshard.layouts.layout import Layout
from jshard.signals.signal import Signal
from jshard.training.data.sources import Examples, Indexed, Selectable, Shuffled, Source, Stream, numbers
from jshard.training.data.text import Packed
from jshard.training.settings import Settings, rows_over

T = TypeVar("T")
FAREWELL = 5.0  # seconds to wait for a reader that is still inside the user's own code
PAIR = 'return {"train": (x, y), "test": (x, y)}'


def examples(label: str, data: object, part: str) -> Selectable:
    """Return `data["train"]` or `data.train`, a pair of arrays or trees with equal numbers of rows; `label` opens the error."""
    pair = part_of(data, part)
    if isinstance(pair, Packed):
        return pair
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise JShardError(f'{label} returns no pair of arrays named "{part}"', hint=PAIR)
    rows = Examples(*numbers(f"{label} returns", pair, f' for "{part}"'))
    counts = {len(array) if array.ndim else None for array in jax.tree.leaves((rows.x, rows.y))}
    if len(counts) != 1 or counts <= {None, 0}:
        raise JShardError(
            f'{label} returns inputs of {_shapes(rows.x)} and targets of {_shapes(rows.y)} for "{part}"',
            hint="return as many targets as inputs, and at least one",
        )
    return rows


def source(label: str, data: object, *, batch: int, seed: int, shuffle: bool | None, last: str | None) -> Source:
    """Choose the reader of `data["train"]`. It is a pair of arrays, a sequence of pairs (`__len__`
    and `__getitem__`), an iterable of batches, or a function that returns an iterable."""
    train = part_of(data, "train")
    what = f'{label} "train"'
    if isinstance(train, (tuple, Packed)):
        rows: Selectable = examples(label, data, "train")
    elif hasattr(train, "__getitem__") and hasattr(train, "__len__") and not isinstance(train, (Mapping, str)):
        rows = Indexed(what, train)
        if len(rows) == 0:
            raise JShardError(f"{what} is empty", hint="return at least one example")
    elif callable(train) or hasattr(train, "__iter__") or hasattr(train, "__next__"):
        if shuffle is not None or last is not None:
            key = "shuffle" if shuffle is not None else "last"
            raise JShardError(f"{what} has its own order, which {key} can't change", hint=f"remove {key}")
        return Stream(what, train, batch)
    else:
        raise JShardError(f'{label} returns no pair of arrays named "train"', hint=PAIR)
    return Shuffled(what, rows, batch, seed, shuffle is not False, last or "drop")


def held_out(settings: Settings, label: str, data: object) -> Any:
    """Split the last examples off the training data for an evaluation, if `evaluation.held_out` is set."""
    part, key = settings.table("evaluation").get("held_out"), "evaluation.held_out"
    if part is None:
        return data
    here = settings.label(key)
    if part_of(data, "test") is not None:
        raise JShardError(
            f'{here} is set, and {settings.table("data").get("path")} returns a "test"', hint="remove one of the two"
        )
    if not isinstance(part_of(data, "train"), tuple):
        raise JShardError(
            f'{here} splits a pair of arrays, but {label} returns "train" in another form', hint='return a "test" too'
        )
    train = examples(label, data, "train")
    assert isinstance(train, Examples)
    kept = len(train) - round(part * len(train))
    if not 0 < kept < len(train):
        raise JShardError(f"{here} is {part:g}, of {len(train)} examples", hint="use a share of them, such as 0.1")
    cut = lambda at: jax.tree.map(lambda array: array[at], (train.x, train.y))
    return {"train": cut(slice(kept)), "test": cut(slice(kept, None))}


def numbers_of(y: object) -> tuple[int, int] | None:
    """Return the least and the largest integer target, without -1; None for other targets."""
    if not isinstance(y, np.ndarray) or not np.issubdtype(y.dtype, np.integer) or not y.size:
        return None
    if y.ndim > 1 and y.min() == -1:  # tokens without a target
        y = y[y >= 0]
    return (int(y.min()), int(y.max())) if y.size else None


def part_of(data: object, part: str) -> Any:
    return data.get(part) if isinstance(data, Mapping) else getattr(data, part, None)


def _shapes(tree: object) -> str:
    leaves = jax.tree.leaves(tree)
    return f"shape{'s' * (len(leaves) > 1)} {', '.join(str(array.shape) for array in leaves)}"


def padded(data: Selectable, size: int) -> Iterator[tuple[Examples, np.ndarray]]:
    """Yield the data once, in order, in batches of equal size; padding rows of the last batch have weight 0."""
    for start in range(0, len(data), size):
        chosen = np.arange(start, start + size)
        weights = (chosen < len(data)).astype(np.float32)
        yield Examples(*data.take(np.minimum(chosen, len(data) - 1))), weights


class Placement:
    """The sharding of batches: rows over the mesh axes named by every `row`, so that no layer
    gathers its input. Without such an axis, a batch is replicated."""

    def __init__(self, mesh: Mesh | None, signals: Mapping[str, Signal], microbatches: int = 1):
        self.mesh, self.microbatches = mesh, microbatches
        self.mesh_axes = rows_over(signals)

    @property
    def ways(self) -> int:
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in self.mesh_axes)

    def __call__(self, *arrays: object) -> tuple[Any, ...]:
        """Shard arrays, or trees of arrays, over the devices; every process has all rows."""
        where = self._sharding()
        return jax.tree.map(lambda array: jax.device_put(array) if where is None else put(array, where), arrays)

    def rows(self, batch: int) -> np.ndarray:
        """Return the row numbers of a batch held by the devices of this process. A batch replicated
        over several processes has all rows on each."""
        if (where := self._sharding()) is None or where.is_fully_addressable:
            return np.arange(batch)
        held = np.zeros((self.microbatches, batch // self.microbatches), bool)
        for index in where.addressable_devices_indices_map(held.shape[1:]).values():
            held[(slice(None), *(index or ()))] = True
        return np.flatnonzero(held)

    def place(self, size: int, *arrays: object) -> tuple[Any, ...]:
        """Shard a training batch of `size` rows over the devices, given this process's `rows` of
        it. Several microbatches get an array axis of their own before the rows, so that a
        microbatch has the same rows on every mesh."""
        parts, where = self.microbatches, self._sharding(self.microbatches)
        axis, here = int(parts > 1), self.rows(size)

        def place(array: np.ndarray) -> jax.Array:
            host = canonical(array)
            host = host if parts == 1 else host.reshape(parts, -1, *host.shape[1:])
            if where is None or where.is_fully_addressable:
                return jax.device_put(host) if where is None else put(host, where)

            def part(index: Any) -> np.ndarray:
                start, stop, _ = index[axis].indices(size // parts)
                first = np.searchsorted(here[: len(here) // parts], start)  # a device's rows are contiguous here too
                return host[(*index[:axis], slice(first, first + stop - start))]

            return jax.make_array_from_callback(
                (*host.shape[:axis], size // parts, *host.shape[axis + 1 :]), where, part
            )

        return jax.tree.map(place, arrays)

    def _sharding(self, parts: int = 1) -> NamedSharding | None:
        axes = (self.mesh_axes,) if parts == 1 else ((), self.mesh_axes)
        return None if self.mesh is None else Layout(self.mesh, *axes).sharding

    def shapes(self, size: int, *arrays: object, parts: int = 1) -> tuple[Any, ...]:
        """Return the shapes and shardings of `size` rows; several `parts` get an axis, as microbatches do in `place`."""
        where, lead = self._sharding(parts), (size,) if parts == 1 else (parts, size // parts)

        def shape(array: np.ndarray) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(array.dtype)
            return jax.ShapeDtypeStruct((*lead, *array.shape[1:]), dtype, sharding=where)

        return jax.tree.map(shape, arrays)


def settle(module: object, mesh: Mesh | None) -> Any:
    """Replicate over the mesh every array of a module without a sharding."""
    if mesh is None:
        return module
    everywhere = Layout(mesh).sharding

    def place(array: jax.Array) -> jax.Array:
        return put(array, everywhere) if isinstance(array.sharding, SingleDeviceSharding) else array

    nnx.update(module, jax.tree.map(place, nnx.state(module)))
    return module


@contextlib.contextmanager
def read_ahead(made: Iterator[T], depth: int) -> Iterator[Iterator[T]]:
    """Yield an iterator over `made` with up to `depth` values computed in advance by a thread; 0
    uses no thread. An error in the thread is raised here, with its traceback."""
    if depth == 0:
        yield made
        return
    ready, room, over = queue.SimpleQueue[Any](), threading.Semaphore(depth), threading.Event()

    def read() -> None:
        try:
            for value in made:
                room.acquire()
                if over.is_set():
                    return
                ready.put((value, None))
            ready.put((None, StopIteration()))
        except BaseException as error:  # every error is raised in the consumer
            ready.put((None, error))

    def values() -> Iterator[T]:
        while True:
            value, error = ready.get()
            room.release()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield value

    thread = threading.Thread(target=read, name="jshard reads ahead", daemon=True)
    thread.start()
    try:
        yield values()
    finally:
        over.set()
        room.release()
        thread.join(FAREWELL)
