"""Sources of batches: examples in memory, examples read by number, or a stream in the user's own order.

A batch is a pair of inputs and targets, each an array or a tree of arrays with equal numbers of rows. Every batch has the
position after it, a mapping for JSON: reading from this position continues as if reading had never stopped.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.errors import JShardError, kind_of

Tree = Any
Position = Mapping[str, Any]
Batch = tuple[Tree, Tree]
Rows = Callable[[int], np.ndarray]  # batch size -> row numbers that this process needs


class LocalBatch(NamedTuple):
    """This process's rows of a batch, the batch size over all processes, and the position after the batch."""

    x: Tree
    y: Tree
    size: int
    position: Position


class Selectable(Protocol):
    """Examples selected by their numbers."""

    def __len__(self) -> int: ...
    def take(self, rows: np.ndarray) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class Examples:
    """Inputs and targets in memory, arrays or trees of arrays with a row for each example."""

    x: Tree
    y: Tree

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.x)[0])

    def take(self, rows: np.ndarray) -> Batch:
        return jax.tree.map(lambda array: array[rows], (self.x, self.y))


@dataclasses.dataclass(frozen=True)
class Indexed:
    """Examples read singly from an object with `__len__` and `__getitem__`, a pair for a number."""

    label: str
    examples: Any

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, rows: np.ndarray) -> Batch:
        read = [pair(self.label, self.examples[int(row)]) for row in rows]
        return jax.tree.map(lambda *each: np.stack(each), *read)


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """Batches of selectable examples, in an order set by the seed and the number of the pass over
    the data. `last` decides about an incomplete batch at the end of a pass: "drop" omits it, "fill"
    completes it from the next pass, "keep" yields a smaller batch."""

    label: str
    examples: Selectable
    batch: int
    seed: int
    shuffle: bool = True
    last: str = "drop"

    def example(self) -> Batch:
        """Return at least a row, for its shapes, without advancing."""
        return self.examples.take(np.arange(1))

    def first(self, rows: Rows = np.arange) -> Batch:
        """Return this process's rows of the first batch, without advancing."""
        return next(self.read(None, rows))[:2]

    def read(self, position: Position | None = None, rows: Rows = np.arange) -> Iterator[LocalBatch]:
        """Yield batches without end, from the beginning or from a saved `position`."""
        count = len(self.examples)
        at, row = (0, 0) if position is None else (position["pass"], position["row"])
        if position is not None and position["examples"] != count:
            raise JShardError(
                f"{self.label} returns {count:,} examples, and returned {position['examples']:,} when the checkpoint was saved",
                hint="return the same examples, or train from the start with another output",
            )
        order = self._order(at)
        while True:
            chosen = order[row : row + self.batch]
            row += len(chosen)
            if len(chosen) < self.batch and not (self.last == "keep" and len(chosen)):
                at, missing = at + 1, self.batch - len(chosen)
                order, row = self._order(at), 0
                if self.last != "fill":
                    continue
                chosen, row = np.concatenate([chosen, order[:missing]]), missing
            x, y = self.examples.take(chosen[rows(len(chosen))])
            yield LocalBatch(x, y, len(chosen), {"pass": at, "row": row, "examples": count})

    def _order(self, number: int) -> np.ndarray:
        count = len(self.examples)
        return np.random.default_rng([self.seed, number]).permutation(count) if self.shuffle else np.arange(count)


class Stream:
    """Batches in the user's own order: an iterable of pairs, or a function that returns an iterable for each pass.

    Every process reads the same batches and keeps its rows. If an iterator yields exactly the number of rows that this
    process needs, they are assumed to be its rows. A position is the iterator's `get_state()`, as grain has; without it,
    the position is the number of batches, and resuming reads and discards them.
    """

    def __init__(self, label: str, batches: object, batch: int):
        self.label, self.batches, self.batch = label, batches, batch
        self.iterator: Any = None
        self.unused: list[tuple[Batch, Any]] = []  # a batch read for its shapes, and the state after it

    def example(self) -> Batch:
        if not self.unused:
            self.unused.append(self._next(0))
        return self.unused[0][0]

    def first(self, rows: Rows = np.arange) -> Batch:
        return self._mine(self.example(), rows, 1)

    def read(self, position: Position | None = None, rows: Rows = np.arange) -> Iterator[LocalBatch]:
        number = 0 if position is None else position["batches"]
        if position is not None and "state" in position:
            self.iterator = self._begun() if self.iterator is None else self.iterator
            self.unused.clear()
            self.iterator.set_state(_unpacked(position["state"]))
        else:
            for skipped in range(number):
                self._following(skipped)
        while True:
            batch, state = self._following(number)
            number += 1
            x, y = self._mine(batch, rows, number)
            yield LocalBatch(
                x, y, self.batch, {"batches": number} | ({} if state is None else {"state": _packed(state)})
            )

    def _mine(self, batch: Batch, rows: Rows, number: int) -> Batch:
        size, needed = len(jax.tree.leaves(batch)[0]), rows(self.batch)
        if size == self.batch:
            return batch if len(needed) == size else jax.tree.map(lambda array: array[needed], batch)
        if size != len(needed):
            here = "" if len(needed) == self.batch else f", {len(needed)} of them for this process"
            raise JShardError(
                f"{self.label} gives batch {number} with {size} rows, but jshard.train.batch is {self.batch}{here}",
                hint=f"write batch: {size}, or give {self.batch}",
            )
        return batch

    def _following(self, number: int) -> tuple[Batch, Any]:
        return self.unused.pop() if self.unused else self._next(number)

    def _next(self, number: int) -> tuple[Batch, Any]:
        """Return the next batch, if need be of the next pass, and the iterator's state after it."""
        begun, self.iterator = self.iterator, self.iterator or self._begun()
        value = next(self.iterator, _OVER)
        if value is _OVER and begun is not None:
            self.iterator = self._begun()
            value = next(self.iterator, _OVER) if self.iterator is not begun else _OVER
        if value is _OVER:
            hint = (
                f"use steps={number}, or return a function that makes a new iterator" if number else "give at least one"
            )
            raise JShardError(f"{self.label} ends after {number} batches and can't be read again", hint=hint)
        batch = pair(self.label, value)
        if len(sizes := {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}) != 1 or () in sizes:
            shapes = ", ".join(str(np.shape(leaf)) for leaf in jax.tree.leaves(batch))
            raise JShardError(
                f"{self.label} gives a batch of arrays {shapes}", hint="give all arrays the same number of rows"
            )
        it = self.iterator
        return batch, it.get_state() if hasattr(it, "get_state") and hasattr(it, "set_state") else None

    def _begun(self) -> Any:
        iterable: Any = self.batches() if callable(self.batches) else self.batches
        return iter(iterable)


Source = Shuffled | Stream
_OVER = object()


def pair(label: str, value: object) -> Batch:
    """Convert a value to a pair of trees of numpy arrays."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise JShardError(f"{label} gives {kind_of(value)} and not a pair (x, y)", hint="give (x, y)")
    return numbers(f"{label} gives", value)


def numbers(label: str, pair: Any, where: str = "") -> Batch:
    """Convert inputs and targets to trees of numpy arrays; raise an error for text, times and ragged lists."""
    trees = jax.tree.map(np.asarray, tuple(pair))
    for what, tree in zip(("inputs", "targets"), trees, strict=True):
        for array in jax.tree.leaves(tree):
            if array.dtype.kind in "OSUTmM":
                kind = "text" if array.dtype.kind in "SUT" else f"{array.dtype}"
                raise JShardError(
                    f"{label} {what} of {kind}{where}, and devices take numbers",
                    hint="number the classes: np.unique(y, return_inverse=True)[1]"
                    if what == "targets"
                    else "give arrays of numbers",
                )
    return trees


def _packed(state: object) -> Any:
    return {"base64": base64.b64encode(state).decode()} if isinstance(state, bytes) else state


def _unpacked(state: object) -> Any:
    return base64.b64decode(state["base64"]) if isinstance(state, Mapping) and set(state) == {"base64"} else state


def positions(mine: Position) -> Position:
    """Return the position to save, with all processes' states if they differ; all must call it."""
    if jax.process_count() == 1 or "state" not in mine:
        return mine
    text = np.frombuffer(json.dumps(mine["state"]).encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.int32(len(text))).max())
    padded = np.pad(text, (0, longest - len(text)), constant_values=ord(" "))
    states = [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded)]
    if all(state == states[0] for state in states):
        return mine
    return {**{key: value for key, value in mine.items() if key != "state"}, "states": states}


def own_position(saved: Position, checkpoint: object) -> Position:
    """Return this process's position from a checkpoint; raise an error if the number of processes has changed."""
    states = saved.get("states")
    if states is None:
        return saved
    if len(states) != jax.process_count():
        raise JShardError(
            f"{checkpoint} was saved by {len(states)} processes, each with its own position in its own data, and this run has "
            f"{jax.process_count()}",
            hint=f"start {len(states)} processes, or read the data by number: docs/checkpoints.md",
        )
    return {**{key: value for key, value in saved.items() if key != "states"}, "state": states[jax.process_index()]}
