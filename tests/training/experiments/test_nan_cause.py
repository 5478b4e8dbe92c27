"""Whose data made a loss NaN."""

from __future__ import annotations

import numpy as np
import pytest

from jshard.training.data.sources import Examples, Shuffled
from jshard.training.experiments import nan_cause as module
from jshard.training.experiments.nan_cause import suspect


def source(**holes: int) -> Shuffled:
    """Sixteen rows in order, of which one holds a number that is none."""
    x, y = np.ones((16, 3), np.float32), np.ones(16, np.float32)
    for name, row in holes.items():
        {"x": x, "y": y}[name][row] = np.nan
    return Shuffled("data", Examples({"a": x, "n": np.arange(16)}, y), batch=4, seed=0, shuffle=False)


@pytest.mark.parametrize(
    ("read", "row", "said"),
    [
        (source(x=5), 4, "inputs of its batch"),
        (source(x=5), 0, ""),
        (source(x=5), 8, ""),
        (source(y=3), 0, "targets of its batch"),
        (iter(()), 0, ""),
    ],
)
def test_suspect_is_the_part_of_the_batch_that_holds_nan(read, row, said):
    assert suspect(read, {"pass": 0, "row": row, "examples": 16}, np.arange) == said


def test_suspect_is_the_first_rank_that_read_nan(monkeypatch):
    monkeypatch.setattr(module.jax, "process_count", lambda: 3)
    monkeypatch.setattr(module.multihost_utils, "process_allgather", lambda mine: np.array([-1, mine, 1]))
    assert suspect(source(x=0), None, np.arange) == "inputs of its batch that rank 1 read"
    assert suspect(source(), None, np.arange) == "targets of its batch that rank 2 read"
