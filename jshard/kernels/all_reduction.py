"""All-reduce along mesh axes, by XLA (the specification) or by a kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels import collectives, slices
from jshard.kernels.collectives import MeshAxis
from jshard.kernels.deterministic_sum import BUCKET_BYTES, ordered_psum
from jshard.kernels.gather_scatter import all_gather, reduce_scatter
from jshard.kernels.invariant_cast import set_varying
from jshard.kernels.select_algorithm import adds_in_order, resolve_algorithm, vmem_budget
from jshard.kernels.tiles import in_pieces, pack, unpack
from jshard.kernels.vmap import call_batched

Algorithm = Literal["auto", "hierarchical", "in_order", "one_shot", "permute", "ring", "torus", "xla"]


def all_reduce(
    x: Array, mesh_axis: MeshAxis, *, op: Literal["sum", "max", "min", "mean"] = "sum", algorithm: Algorithm = "auto"
) -> Array:
    """Sum `x` (or take the max, min, mean) over the devices along `mesh_axis`; every device gets the same bits.

    Several mesh axes are reduced by a single collective. An algorithm that is named and can't run here is an error.

    - "auto": the choice of `kernels.choose`.
    - "in_order": add in device order, by an all-to-all; large arrays also take an all-gather.
    - "hierarchical": a reduce-scatter inside each slice, an all-reduce of the parts between slices, and an all-gather. "auto"
      takes it if some mesh axes cross slices and some do not.
    - "permute": a reduce-scatter and an all-gather by XLA's permutes, on any backend, with rounding at each addition.
    - A kernel takes any shape, adds bfloat16 in float32 and rounds once.

    The gradient of a sum is psum's. The gradient of a max or min is shared
    equally among the devices that attain it, at the cost of another all-reduce.
    """
    collectives.check_choice("all_reduce", "op", op, ("sum", "max", "min", "mean"))
    mesh_axes = collectives.canonicalize_mesh_axes("all_reduce", mesh_axis)
    x = jnp.asarray(x)
    more = None if op in ("sum", "mean") else lambda: (f"a kernel adds, and takes no {op}", 'use algorithm="auto"')
    chosen = resolve_algorithm("all_reduce", algorithm, x, mesh_axes, more)
    if not mesh_axes:
        return x
    x = collectives.pvary(x, mesh_axes)
    if op in ("max", "min"):
        return (_pextremum if jnp.issubdtype(x.dtype, jnp.inexact) else _pmax_or_pmin)(mesh_axes, op, x)
    total: Array = lax.psum(x, mesh_axes) if chosen == "xla" else _all_reduce(x, mesh_axes, chosen)
    return total / collectives.axis_size(mesh_axes) if op == "mean" else total


def _pmax_or_pmin(mesh_axes: tuple[str, ...], op: str, x: Array) -> Array:
    return lax.pmax(x, mesh_axes) if op == "max" else lax.pmin(x, mesh_axes)


_pextremum = jax.custom_jvp(_pmax_or_pmin, nondiff_argnums=(0, 1))  # JAX has no derivative of pmax and pmin


@_pextremum.defjvp
def _pextremum_jvp(mesh_axes, op, primals, tangents):
    (x,), (x_dot,) = primals, tangents
    y = _pextremum(mesh_axes, op, x)
    attained = (x == y).astype(x.dtype)
    share = attained / lax.psum(attained, mesh_axes)
    return y, lax.psum(x_dot * share, mesh_axes)


def all_reduce_coalesced(arrays: tuple[Array, ...], mesh_axis: MeshAxis, *, algorithm: Algorithm) -> tuple[Array, ...]:
    """Sum several arrays over the devices along `mesh_axis`.

    In device order, small arrays share an all-to-all, as each
    collective between processes costs a wait. XLA combines its own.
    """
    mesh_axes, sums = collectives.canonicalize_mesh_axes("all_reduce", mesh_axis), dict[int, Array]()
    for numbers in _buckets(arrays) if adds_in_order(algorithm) else ():
        some = [arrays[number] for number in numbers]
        flat = jnp.concatenate([x.reshape(-1) for x in collectives.pvary_alike(*some, mesh_axes=mesh_axes)])
        ends = itertools.accumulate(x.size for x in some)
        parts = jnp.split(all_reduce(flat, mesh_axes, algorithm=algorithm), [*ends][:-1])
        for number, part, x in zip(numbers, parts, some, strict=True):
            sums[number] = set_varying(part.reshape(x.shape), jax.typeof(x).mat.varying - {*mesh_axes})
    rest = {n: all_reduce(x, mesh_axes, algorithm=algorithm) for n, x in enumerate(arrays) if n not in sums}
    return tuple((sums | rest)[number] for number in range(len(arrays)))


def _buckets(arrays: Sequence[Array]) -> Iterator[list[int]]:
    """Yield the numbers of small arrays of a dtype, the smallest first, up to `BUCKET_BYTES` together."""
    by_dtype: dict[Any, list[int]] = {}
    # The smallest first: this saves the most collectives for the fewest copied bytes.
    for number in sorted(range(len(arrays)), key=lambda number: arrays[number].size):
        by_dtype.setdefault(arrays[number].dtype, []).append(number)
    for numbers in by_dtype.values():
        bytes_until = itertools.accumulate(arrays[number].size * arrays[number].dtype.itemsize for number in numbers)
        small = [number for number, until in zip(numbers, bytes_until, strict=True) if until <= BUCKET_BYTES]
        if len(small) > 1:
            yield small


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_reduce(x: Array, mesh_axes: tuple[str, ...], algorithm: str) -> Array:
    if algorithm == "permute":  # JAX batches its own permutes
        return _kernel(x, mesh_axes, algorithm)
    return call_batched(lambda x, _: _kernel(x, mesh_axes, algorithm), x, 0)


def _all_reduce_bwd(mesh_axes: tuple[str, ...], algorithm: str, _: None, cotangent: Array) -> tuple[Array]:
    """Differentiate as psum: with `check_vma` on, the cotangent is equal on all devices, and nothing moves."""
    if collectives.check_vma_enabled():
        return (collectives.pvary(cotangent, mesh_axes),)
    return (_all_reduce(cotangent, mesh_axes, algorithm),)


_all_reduce.defvjp(lambda x, *static: (_all_reduce(x, *static), None), _all_reduce_bwd)


@functools.partial(jax.jit, static_argnums=(1, 2))  # equal calls share one trace
def _kernel(x: Array, mesh_axes: tuple[str, ...], algorithm: str) -> Array:
    """Pack x into tiles, sum it in pieces that fit the chip's VMEM, unpack."""
    if algorithm == "in_order":
        return ordered_psum(x, mesh_axes)
    if algorithm == "hierarchical":
        between, inside = slices.between_and_inside(mesh_axes)
        return _by_parts(x, inside, "auto", lambda part: all_reduce(part, between))
    if algorithm == "permute":
        return _by_parts(x, mesh_axes, "permute", lambda part: part)
    from jshard.kernels.tpu import all_reduce as tpu
    from jshard.kernels.tpu.dma import Group

    if algorithm == "torus":
        return _torus(x, mesh_axes)
    group = Group.of(mesh_axes)
    if algorithm == "one_shot":
        return unpack(tpu.one_shot(pack(x, 1)[0], group, x), x.shape)
    return _in_pieces(x, lambda piece: _ring(piece, group), 2 * x.dtype.itemsize + 4)


def _by_parts(x: Array, mesh_axes: tuple[str, ...], algorithm: Any, use: Callable[[Array], Array]) -> Array:
    """Reduce-scatter, apply `use` to each device's part, and gather the results."""
    n = collectives.axis_size(mesh_axes)
    axis = next((axis for axis, size in enumerate(x.shape) if size % n == 0), None)
    if axis is None:
        flat = x.reshape(-1)
        return _by_parts(jnp.pad(flat, (0, -x.size % n)), mesh_axes, algorithm, use)[: x.size].reshape(x.shape)
    part = reduce_scatter(x, mesh_axes, axis=axis, algorithm=algorithm)
    return all_gather(use(part), mesh_axes, axis=axis, result="invariant", algorithm=algorithm)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def pvary_summed(arrays: tuple[Array, ...], mesh_axes: tuple[str, ...], algorithm: str) -> tuple[Array, ...]:
    """Mark arrays as varying over mesh axes, and sum their gradients together
    by `algorithm`. JAX would sum each gradient by a psum of its own."""
    return tuple(lax.pcast(array, mesh_axes, to="varying") for array in arrays)


pvary_summed.defvjp(
    lambda arrays, *static: (pvary_summed(arrays, *static), None),
    lambda mesh_axes, algorithm, _, cotangents: (all_reduce_coalesced(cotangents, mesh_axes, algorithm=algorithm),),
)


def _halves(x: Array, n: int) -> Array:
    """Pack `x` as n parts of two halves, a half for each direction of a ring: `[n, 2, rows, 128]`."""
    tiles = pack(x, 2 * n)
    return tiles.reshape(n, 2, *tiles.shape[1:])


def _ring(x: Array, group: Any) -> Array:
    from jshard.kernels.tpu import all_reduce as tpu

    return tpu.bidirectional_ring(_halves(x, group.size), group, x)


def _torus(x: Array, mesh_axes: tuple[str, ...]) -> Array:
    """Reduce-scatter along the first mesh axis, all-reduce along the others, all-gather back: each ring is short."""
    from jshard.kernels.tpu import dma, ring

    def summed(piece: Array, names: tuple[str, ...]) -> Array:
        group = dma.Group.of(names[:1])
        if group.size == 1:
            return summed(piece, names[1:]) if len(names) > 1 else piece
        if len(names) == 1:
            return unpack(_ring(piece, group), piece.shape)
        # Parts keep the accumulator's dtype until the last axis: a sum is rounded once, not once per axis.
        part = ring.reduce_scatter(_halves(piece, group.size), group, piece, out_dtype=dma.accumulator_dtype(x.dtype))
        part = summed(part, names[1:]).astype(piece.dtype)
        return unpack(ring.all_gather(part, group, piece), piece.shape)

    return _in_pieces(x, lambda piece: summed(piece, mesh_axes), 3 * max(x.dtype.itemsize, 4))


def _in_pieces(x: Array, body: Callable[[Array], Array], bytes_per_number: int) -> Array:
    """Run `body` on flat pieces of x in turn, each small enough for the chip's VMEM."""
    pieces = -(-x.size * bytes_per_number // vmem_budget())
    return in_pieces(x[None], pieces, lambda piece: unpack(body(piece[0]), piece.shape[1:]))
