"""Choosing a strategy by itself: of all ways to split a product, the one with the fewest bytes on the wire."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from jax.sharding import Mesh

from jshard.kernels.collectives import COLLECTIVES
from jshard.layers.strategy import Strategy
from jshard.layouts.layout import Layout
from jshard.layouts.redistribution import plan_moves

Split = dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of a product: where it lies now, its shape and the bytes of one number."""

    layout: Layout
    shape: tuple[int, ...]
    itemsize: int

    def moved(self, target: Layout) -> tuple[int, int]:
        """What `redistribute` to `target` costs: wire bytes per device, and how many collectives."""
        mesh, axes = target.mesh, [list(names) for names in self.layout.axes]
        wire = collectives = 0
        for step in plan_moves(self.layout.axes, target.axes):
            group = mesh.shape[step.mesh_axis]
            part = self.itemsize * math.prod(
                size // _ways(mesh, names) for size, names in zip(self.shape, axes, strict=True)
            )
            if step.kind == "slice":
                axes[step.axis].append(step.mesh_axis)
                continue
            if step.kind == "all_gather":
                axes[step.axis].pop()
                part *= group
            else:
                axes[step.axis].append(axes[step.source].pop())
            wire += COLLECTIVES[step.kind].wire(part, group)
            collectives += 1
        return wire, collectives


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a product: its strategy, what its forward moves, per device, and its share of the arithmetic."""

    strategy: Strategy
    wire: int
    collectives: int
    multiplications: int

    def __str__(self) -> str:
        loops = ("row", "sequence", "column", "reduction")
        words = [f"{loop}={'+'.join(names)}" for loop in loops if (names := getattr(self.strategy, loop))]
        words += ["output=scatter"] if self.strategy.scattered else []
        return f"{' '.join(words) or 'replicated'}, {self.wire:,} B on the wire per device"


def choices(x: Operand, w: Operand, itemsize: int) -> list[Choice]:
    """Every way that divides, cheapest first: by wire bytes, then by arithmetic per device, then by the number of
    collectives, then row before column before reduction. `itemsize` is that of the numbers that are summed."""
    mesh, rank = x.layout.mesh, len(x.shape)
    present = dict.fromkeys((*x.layout.mesh_axes, *w.layout.mesh_axes, *mesh.axis_names))  # in the order they lie in
    names = [name for name in present if mesh.shape[name] > 1]
    loops = (*(["row"] if rank > 1 else []), *(["sequence"] if rank > 2 else []), "column", "reduction", "none")
    found: list[Choice] = []
    split: dict[str, Any]
    for taken in itertools.product(loops, repeat=len(names)):
        split = {loop: tuple(n for n, its in zip(names, taken, strict=True) if its == loop) for loop in loops}
        split.pop("none")
        outputs = (None, "scatter") if split["reduction"] and rank > 1 else (None,)
        for output in outputs:
            if _divides(mesh, split, x.shape, w.shape, scatters=output == "scatter"):
                found.append(_priced(x, w, Strategy(mesh, **split, output=output), itemsize))
    return sorted(found, key=lambda choice: (choice.wire, choice.multiplications, choice.collectives))


def _priced(x: Operand, w: Operand, strategy: Strategy, itemsize: int) -> Choice:
    mesh, rank = strategy.mesh, len(x.shape)
    wire, collectives = map(sum, zip(x.moved(strategy.x(rank)), w.moved(strategy.kernel()), strict=True))
    rows = math.prod(x.shape[:-1]) // _ways(mesh, strategy.batch)
    part = itemsize * rows * w.shape[1] // _ways(mesh, strategy.column)
    if strategy.scattered:  # one mesh axis at a time, each of what the one before has left
        for name in strategy.scattered:
            wire += COLLECTIVES["reduce_scatter"].wire(part, mesh.shape[name])
            part //= mesh.shape[name]
            collectives += 1
    elif strategy.reduction:
        wire += COLLECTIVES["all_reduce"].wire(part, _ways(mesh, strategy.reduction))
        collectives += 1
    ways = _ways(mesh, (*strategy.batch, *strategy.column, *strategy.reduction))
    return Choice(strategy, wire, collectives, math.prod((*x.shape, w.shape[1])) // ways)


def _divides(mesh: Mesh, split: Split, x: tuple[int, ...], w: tuple[int, ...], *, scatters: bool) -> bool:
    row = split.get("row", ())
    held = [
        (x[0], (*row, *split["reduction"]) if scatters else row),
        (x[1] if len(x) > 2 else 0, split.get("sequence", ())),
        (w[1], split["column"]),
        (w[0], split["reduction"]),
    ]
    return all(size % _ways(mesh, names) == 0 for size, names in held)


def _ways(mesh: Mesh, names: tuple[str, ...] | list[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)
