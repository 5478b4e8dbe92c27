"""Views of a tensor in a file: the shape, strides and offset after permute, reshape and slice."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jshard.layouts.index_ranges import Box

NOWHERE = 1 << 20  # an address for arrays without memory


class Impossible(Exception):
    """The reason why a view is not possible, as the end of a sentence."""


class Tensor(Protocol):
    """A tensor of a file: its `name` in the file, and the `file` in the user's words."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self, out: np.ndarray, start: int, steps: Sequence[int]) -> int:
        """Fill `out` with the numbers from `start` on, `steps` apart along each axis; return the
        number of bytes read. Both count in the tensor's own order."""
        ...


@dataclasses.dataclass(frozen=True)
class View:
    """A strided view of a tensor: it begins at number `start`, and neighbours along an axis are `steps` apart."""

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
        """Return True if both views share a number of the tensor."""
        return np.shares_memory(self._array(), other._array())

    def permute(self, order: Sequence[int]) -> View:
        if sorted(order) != list(range(len(self.shape))):
            raise Impossible(f"permutes axes {' '.join(map(str, order))} of {list(self.shape)}")
        shape, steps = (tuple(values[axis] for axis in order) for values in (self.shape, self.steps))
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
        """Split an axis into rows of a size: `split 0 128` views [1024, 512] as [8, 128, 512]."""
        axis, size = at
        if axis >= len(self.shape):
            raise Impossible(f"splits axis {axis} of {list(self.shape)}")
        return self.reshape([*self.shape[:axis], -1, size, *self.shape[axis + 1 :]])

    def reshape(self, sizes: Sequence[int]) -> View:
        """Split axes, and join contiguous axes; -1 stands for the remaining size."""
        try:
            seen = np.reshape(self._array(), tuple(sizes), copy=False)
        except ValueError as error:
            why = ", which would copy its numbers" if "copy" in str(error) else ""
            raise Impossible(f"reshapes {list(self.shape)} to {list(sizes)}{why}") from None
        return View(seen.shape, seen.strides, self.start)

    def at(self, box: Box) -> int:
        """Return the number, in the tensor's order, at the corner of a box of the view."""
        return self.start + sum(begin * step for (begin, _), step in zip(box, self.steps, strict=True))

    def read(self, tensor: Tensor, out: np.ndarray, box: Box) -> int:
        """Read a box of the view into `out`; return the number of bytes read."""
        return tensor.read(out, self.at(box), self.steps)

    def _array(self) -> np.ndarray:
        """Return a numpy array with the view's shape and strides over no memory; its numbers must not be read."""
        layout = {"shape": self.shape, "strides": self.steps, "data": (NOWHERE + self.start, True)}
        return np.asarray(types.SimpleNamespace(__array_interface__={"version": 3, "typestr": "|u1", **layout}))
