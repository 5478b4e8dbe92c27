"""The sum over the devices along mesh axes, by XLA or by a kernel. The specification is `collectives.all_reduce`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels import collectives
from jshard.kernels.collectives import MeshAxis
from jshard.kernels.deterministic_sum import BUCKET_BYTES, ordered_psum
from jshard.kernels.invariant_cast import set_varying
from jshard.kernels.select_algorithm import adds_in_order, resolve_algorithm, room
from jshard.kernels.vmap import call_batched

Algorithm = Literal["auto", "in_order", "one_shot", "two_shot", "ring", "torus", "xla"]


def all_reduce(
    x: Array, mesh_axis: MeshAxis, *, op: Literal["sum", "max", "min", "mean"] = "sum", algorithm: Algorithm = "auto"
) -> Array:
    """The sum (or max, min, mean) of `x` over the devices along `mesh_axis`; every device gets it, to the same bit.

    "in_order" adds in the order of devices, and costs an all-to-all, of large arrays an all-gather besides. "auto" is what
    `kernels.choose` says and costs nothing where that is plain XLA. A kernel adds bfloat16 in float32 and rounds once. Any
    shape; the gradient is psum's. One can't be forced where it can't run: that is an error.
    """
    mesh_axes = collectives.canonicalize_mesh_axes("all_reduce", mesh_axis)
    x = jnp.asarray(x)
    more = None if op in ("sum", "mean") else lambda: (f"a kernel adds, and takes no {op}", 'use algorithm="auto"')
    taken = resolve_algorithm("all_reduce", algorithm, x, mesh_axes, more)
    if taken == "xla":
        return collectives.all_reduce(x, mesh_axes, op=op)
    total: Array = _summed(collectives.pvary(x, mesh_axes), mesh_axes, taken)
    return total / collectives.axis_size(mesh_axes) if op == "mean" else total


def all_reduce_coalesced(arrays: tuple[Array, ...], mesh_axis: MeshAxis, *, algorithm: Algorithm) -> tuple[Array, ...]:
    """The sum of each. In order, the smallest go as one array, as many as are small together: between processes one
    collective more costs most. XLA joins its own."""
    mesh_axes, found = collectives.canonicalize_mesh_axes("all_reduce", mesh_axis), dict[int, Array]()
    for numbers in _joint(arrays) if adds_in_order(algorithm) else ():
        some = [arrays[number] for number in numbers]
        varying = [jax.typeof(each).mat.varying for each in some]
        every = tuple(sorted(frozenset(mesh_axes).union(*varying)))
        flat = jnp.concatenate([collectives.pvary(each, every).reshape(-1) for each in some])
        parts = jnp.split(
            all_reduce(flat, mesh_axes, algorithm=algorithm), [*itertools.accumulate(x.size for x in some)][:-1]
        )
        for number, part, each, differs in zip(numbers, parts, some, varying, strict=True):
            found[number] = set_varying(part.reshape(each.shape), differs - {*mesh_axes})
    rest = {n: all_reduce(each, mesh_axes, algorithm=algorithm) for n, each in enumerate(arrays) if n not in found}
    return tuple((found | rest)[number] for number in range(len(arrays)))


def _joint(arrays: Sequence[Array]) -> Iterator[list[int]]:
    """The numbers of those to be summed as one: of one dtype, the smallest first."""
    kinds: dict[Any, list[int]] = {}
    for number in sorted(range(len(arrays)), key=lambda number: arrays[number].size):
        kinds.setdefault(arrays[number].dtype, []).append(number)
    for numbers in kinds.values():
        bytes_until = itertools.accumulate(arrays[number].size * arrays[number].dtype.itemsize for number in numbers)
        small = [number for number, until in zip(numbers, bytes_until, strict=True) if until <= BUCKET_BYTES]
        if len(small) > 1:
            yield small


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _summed(x: Array, mesh_axes: tuple[str, ...], algorithm: str) -> Array:
    return call_batched(lambda x, _: _kernel(x, mesh_axes, algorithm), x, 0)


def _backward(mesh_axes: tuple[str, ...], algorithm: str, _: None, cotangent: Array) -> tuple[Array]:
    """psum's own: with the check on, the cotangent is one that all devices have, and nothing moves."""
    if collectives.check_vma_enabled():
        return (collectives.pvary(cotangent, mesh_axes),)
    return (_summed(cotangent, mesh_axes, algorithm),)


_summed.defvjp(lambda x, mesh_axes, algorithm: (_summed(x, mesh_axes, algorithm), None), _backward)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _kernel(x: Array, mesh_axes: tuple[str, ...], algorithm: str) -> Array:
    """Packed into tiles, summed by pieces that fit the chip's VMEM, unpacked. Equal calls share one trace."""
    if algorithm == "in_order":
        return ordered_psum(x, mesh_axes)
    from jshard.kernels.tiles import pack, unpack
    from jshard.kernels.tpu import all_reduce as tpu
    from jshard.kernels.tpu.dma import Group

    group = Group.of(mesh_axes)
    if algorithm == "torus":
        return _torus(x, mesh_axes)
    if algorithm == "one_shot":
        return unpack(tpu.one_shot(pack(x, 1)[0], group, x), x.shape)
    n = group.size
    if algorithm == "two_shot":
        return _in_pieces(x, lambda piece: tpu.two_shot(pack(piece, n), group, piece), 3 * x.dtype.itemsize)
    return _in_pieces(x, lambda piece: _ring(piece, group), 2 * x.dtype.itemsize + 4)


def _ring(x: Array, group: Any) -> Array:
    from jshard.kernels.tiles import pack
    from jshard.kernels.tpu import all_reduce as tpu

    tiles = pack(x, 2 * group.size)
    return tpu.bidirectional_ring(tiles.reshape(group.size, 2, *tiles.shape[1:]), group, x)


def _torus(x: Array, mesh_axes: tuple[str, ...]) -> Array:
    """Scattered along the first mesh axis, the rest summed along the others, gathered back: each ring is short."""
    from jshard.kernels.tiles import pack, unpack
    from jshard.kernels.tpu import ring
    from jshard.kernels.tpu.dma import Group, accumulator_dtype

    def summed(piece: Array, names: tuple[str, ...]) -> Array:
        group = Group.of(names[:1])
        n = group.size
        if n == 1:
            return summed(piece, names[1:]) if len(names) > 1 else piece
        if len(names) == 1:
            return unpack(_ring(piece, group), piece.shape)
        tiles = pack(piece, 2 * n)
        tiles = tiles.reshape(n, 2, *tiles.shape[1:])
        part = ring.reduce_scatter(tiles, group, piece, out_dtype=accumulator_dtype(x.dtype))
        part = summed(part, names[1:]).astype(piece.dtype)
        return unpack(ring.all_gather(part, group, piece), piece.shape)

    return _in_pieces(x, lambda piece: summed(piece, mesh_axes), 3 * max(x.dtype.itemsize, 4))


def _in_pieces(x: Array, f: Callable[[Array], Array], bytes_each: int) -> Array:
    """`f` on flat pieces of x, each of which needs at most the chip's room in VMEM."""
    from jshard.kernels.tiles import unpack

    pieces = -(-x.size * bytes_each // room())
    if pieces == 1:
        return unpack(f(x), x.shape)
    size = -(-x.size // pieces)
    flat = jnp.pad(x.reshape(-1), (0, pieces * size - x.size)).reshape(pieces, size)
    done = lax.map(lambda piece: unpack(f(piece), (size,)), flat)
    return done.reshape(-1)[: math.prod(x.shape)].reshape(x.shape)
