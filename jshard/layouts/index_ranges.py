"""Parts of arrays as boxes: which device holds which, what two share, and the blocks in which they travel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Sharding

Device = Any  # jax.Device, which type checkers don't take for a type
Box = tuple[tuple[int, int], ...]  # for each axis where it begins and where it ends

BLOCK = 2**20  # bytes; larger ones took more memory and little less time (docs/scatter.md)


def boxes_of(sharding: Sharding, shape: Sequence[int]) -> dict[Device, Box]:
    """Which part of an array each device holds, those of other processes too."""
    places = sharding.devices_indices_map(tuple(shape))
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        for device, index in places.items()
    }


def holders(boxes: dict[Device, Box]) -> dict[Box, tuple[int, ...]]:
    """The different parts, in the order of the devices, each with the processes that hold it."""
    found: dict[Box, set[int]] = {}
    for device, box in boxes.items():
        found.setdefault(box, set()).add(device.process_index)
    return {box: tuple(sorted(processes)) for box, processes in found.items()}


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(end - begin for begin, end in box)


def index(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """A part as an index into the whole, or into the part `origin` around it."""
    offsets = [begin for begin, _ in origin] if origin is not None else [0] * len(box)
    return tuple(slice(begin - offset, end - offset) for (begin, end), offset in zip(box, offsets, strict=True))


def is_inside(inner: Box, outer: Box) -> bool:
    """Whether a part lies in another."""
    return all(low <= begin and end <= high for (begin, end), (low, high) in zip(inner, outer, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """What two parts share, if anything."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def blocks(box: Box, itemsize: int) -> Iterator[Box]:
    """The part in blocks of at most `BLOCK` bytes, all of one shape, so that one program serves them: the last ones overlap
    those before. Of an array with no numbers there is none."""
    sizes = list(lengths(box))
    if 0 in sizes:
        return
    for axis in range(len(sizes)):
        row = math.prod(sizes[axis + 1 :]) * itemsize
        sizes[axis] = min(sizes[axis], max(1, BLOCK // row))
    starts = [
        [min(start, end - size) for start in range(begin, end, size)]
        for (begin, end), size in zip(box, sizes, strict=True)
    ]
    for corner in itertools.product(*starts):
        yield tuple((start, start + size) for start, size in zip(corner, sizes, strict=True))


def word_count(block: Box, itemsize: int) -> int:
    """How many words of 32 bits a block travels as: a power of two, so that few programs serve all shapes and dtypes."""
    words = -(-math.prod(lengths(block)) * itemsize // 4)
    return max(256, 1 << (words - 1).bit_length())
