"""Choose the strategy of a product that costs the least wire and arithmetic, with the gradients that are being traced."""

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

# What a chip multiplies in the time that a byte takes to leave it: 400 on v5p, 500 on v5e, 1,100 on v6e and H100 (chips.py).
MULTIPLICATIONS_A_BYTE = 500


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of a product: its layout now, its shape, the bytes of one number, and whether its gradient is computed."""

    layout: Layout
    shape: tuple[int, ...]
    itemsize: int
    has_gradient: bool = True

    def moved(self, target: Layout) -> tuple[int, int, int]:
        """Price `redistribute` to `target`: wire bytes per device forward and backward, and the number of steps."""
        mesh, axes = target.mesh, [list(names) for names in self.layout.axes]
        forward = backward = collectives = 0
        for step in plan_moves(self.layout.axes, target.axes):
            group = mesh.shape[step.mesh_axis]
            part = self.itemsize * math.prod(
                size // _ways(mesh, names) for size, names in zip(self.shape, axes, strict=True)
            )
            match step.kind:
                case "slice":  # a slice that every device has is of a gradient that must be gathered
                    axes[step.axis].append(step.mesh_axis)
                    backward += COLLECTIVES["all_gather"].wire(part, group)
                case "all_gather":  # and what all devices gather, of a gradient that is only sliced
                    axes[step.axis].pop()
                    forward += COLLECTIVES["all_gather"].wire(part * group, group)
                case _:
                    axes[step.axis].append(axes[step.source].pop())
                    forward += COLLECTIVES["all_to_all"].wire(part, group)
                    backward += COLLECTIVES["all_to_all"].wire(part, group)
            collectives += 1
        return forward, backward * self.has_gradient, collectives


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a product: its strategy, its wire bytes per device forward and for the gradients, and its arithmetic."""

    strategy: Strategy
    wire: int
    backward: int
    collectives: int
    multiplications: int  # of one product, per device
    ways: int = 1  # that they are divided
    gradients: int = 2  # the number of gradients that are computed, each a product of the same size

    @property
    def cost(self) -> float:
        """Return the bytes on the wire per device, plus the arithmetic as the bytes that pass in its time."""
        products = 1 + self.gradients
        return self.wire + self.backward + products * self.multiplications / MULTIPLICATIONS_A_BYTE

    def __str__(self) -> str:
        loops = ("row", "sequence", "column", "reduction")
        words = [f"{loop}={'+'.join(names)}" for loop in loops if (names := getattr(self.strategy, loop))]
        words += ["output=scatter"] if self.strategy.scattered else []
        priced = [
            " ".join(words) or "replicated",
            f"{self.wire:,} B on the wire per device forward",
            *([f"{self.backward:,} B backward"] if self.gradients else []),
            f"1/{self.ways} of the arithmetic" if self.ways > 1 else "all of the arithmetic",
        ]
        return ", ".join(priced)


def choices(x: Operand, w: Operand, itemsize: int, runs_on: Mesh) -> list[Candidate]:
    """List every strategy that divides the sizes, cheapest first: by cost, then by forward's wire bytes, then by the number of
    steps, then row before column before reduction. `itemsize` is that of the numbers that are summed; sizes divide on
    `runs_on` too."""
    mesh, rank = x.layout.mesh, len(x.shape)
    present = dict.fromkeys((*x.layout.mesh_axes, *w.layout.mesh_axes, *mesh.axis_names))  # in the order they lie in
    names = [name for name in present if mesh.shape[name] >= 2]
    loops = (*(["row"] if rank >= 2 else []), *(["sequence"] if rank >= 3 else []), "column", "reduction", "none")
    found: list[Candidate] = []
    split: dict[str, Any]
    # A batch that is split stays so where w is whole: one product must not gather it for all that follow.
    batch = set(x.layout.axes[0] if rank >= 2 else ()) - set(w.layout.mesh_axes)
    for taken in itertools.product(*(["row"] if name in batch else loops for name in names)):
        split = {loop: tuple(n for n, its in zip(names, taken, strict=True) if its == loop) for loop in loops}
        split.pop("none")
        for output in (None, "scatter") if split["reduction"] and rank >= 2 else (None,):
            strategy = Strategy(mesh, **split, output=output)
            sizes = strategy.splits(x.shape, *w.shape)
            if not any(size % _ways(on, names) for _, size, names, _ in sizes for on in (mesh, runs_on)):
                found.append(_priced(x, w, strategy, itemsize))
    return sorted(found, key=lambda choice: (choice.cost, choice.wire, choice.collectives))


def _priced(x: Operand, w: Operand, strategy: Strategy, itemsize: int) -> Candidate:
    mesh, rank = strategy.mesh, len(x.shape)
    kernel = strategy.kernel()
    moves = x.moved(strategy.x(rank)), w.moved(kernel)
    forward, backward, collectives = map(sum, zip(*moves, strict=True))
    rows = math.prod(x.shape[:-1]) // _ways(mesh, strategy.batch)
    part = itemsize * rows * w.shape[1] // _ways(mesh, strategy.column)
    if strategy.scattered:  # one mesh axis at a time, each of what the one before has left; gathered again backward
        for name in strategy.scattered:
            forward += COLLECTIVES["reduce_scatter"].wire(part, mesh.shape[name])
            backward += COLLECTIVES["all_gather"].wire(part, mesh.shape[name]) * (x.has_gradient or w.has_gradient)
            part //= mesh.shape[name]
            collectives += 1
    elif strategy.reduction:
        forward += COLLECTIVES["all_reduce"].wire(part, _ways(mesh, strategy.reduction))
        collectives += 1
    # The gradient of an operand is summed over the devices that multiplied it by different parts of the other operand.
    for operand, layout, summed in ((x, strategy.x(rank), strategy.column), (w, kernel, strategy.batch)):
        size = math.prod(layout.shard_shape(operand.shape)) * operand.has_gradient
        backward += COLLECTIVES["all_reduce"].wire(itemsize * size, _ways(mesh, summed))
    ways = _ways(mesh, (*strategy.batch, *strategy.column, *strategy.reduction))
    multiplications = math.prod((*x.shape, w.shape[1])) // ways
    return Candidate(strategy, forward, backward, collectives, multiplications, ways, x.has_gradient + w.has_gradient)


def _ways(mesh: Mesh, names: tuple[str, ...] | list[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)
