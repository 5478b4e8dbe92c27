"""A tensor of a file seen through permute, reshape and slice: where the numbers lie that are seen, as numpy says it."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jshard.layouts.index_ranges import Box

NOWHERE = 1 << 20  # the address of arrays that are never read


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
    def read(self, out: np.ndarray, start: int, steps: Sequence[int]) -> int:
        """Fill `out` with the numbers from `start` on, in the tensor's own order, that are `steps` apart along each axis of it.
        Returns how many bytes were read."""
        ...


@dataclasses.dataclass(frozen=True)
class View:
    """What is seen of a tensor: `start` is the number of the first in the tensor's own order, and along each axis neighbours
    are `steps` apart in it."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    start: int = 0

    @classmethod
    def of(cls, shape: Sequence[int]) -> View:
        return cls(tuple(shape), tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def meets(self, other: View) -> bool:
        """Return whether both see a number of the tensor."""
        return np.shares_memory(self._array(), other._array())

    def permute(self, order: Sequence[int]) -> View:
        if sorted(order) != list(range(len(self.shape))):
            raise Impossible(f"permutes axes {' '.join(map(str, order))} of {list(self.shape)}")
        shape, steps = (tuple(each[axis] for axis in order) for each in (self.shape, self.steps))
        return View(shape, steps, self.start)

    def slice(self, axis: int, begin: int, end: int | None) -> View:
        if axis >= len(self.shape):
            raise Impossible(f"slices axis {axis} of {list(self.shape)}")
        size = self.shape[axis]
        end = size if end is None else end
        if not begin < end <= size:
            raise Impossible(f"slices {begin}:{end} of the {size} along axis {axis}")
        shape = (*self.shape[:axis], end - begin, *self.shape[axis + 1 :])
        return View(shape, self.steps, self.start + begin * self.steps[axis])

    def split(self, at: Sequence[int]) -> View:
        """Split an axis into rows of a size: `split 0 128` sees [1024, 512] as [8, 128, 512]."""
        axis, size = at
        if axis >= len(self.shape):
            raise Impossible(f"splits axis {axis} of {list(self.shape)}")
        return self.reshape([*self.shape[:axis], -1, size, *self.shape[axis + 1 :]])

    def reshape(self, sizes: Sequence[int]) -> View:
        """Split axes, and join those that lie side by side; -1 is what is left."""
        try:
            seen = np.reshape(self._array(), tuple(sizes), copy=False)
        except ValueError as error:
            why = ", which would copy its numbers" if "copy" in str(error) else ""
            raise Impossible(f"reshapes {list(self.shape)} to {list(sizes)}{why}") from None
        return View(seen.shape, seen.strides, self.start)

    def at(self, box: Box) -> int:
        """Number the first of a part."""
        return self.start + sum(begin * step for (begin, _), step in zip(box, self.steps, strict=True))

    def read(self, tensor: Tensor, out: np.ndarray, box: Box) -> int:
        """Read a part into `out`, and nothing else. Returns how many bytes were read."""
        return tensor.read(out, self.at(box), self.steps)

    def _array(self) -> np.ndarray:
        """Make an array that lies as what is seen, over no memory: numpy tells of it, and must not read it."""
        lies = {"shape": self.shape, "strides": self.steps, "data": (NOWHERE + self.start, True)}
        return np.asarray(types.SimpleNamespace(__array_interface__={"version": 3, "typestr": "|u1", **lies}))
