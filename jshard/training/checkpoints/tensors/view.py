"""A tensor of a file seen through permute, reshape and slice: which of its numbers a part of what is seen needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jshard.layouts.index_ranges import Box


class Stride(NamedTuple):
    """`size` positions along an axis of the tensor, `step` apart."""

    axis: int
    size: int
    step: int


class Impossible(Exception):
    """Why a tensor can't be seen so, as the end of a sentence."""


class Tensor(Protocol):
    """A tensor of a file. `name` is the one it has there, `file` what a user calls the file."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self, out: np.ndarray, corner: Sequence[int], loops: Sequence[Stride]) -> int:
        """Read what the loops run over from `corner` on; `out` has an axis for each. Returns how many bytes were read."""
        ...


@dataclasses.dataclass(frozen=True)
class View:
    """`axes` has the loops of each axis that is seen, the outermost first: several where axes were joined."""

    corner: tuple[int, ...]
    axes: tuple[tuple[Stride, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> View:
        return cls((0,) * len(shape), tuple((Stride(axis, size, 1),) for axis, size in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(loop.size for loop in loops) for loops in self.axes)

    @functools.cached_property
    def positions(self) -> tuple[frozenset[int], ...]:
        """Return along each axis of the tensor the positions that are seen: all of the first with all of the others."""
        found = [{begin} for begin in self.corner]
        for loop in (loop for loops in self.axes for loop in loops):
            found[loop.axis] = {at + n * loop.step for at in found[loop.axis] for n in range(loop.size)}
        return tuple(map(frozenset, found))

    def is_within(self, other: View) -> bool:
        return all(own <= its for own, its in zip(self.positions, other.positions, strict=True))

    def meets(self, other: View) -> bool:
        """Return whether both see a number of the tensor."""
        return all(own & its for own, its in zip(self.positions, other.positions, strict=True))

    def permute(self, order: Sequence[int]) -> View:
        if sorted(order) != list(range(len(self.axes))):
            raise Impossible(f"permutes axes {' '.join(map(str, order))} of {list(self.shape)}")
        return View(self.corner, tuple(self.axes[axis] for axis in order))

    def slice(self, axis: int, begin: int, end: int | None) -> View:
        if axis >= len(self.axes):
            raise Impossible(f"slices axis {axis} of {list(self.shape)}")
        size, loops = self.shape[axis], self.axes[axis]
        end = size if end is None else end
        if not begin < end <= size:
            raise Impossible(f"slices {begin}:{end} of the {size} along axis {axis}")
        if (begin, end) == (0, size):
            return self
        first, *inner = loops
        row = math.prod(loop.size for loop in inner)
        if begin % row or end % row:
            raise Impossible(f"slices {begin}:{end} of axes that were joined, in rows of {row}")
        corner = list(self.corner)
        corner[first.axis] += begin // row * first.step
        left = (first._replace(size=(end - begin) // row), *inner)
        return View(tuple(corner), (*self.axes[:axis], left, *self.axes[axis + 1 :]))

    def split(self, at: Sequence[int]) -> View:
        """Split an axis into rows of a size: `split 0 128` sees [1024, 512] as [8, 128, 512]."""
        axis, size = at
        if axis >= len(self.axes):
            raise Impossible(f"splits axis {axis} of {list(self.shape)}")
        return self.reshape([*self.shape[:axis], -1, size, *self.shape[axis + 1 :]])

    def reshape(self, sizes: Sequence[int]) -> View:
        """Split and join axes; -1 is what is left."""
        left = [loop for loops in self.axes for loop in loops]
        total, known = math.prod(self.shape), math.prod(size for size in sizes if size != -1)
        if -1 in sizes and known and total % known == 0:
            sizes = [total // known if size == -1 else size for size in sizes]
        if -1 in sizes or math.prod(sizes) != total:
            raise Impossible(f"reshapes {list(self.shape)} to {list(sizes)}")
        if not total:
            return View(self.corner, tuple((Stride(0, size, 1),) for size in sizes))
        axes = []
        for size in sizes:
            loops: list[Stride] = []
            while size != 1 and left:
                loop = left.pop(0)
                if loop.size and size % loop.size == 0:
                    size //= loop.size
                elif size and loop.size % size == 0:
                    inner = loop.size // size
                    left.insert(0, loop._replace(size=inner))
                    loop, size = Stride(loop.axis, size, loop.step * inner), 1
                else:
                    raise Impossible(
                        f"reshapes {list(self.shape)} to {list(sizes)}, which neither splits nor joins axes"
                    )
                loops.append(loop)
            axes.append(tuple(loop for loop in loops if loop.size != 1))
        return View(self.corner, tuple(axes))

    def read(self, tensor: Tensor, out: np.ndarray, box: Box) -> int:
        """Read a part into `out`, and nothing else. Returns how many bytes were read."""
        return sum(tensor.read(*block) for block in self.blocks(box, out))

    def blocks(self, box: Box, part: np.ndarray) -> Iterator[tuple[np.ndarray, tuple[int, ...], tuple[Stride, ...]]]:
        """Cut a part into blocks of the tensor: for each its numbers in `part`, with an axis for each of its loops, where it
        begins in the tensor, and the loops."""
        choices = []
        for (begin, end), loops in zip(box, self.axes, strict=True):
            at, found = 0, []
            for ranges in _rows(begin, end, [loop.size for loop in loops]):
                size = math.prod(high - low for low, high in ranges)
                found.append((slice(at, at + size), list(zip(ranges, loops, strict=True))))
                at += size
            choices.append(found)
        for chosen in itertools.product(*choices):
            corner, loops = list(self.corner), []
            for (low, high), loop in itertools.chain.from_iterable(ranges for _, ranges in chosen):
                corner[loop.axis] += low * loop.step
                loops.append(loop._replace(size=high - low))
            block = part[(*(where for where, _ in chosen), ...)]
            yield block.reshape([loop.size for loop in loops]), tuple(corner), tuple(loops)


def _rows(begin: int, end: int, counts: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Positions `begin:end` of joined loops as boxes: the end of a row, whole rows, the beginning of a row."""
    if len(counts) < 2:
        if begin < end:
            yield ((begin, end),) if counts else ()
        return
    row = math.prod(counts[1:])
    while begin < end:
        at, within = divmod(begin, row)
        if not within and end - begin >= row:
            stop = end // row * row
            yield (at, stop // row), *((0, count) for count in counts[1:])
        else:
            stop = min(end, (at + 1) * row)
            yield from (((at, at + 1), *rest) for rest in _rows(within, within + stop - begin, counts[1:]))
        begin = stop
