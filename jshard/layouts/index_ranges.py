"""Parts of arrays as boxes: their devices, their overlaps, and their blocks for transfer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Sharding

Device = Any  # jax.Device: type checkers don't accept it as a type
Box = tuple[tuple[int, int], ...]  # begin and end of each axis

BLOCK = 2**20  # bytes; larger ones took more memory and little less time (docs/scatter.md)


def boxes_of(sharding: Sharding, shape: Sequence[int]) -> dict[Device, Box]:
    """Return each device's part of an array, for devices of all processes."""
    places = sharding.devices_indices_map(tuple(shape))
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        for device, index in places.items()
    }


def holders(boxes: dict[Device, Box]) -> dict[Box, tuple[int, ...]]:
    """Return the distinct parts in device order, with the processes of each."""
    found: dict[Box, set[int]] = {}
    for device, box in boxes.items():
        found.setdefault(box, set()).add(device.process_index)
    return {box: tuple(sorted(processes)) for box, processes in found.items()}


def lengths(box: Box) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(end - begin for begin, end in box)


def index(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Return a part as an index into the whole array, or into the part `origin` around it."""
    offsets = [begin for begin, _ in origin] if origin is not None else [0] * len(box)
    return tuple(slice(begin - offset, end - offset) for (begin, end), offset in zip(box, offsets, strict=True))


def is_inside(inner: Box, outer: Box) -> bool:
    """Return whether a part is inside another."""
    return all(low <= begin and end <= high for (begin, end), (low, high) in zip(inner, outer, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """Return the common part of two parts, or None."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def blocks(box: Box, itemsize: int) -> Iterator[Box]:
    """Yield a part in blocks of at most `BLOCK` bytes; yield none for an array without numbers. All
    blocks have one shape, to share a program: the last blocks overlap earlier blocks."""
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
    """Return the number of 32-bit words of a block: a power of two, to share programs between shapes."""
    words = -(-math.prod(lengths(block)) * itemsize // 4)
    return max(256, 1 << (words - 1).bit_length())
