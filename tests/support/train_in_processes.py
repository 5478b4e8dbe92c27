"""Run by tests/training/data/test_data.py in two processes of two devices: whose rows each reads, and where streams go on."""

from __future__ import annotations

import numpy as np

from tests.support.processes import join

join()

import jax

from jshard.layouts.mesh import build_mesh
from jshard.signals.config import load_configuration
from jshard.training.data.batches import Placement
from jshard.training.data.sources import Examples, Indexed, Shuffled, own_position, positions


class Pairs:
    """Examples that note which are read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 10

    def __getitem__(self, number):
        self.read.append(number)
        return np.full(3, number, np.float32), np.int32(number)


def batches(sizes: dict[str, int], row: str, last: str) -> None:
    """Each device holds its rows of the batch that one process would read, and no others were read for it."""
    configuration = load_configuration({"jshard": {"mesh": sizes}, "a": {"row": row}})
    placement = Placement(build_mesh(sizes, label="the mesh"), configuration.signals)
    pairs = Pairs()
    alone = Shuffled("alone", Examples(np.zeros(10), np.arange(10)), 4, seed=3, last=last)
    shared = Shuffled("shared", Indexed("shared", pairs), 4, seed=3, last=last)
    for number, whole, mine in zip(range(5), alone.read(), shared.read(None, placement.rows), strict=False):
        assert (whole.size, whole.position) == (mine.size, mine.position), number
        x, y = placement.place(mine.size, mine.x, mine.y)
        assert x.shape == (whole.size, 3)
        for shard in y.addressable_shards:
            assert shard.data.tolist() == whole.y[shard.index].tolist(), number
        assert pairs.read == whole.y[placement.rows(whole.size)].tolist(), number
        pairs.read.clear()
    print(sizes, len(placement.rows(4)))


batches({"data": 2, "tensor": 2}, "data", "keep")  # each process is at one place along data
batches({"tensor": 2, "data": 2}, "data", "keep")  # each process is at both places along data, and needs every row
batches({"tensor": 4}, "tensor", "fill")

same, rank = {"batches": 3, "state": {"at": 3}}, jax.process_index()
assert positions(same) == own_position(same, "it") == same
other = {"batches": 3, "state": {"at": 10**rank, "of": "x" * rank}}
kept = positions(other)
assert kept == {"batches": 3, "states": [{"at": 1, "of": ""}, {"at": 10, "of": "x"}]}
assert own_position(kept, "it") == other
print("streams go on")
