"""Whose data made a loss NaN: the batch of that step is read once more, each process its own rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.train.sources import Position, Rows, Shuffled, Source

PARTS = ("inputs", "targets")


def suspect(source: Source, position: Position | None, rows: Rows) -> str:
    """`inputs of its batch that rank 1 read`, or nothing where they are finite, or can't be read twice. All processes call
    it."""
    own = _part(source, position, rows)
    if jax.process_count() == 1:
        return f"{PARTS[own]} of its batch" if own is not None else ""
    parts = multihost_utils.process_allgather(np.int32(-1 if own is None else own)).ravel()
    found = [(rank, int(part)) for rank, part in enumerate(parts) if part >= 0]
    return f"{PARTS[found[0][1]]} of its batch that rank {found[0][0]} read" if found else ""


def _part(source: Source, position: Position | None, rows: Rows) -> int | None:
    if not isinstance(source, Shuffled):
        return None
    read = next(source.read(position, rows))
    return next((number for number, tree in enumerate((read.x, read.y)) if not _is_finite(tree)), None)


def _is_finite(tree: Any) -> bool:
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return all(
        np.isfinite(each.astype(np.float32)).all() for each in arrays if jax.numpy.issubdtype(each.dtype, np.inexact)
    )
