"""Layers split over the stages of a pipeline: stages in turn, and chunks of layers for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import gcd
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshard.layers.partition.halves import zeros_like_result
from jshard.programs.provenance import scope

Arrays = list[Any]


def in_turn(
    layers: Callable[[Arrays], tuple[Arrays, Arrays]], carry: Arrays, mesh_axis: str, **by: str
) -> tuple[Arrays, Arrays]:
    """Run `layers`, each stage's own, stage after stage. Permutes carry the state around; at the end it is on the
    first stage, zeros on the others. Each stage keeps the results of its own layers."""
    count, own = lax.axis_size(mesh_axis), lax.axis_index(mesh_axis)
    _, left = zeros_like_result(layers, carry)
    around = [(n, (n + 1) % count) for n in range(count)]

    def turn(carry: Arrays, number: Array) -> tuple[Arrays, Arrays]:
        carry, made = lax.cond(number == own, layers, lambda carry: (carry, left), carry)
        with scope(**by):
            return [lax.ppermute(x, mesh_axis, around) for x in carry], made

    carry, made = lax.scan(turn, carry, jnp.arange(count))
    return [jnp.where(own == 0, x, jnp.zeros_like(x)) for x in carry], [
        lax.dynamic_index_in_dim(x, own, keepdims=False) for x in made
    ]


def to_chunks(x: Array, chunks: int, mesh_axis: str) -> Array:
    """Move this stage's neighbouring layers to `[chunk, layer]` of their stages: chunk c of stage s is number c *
    stages + s. Costs a permute for each chunk."""
    pieces = x.reshape(chunks, -1, *x.shape[1:])
    return _exchanged(pieces, _rounds(chunks, lax.axis_size(mesh_axis)), mesh_axis)


def from_chunks(x: Array, mesh_axis: str) -> Array:
    """Move `[chunk, layer]` back to where the layers rest."""
    rounds = _rounds(len(x), lax.axis_size(mesh_axis))
    back = [[(there, place, here, piece) for here, piece, there, place in each] for each in rounds]
    return _exchanged(x, back, mesh_axis).reshape(-1, *x.shape[2:])


Round = Sequence[tuple[int, int, int, int]]  # from this stage its piece, to that stage at this place


def _rounds(chunks: int, stages: int) -> list[Round]:
    """Return the transfers in rounds: in a round each stage sends one piece and receives one."""
    period = stages // gcd(chunks, stages)

    def piece(stage: int, number: int) -> tuple[int, int, int, int]:
        at = (number + stage // period) % chunks
        chunk, there = divmod(stage * chunks + at, stages)
        return stage, at, there, chunk

    return [[piece(stage, number) for stage in range(stages)] for number in range(chunks)]


def _exchanged(pieces: Array, rounds: Sequence[Round], mesh_axis: str) -> Array:
    if 1 in (len(pieces), lax.axis_size(mesh_axis)):
        return pieces
    own, result = lax.axis_index(mesh_axis), jnp.zeros_like(pieces)
    for each in rounds:
        sent = jnp.array([piece for _, piece, _, _ in sorted(each)])[own]
        place = jnp.array([place for _, place in sorted((there, place) for _, _, there, place in each)])[own]
        piece = lax.dynamic_index_in_dim(pieces, sent)
        piece = lax.ppermute(piece, mesh_axis, [(here, there) for here, _, there, _ in each])
        result = lax.dynamic_update_index_in_dim(result, piece, place, 0)
    return result


class Counts(NamedTuple):
    """The number of layers of each chunk of each stage, in the order of a microbatch."""

    layers: tuple[int, ...]
    stages: int

    @property
    def chunks(self) -> int:
        return len(self.layers) // self.stages

    @property
    def longest(self) -> int:
        return max(self.layers)

    @property
    def are_equal(self) -> bool:
        return min(self.layers) == self.longest

    @property
    def starts(self) -> list[int]:
        return [sum(self.layers[:number]) for number in range(len(self.layers))]

    @property
    def rows(self) -> np.ndarray:
        """`[stage, chunk, place]`: the layer that lies there; in places that a chunk has no layer for, the last."""
        places = np.add.outer(self.starts, np.arange(self.longest)).clip(max=sum(self.layers) - 1)
        return places.reshape(self.chunks, self.stages, self.longest).swapaxes(0, 1)

    @property
    def places(self) -> np.ndarray:
        """Return the index of each layer in `rows`, flattened."""
        firsts = [(n % self.stages * self.chunks + n // self.stages) * self.longest for n in range(len(self.layers))]
        return np.concatenate([first + np.arange(n) for first, n in zip(firsts, self.layers, strict=True)])

    @property
    def by_stage(self) -> list[Fraction]:
        """Return the mean number of layers of each stage in a chunk."""
        return [Fraction(sum(self.layers[stage :: self.stages]), self.chunks) for stage in range(self.stages)]


def to_stages(x: Array, axis: int | None, counts: Counts, mesh_axis: str) -> Array:
    """Move layers split over stages along `axis`, another axis than theirs, to `[chunk, layer]` of their stages,
    padded to the longest: by one all-to-all. With None each stage has all layers."""
    rows = counts.rows
    if axis is None:
        return x[jnp.array(rows)[lax.axis_index(mesh_axis)]]
    parts = x[rows]
    if counts.stages > 1:
        parts = lax.all_to_all(parts, mesh_axis, 0, 0)
    joined = jnp.moveaxis(parts, 0, axis + 1)
    return joined.reshape(*joined.shape[: axis + 1], -1, *joined.shape[axis + 3 :])


def from_stages(x: Array, axis: int | None, counts: Counts, mesh_axis: str) -> Array:
    """Move `[chunk, layer]` back to where the layers rest; where each stage has all of them, zeros for others' layers."""
    if axis is None:
        stage = lax.axis_index(mesh_axis)
        rows, layers = jnp.array(counts.rows)[stage], jnp.array(counts.layers).reshape(-1, counts.stages)[:, stage]
        here = jnp.arange(counts.longest) < layers[:, None]
        x = jnp.where(here.reshape(*here.shape, *[1] * (x.ndim - 2)), x, 0)
        return jnp.zeros((sum(counts.layers), *x.shape[2:]), x.dtype).at[rows].add(x)
    parts = x.reshape(*x.shape[: axis + 1], counts.stages, -1, *x.shape[axis + 2 :])
    parts = jnp.moveaxis(parts, axis + 1, 0)
    if counts.stages > 1:
        parts = lax.all_to_all(parts, mesh_axis, 0, 0)
    return parts.reshape(-1, *parts.shape[3:])[counts.places]
