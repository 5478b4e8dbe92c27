"""Unreduced gradients.

Take an array equal on all devices of a mesh axis, of which each device uses its part. A gather in the backward pass
would give every device the whole gradient. If the array varies from its source on, each device carries the gradient
of its part, and only the sources are summed: parameters, or one array once for all its uses.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping, Sequence

import jax.numpy as jnp

from jshard.layers.partition.local_sizes import local_shape
from jshard.layers.partition.plan import Names, names_of
from jshard.layers.partition.value import Value
from jshard.layouts.redistribution import Axes

Path = tuple[Hashable, ...]  # of the calls around an equation, and it
Marks = Mapping[Path, Mapping[int, Names]]  # for an equation, its operands that are to vary, and over what


@dataclasses.dataclass(frozen=True)
class Ran:
    """An equation with its values: `is_open` if it may have operands that vary and are not split, and `needs` are how it needed
    which arrays: split by these axes, varying over these mesh axes."""

    path: Path
    is_open: bool
    operands: Sequence[Value]
    results: Sequence[Value]
    needs: Sequence[tuple[Value, Axes, Names]]


def unreduced(steps: Sequence[Ran], inputs: Sequence[Value], ends: Sequence[Value], sizes: Mapping[str, int]) -> Marks:
    """Return the variables to mark as varying, with their mesh axes, for a program with `steps`, `inputs` and `ends`."""
    marks: dict[Path, dict[int, Names]] = collections.defaultdict(lambda: collections.defaultdict(frozenset))
    for name, ways in sizes.items():
        if ways >= 2:
            for key, at in _Over(name, steps, inputs, ends, sizes).marks():
                marks[key][at] |= {name}
    return marks


class _Over:
    """The analysis for a mesh axis."""

    def __init__(
        self, name: str, steps: Sequence[Ran], inputs: Sequence[Value], ends: Sequence[Value], sizes: Mapping[str, int]
    ):
        self.name, self.steps, self.inputs, self.sizes = name, steps, inputs, sizes
        self.made = {id(part): step for step in reversed(steps) for part in step.results}
        self.rows = {*map(id, inputs)}  # what depends on arguments that are no parameters
        for step in steps:
            if any(id(part) in self.rows for part in step.operands):
                self.rows |= {*map(id, step.results)}
        self.in_parts = self._used_in_parts(inputs, {*map(id, ends)})

    def marks(self) -> list[tuple[Path, int]]:
        cut = [part for step in self.steps for part in self._cut(step) if id(part) in self.in_parts]
        if not cut:
            return []
        each = [self._marked({*map(id, cut)}), self._marked(self._back(cut))]
        saved, found = max(each, key=lambda one: one[0])
        return found if saved > 0 else []

    def _splits(self, part: Value) -> bool:
        return self.name in names_of(part.axes)

    def _cut(self, step: Ran) -> list[Value]:
        return [
            p for p, axes, _ in step.needs if not p.is_put_off and self.name in names_of(axes) and not self._splits(p)
        ]

    def _used_in_parts(self, inputs: Sequence[Value], ends: Collection[int]) -> set[int]:
        """Return the variables equal on all devices of the mesh axis, with readers split over it only."""
        found: set[int] = set()
        uses: dict[int, list[Ran]] = collections.defaultdict(list)

        def fits(part: Value, step: Ran) -> bool:
            if not step.is_open:
                return any(part is each for each in self._cut(step))
            return all(self._splits(each) or id(each) in found or each is part for each in step.results)

        def look(parts: Sequence[Value]) -> None:
            for part in parts:
                some = uses[id(part)]
                if some and not self._splits(part) and id(part) not in ends and all(fits(part, each) for each in some):
                    found.add(id(part))

        for step in reversed(self.steps):
            look([part for part in step.results if id(part) in self.rows and self.made[id(part)] is step])
            for part in step.operands:
                uses[id(part)].append(step)
        look(inputs)
        return found

    def _is_sum(self, step: Ran) -> bool:
        """Return whether an equation's result is equal everywhere, for any operands."""
        return not step.is_open or any(self._splits(each) for each in step.operands)

    def _back(self, parts: Sequence[Value]) -> set[int]:
        """Return these variables and their sources, as long as these are used in parts only."""
        found, left = {*map(id, parts)}, list(parts)
        while left:
            part = left.pop()
            step = self.made.get(id(part))
            for each in () if step is None or self._is_sum(step) else step.operands:
                if id(each) in self.in_parts and id(each) not in found:
                    found.add(id(each))
                    left.append(each)
        return found

    def _marked(self, start: set[int]) -> tuple[float, list[tuple[Path, int]]]:
        """Return the saved wire, in elements gathered once, if these variables vary, and the variables to mark."""
        vary, sums = {id(part) for part in self.inputs if id(part) in start}, dict[int, float]()
        sums.update((id(part), self._sum(part)) for part in self.inputs if id(part) in vary)
        for step in self.steps:
            made = [part for part in step.results if id(part) in self.in_parts]
            goes_on = not self._is_sum(step) and any(id(part) in vary for part in step.operands)
            for part in step.operands if goes_on and made else ():
                if id(part) not in vary and not self._splits(part):
                    sums[id(part)] = self._sum(part, made[0])
            begin = made if goes_on else [part for part in made if id(part) in start]
            sums.update((id(part), self._sum(part)) for part in begin if not goes_on)
            vary |= {*map(id, begin)}
        saved = -sum(sums.values())
        asked = {
            (id(part), axes if (is_cut := self.name in names_of(axes)) else ()): (part, 1 if is_cut else 2)
            for step in self.steps for part, axes, names in step.needs
            if id(part) in vary and not part.is_put_off and self.name in names | names_of(axes)
        }  # fmt: skip
        saved += sum(times * self._size(part) for part, times in asked.values())
        return saved, [(step.path, at) for step in self.steps for at, part in enumerate(step.operands)
                       if id(part) in vary and not part.is_put_off]  # fmt: skip

    def _sum(self, part: Value, of: Value | None = None) -> float:
        """Return the cost of a sum over the mesh axis: two gathers for rows, the increase of the sum over rows for a
        parameter."""
        is_rows = id(part) in self.rows
        if part.is_put_off and part.signal is None and not is_rows:
            return 0  # made of numbers
        split = names_of(of.axes) if of is not None and not is_rows and not part.is_stored else ()
        return 2 * self._size(part) / math.prod(self.sizes[name] for name in split)

    def _size(self, part: Value) -> float:
        if not part.is_put_off and not jnp.issubdtype(part.dtype, jnp.inexact):
            return 0
        return math.prod(local_shape(part.shape, part.axes, self.sizes))
