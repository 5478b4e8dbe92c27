"""Layers that are split over the stages of a pipeline: one stage after the other, and chunks of layers for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jshard.layers.partition.ticks import zeros_like_result
from jshard.provenance import scope

Arrays = list[Any]


def in_turn(
    layers: Callable[[Arrays], tuple[Arrays, Arrays]], carry: Arrays, mesh_axis: str, **by: str
) -> tuple[Arrays, Arrays]:
    """Run `layers`, the own ones of each stage, one stage after the other, while the others wait. What is carried goes around
    by permutes, and is on the first stage at the end, zeros on the others; each stage keeps what its own layers have left."""
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
    """Move the layers of this stage, which follow one another, to `[chunk, layer]` of the stages that run them: chunk c of
    stage s is the (c * stages + s)th. One permute for each chunk."""
    pieces = x.reshape(chunks, -1, *x.shape[1:])
    return _exchanged(pieces, _rounds(chunks, lax.axis_size(mesh_axis)), mesh_axis)


def from_chunks(x: Array, mesh_axis: str) -> Array:
    """Move `[chunk, layer]` back to where the layers rest."""
    rounds = _rounds(len(x), lax.axis_size(mesh_axis))
    back = [[(there, place, here, piece) for here, piece, there, place in each] for each in rounds]
    return _exchanged(x, back, mesh_axis).reshape(-1, *x.shape[2:])


Round = Sequence[tuple[int, int, int, int]]  # from this stage its piece, to that stage at this place


def _rounds(chunks: int, stages: int) -> list[Round]:
    """Who sends which piece to whom, so that in a round each stage sends one and is sent one."""
    period = stages // gcd(chunks, stages)

    def piece(stage: int, number: int) -> tuple[int, int, int, int]:
        at = (number + stage // period) % chunks
        chunk, there = divmod(stage * chunks + at, stages)
        return stage, at, there, chunk

    return [[piece(stage, number) for stage in range(stages)] for number in range(chunks)]


def _exchanged(pieces: Array, rounds: Sequence[Round], mesh_axis: str) -> Array:
    if len(pieces) == 1 or lax.axis_size(mesh_axis) == 1:
        return pieces
    own, result = lax.axis_index(mesh_axis), jnp.zeros_like(pieces)
    for each in rounds:
        sent = jnp.array([piece for _, piece, _, _ in sorted(each)])[own]
        place = jnp.array([place for _, place in sorted((there, place) for _, _, there, place in each)])[own]
        piece = lax.dynamic_index_in_dim(pieces, sent, keepdims=False)
        piece = lax.ppermute(piece, mesh_axis, [(here, there) for here, _, there, _ in each])
        result = lax.dynamic_update_index_in_dim(result, piece, place, 0)
    return result
