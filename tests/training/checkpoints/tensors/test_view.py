"""What is seen through permute, reshape and slice is what numpy makes of the whole, and of the file only its bytes are read."""

from __future__ import annotations

import os
import random

import ml_dtypes
import numpy as np
import pytest

from jshard.training.checkpoints import tensors
from jshard.training.checkpoints.tensors.safetensors import ByteSpan, runs
from jshard.training.checkpoints.tensors.view import Impossible


def some_steps(view: tensors.View, whole: np.ndarray, chance: random.Random):
    """A view and the same of numpy, after up to four steps; of those that are impossible numpy takes none either."""
    for _ in range(chance.randrange(5)):
        shape = list(view.shape)
        axis = chance.randrange(len(shape))
        try:
            match chance.choice(["permute", "split", "join", "slice"]):
                case "permute":
                    order = chance.sample(range(len(shape)), len(shape))
                    view, whole = view.permute(order), whole.transpose(order)
                case "split":
                    factor = chance.choice([n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0])
                    sizes = [*shape[:axis], factor, -1, *shape[axis + 1 :]]
                    view, whole = view.reshape(sizes), whole.reshape(sizes)
                case "join" if axis:
                    sizes = [*shape[: axis - 1], shape[axis - 1] * shape[axis], *shape[axis + 1 :]]
                    view, whole = view.reshape(sizes), whole.reshape(sizes)
                case "slice":
                    begin, end = sorted(chance.sample(range(shape[axis] + 1), 2))
                    view, whole = view.slice(axis, begin, end), np.take(whole, range(begin, end), axis)
        except Impossible:
            pass
    return view, whole


def put(view: tensors.View, whole: np.ndarray, box, part: np.ndarray):
    """Put a part of a view where it belongs in the whole, position by position."""
    for at in np.ndindex(part.shape):
        place = sum((begin + here) * step for (begin, _), here, step in zip(box, at, view.steps, strict=True))
        whole.reshape(-1)[view.start + place] = part[at]


def test_a_split_axis_is_rows_of_that_size():
    view = tensors.View.of((2, 6, 3))
    assert view.split((1, 2)) == view.reshape((2, 3, 2, 3)) and view.split((0, 2)).shape == (1, 2, 6, 3)


@pytest.mark.parametrize("seed", range(8))
def test_views_tell_whether_they_share_a_number(seed):
    chance, whole = random.Random(seed), np.arange(2 * 6 * 4).reshape(2, 6, 4)
    pairs = [some_steps(tensors.View.of(whole.shape), whole, chance) for _ in range(12)]
    for view, part in pairs:
        for other, its in pairs:
            assert view.meets(other) == bool({*part.flat} & {*its.flat})


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sector", [0, 40])
def test_view_reads_and_writes_a_part_as_numpy_would_of_the_whole(tmp_path, monkeypatch, seed, sector):
    monkeypatch.setattr(tensors.safetensors, "SECTOR", sector)
    monkeypatch.setattr(tensors.safetensors, "BLOCK", 64)
    chance = random.Random(seed)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.uint8):
        for _ in range(25):
            shape = tuple(chance.choice([1, 2, 3, 4, 6, 12]) for _ in range(chance.randrange(1, 4)))
            whole = (
                np.random.default_rng(seed)
                .integers(0, 255, (*shape, np.dtype(dtype).itemsize), np.uint8)
                .view(dtype)[..., 0]
            )
            file = tmp_path / "file"
            file.write_bytes(b"before!" + whole.tobytes() + b"behind")
            tensor = tensors.FileTensor("x", file, np.dtype(dtype), shape, 7)
            view, expected = some_steps(tensors.View.of(shape), whole, chance)
            assert view.shape == expected.shape
            box = tuple(sorted(chance.sample(range(size + 1), 2)) for size in expected.shape)
            part = expected[tuple(slice(*each) for each in box)]
            out = np.empty(part.shape, dtype)
            count = view.read(tensor, out, box)
            assert out.tobytes() == part.tobytes()
            assert sector or count == part.nbytes
            assert count <= whole.nbytes
            written = tmp_path / "written"
            written.write_bytes(b"before!" + bytes(whole.nbytes) + b"behind")
            handle = os.open(written, os.O_RDWR)
            assert tensor.write(handle, out, view.at(box), view.steps) == part.nbytes
            os.close(handle)
            back = np.zeros_like(whole)
            put(view, back, box, out)
            assert written.read_bytes() == b"before!" + back.tobytes() + b"behind"


def test_runs_read_over_gaps_of_less_than_a_sector_and_take_blocks_at_a_time(monkeypatch):
    monkeypatch.setattr(tensors.safetensors, "BLOCK", 64)
    assert list(runs((3, 4), (16, 4), 4, gap=0)) == [ByteSpan((), 0, 48)]  # no gap: one run
    assert list(runs((2, 3), (16, 4), 4, gap=0)) == [ByteSpan((slice(0, 5),), 0, 12, 2, 16)]  # four bytes between rows
    assert list(runs((2, 3), (16, 4), 4, gap=4)) == [ByteSpan((), 0, 28)]
    assert list(runs((6, 4), (16, 4), 4, gap=0)) == [ByteSpan((slice(0, 4),), 0, 64), ByteSpan((slice(4, 8),), 64, 32)]
    assert list(runs((2, 2, 3), (64, 16, 4), 4, gap=0)) == [
        ByteSpan((0, slice(0, 5)), 0, 12, 2, 16), ByteSpan((1, slice(0, 5)), 64, 12, 2, 16),
    ]  # fmt: skip
    assert list(runs((0, 4), (16, 4), 4, gap=0)) == []
    assert list(runs((), (), 4, gap=0)) == [ByteSpan((), 0, 4)]


@pytest.mark.parametrize(
    "steps, fault",
    [
        (lambda view: view.permute((0, 0)), "permutes axes 0 0 of [6, 4]"),
        (lambda view: view.reshape((5, -1)), "reshapes [6, 4] to [5, -1]"),
        (lambda view: view.permute((1, 0)).reshape((24,)), "reshapes [4, 6] to [24], which would copy its numbers"),
        (lambda view: view.split((2, 1)), "splits axis 2 of [6, 4]"),
        (lambda view: view.split((0, 4)), "reshapes [6, 4] to [-1, 4, 4]"),
        (lambda view: view.slice(2, 0, 1), "slices axis 2 of [6, 4]"),
        (lambda view: view.slice(0, 2, 9), "slices 2:9 of the 6 along axis 0"),
    ],
)
def test_view_says_what_is_impossible(steps, fault):
    with pytest.raises(Impossible) as told:
        steps(tensors.View.of((6, 4)))
    assert str(told.value) == fault
