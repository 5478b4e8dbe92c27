"""Redistribution of arrays between layouts, only by explicit, countable collectives."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jshard.errors import JShardError, kind_of
from jshard.layouts.layout import Layout, Placement, as_layout
from jshard.layouts.mesh import check_in_use, is_explicit, sizes_of
from jshard.layouts.p2p import moved, where
from jshard.programs.provenance import scope

Axes = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Move:
    """A step of a redistribution. `slice` splits `axis` over `mesh_axis`, without a collective. `all_gather` makes
    it whole again. `all_to_all` moves `mesh_axis` from `source` to `axis`; these are equal for the other kinds."""

    kind: str
    mesh_axis: str
    axis: int
    source: int


def plan_moves(source: Axes, target: Axes) -> tuple[Move, ...]:
    """Return the moves between layouts: early slices, late gathers, and exchanges between array axes."""
    have = [list(names) for names in source]
    want = [list(names) for names in target]
    moves: list[Move] = []

    def beyond(axis: int) -> tuple[list[str], list[str]]:
        """Return the rests of both lists after their common start."""
        pairs = zip(have[axis], want[axis], strict=False)
        count = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        return have[axis][count:], want[axis][count:]

    while have != want:
        used = {name for names in have for name in names}
        apart = [beyond(axis) for axis in range(len(have))]
        ready = {axis: missing[0] for axis, (surplus, missing) in enumerate(apart) if missing and not surplus}
        free = next(((axis, name) for axis, name in ready.items() if name not in used), None)
        if free is not None:
            axis, name = free
            have[axis].append(name)
            moves.append(Move("slice", name, axis, axis))
            continue
        ends = [axis for axis, (surplus, _) in enumerate(apart) if surplus]
        swap = next(((axis, to) for axis in ends for to, name in ready.items() if have[axis][-1] == name), None)
        if swap is not None:
            axis, to = swap
            have[to].append(have[axis].pop())
            moves.append(Move("all_to_all", have[to][-1], to, axis))
            continue
        axis = next((axis for axis in ends if not any(have[axis][-1] in names for names in want)), ends[0])
        moves.append(Move("all_gather", have[axis].pop(), axis, axis))
    return tuple(moves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def take_slice(x: jax.Array, mesh_axis: str, axis: int) -> jax.Array:
    """Return this device's shard of an array equal on all devices of `mesh_axis`; its gradient is gathered."""
    size = x.shape[axis] // lax.axis_size(mesh_axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(mesh_axis) * size, size, axis)


take_slice.defvjp(
    lambda x, mesh_axis, axis: (take_slice(x, mesh_axis, axis), None),
    lambda mesh_axis, axis, _, cotangent: (
        lax.all_gather(cotangent, mesh_axis, axis=axis, tiled=True, to="invarying"),
    ),
)


def move(x: jax.Array, moves: Sequence[Move]) -> jax.Array:
    """Apply the moves to a device's shard (inside shard_map)."""
    for step in moves:
        match step.kind:
            case "slice":
                x = take_slice(x, step.mesh_axis, step.axis)
            case "all_gather":
                x = lax.all_gather(x, step.mesh_axis, axis=step.axis, tiled=True, to="invarying")
            case _:
                x = lax.all_to_all(x, step.mesh_axis, split_axis=step.axis, concat_axis=step.source, tiled=True)
    return x


def redistribute(
    x: Any, layout: Placement, *, source: Layout | None = None, label: str = "jshard.place"
) -> jax.Array:  # fmt: skip
    """Move an array, a list of numbers or a number to `layout`.

    `layout` is a `Layout`, a `NamedSharding`, or a `PartitionSpec` over the mesh that is set or
    loaded. On an explicit mesh, and for concrete arrays, every byte moved between devices is a
    collective in the ledger. Inside jit on an auto mesh, the present layout is unknown and the
    partitioner moves the array, unless `source` gives the layout.
    """
    x = as_array(x, label=label)
    target = layout if isinstance(layout, Layout) else as_layout(layout, x.ndim, label=label, beside=Layout.of(x))
    target.shard_shape(x.shape, label=label)
    return _move_traced(x, target, source, label) if isinstance(x, Tracer) else _place(x, target, label)


def as_array(x: object, *, label: str) -> Any:
    """Return an array as it is; convert numbers and lists of numbers as JAX does."""
    if isinstance(x, jax.Array | np.ndarray) and x.dtype != object:
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise JShardError(
            f"{label} takes an array, a list of numbers or a number, and was given {kind_of(x)}",
            hint="use jax.tree.map to give it each array of a tree by itself",
        ) from None


def _place(x: jax.Array, layout: Layout, by: str) -> jax.Array:
    present = Layout.of(x) if isinstance(x, jax.Array) else None
    if present == layout:
        return x
    by = "" if by == "jshard.place" else by
    if present is None or present.mesh != layout.mesh:
        moved("redistribute", x.shape, x.dtype, where(x), layout.sharding, by=by)
        return jax.device_put(x, layout.sharding)  # from the host, or from other devices: a transfer, not a collective
    steps = [f"{step.kind} over {step.mesh_axis}" for step in plan_moves(present.axes, layout.axes)]
    moved("redistribute", x.shape, x.dtype, where(x), layout.sharding, by=by, moves=steps)
    check_in_use(layout.mesh)
    return _compiled_move(present, layout)(x)


def _move_traced(x: jax.Array, layout: Layout, source: Layout | None, by: str) -> jax.Array:
    present = Layout.of(x)
    if present is not None and present.mesh.shape != layout.mesh.shape:
        raise JShardError(
            f"{by} moves an array from the mesh {sizes_of(present.mesh)} to the mesh {sizes_of(layout.mesh)}, which no "
            "compiled program can",
            hint="place it first, outside jax.jit",
        )
    check_in_use(layout.mesh)
    if not is_explicit(layout.mesh):
        if source is None or source.mesh != layout.mesh:
            return lax.with_sharding_constraint(x, layout.sharding)
        return x if source.axes == layout.axes else _compiled_move(source, layout)(x)
    if present is None:
        present = replicated(layout.mesh, layout.rank)
        x = jax.sharding.reshard(x, present.sharding)
    if present.axes == layout.axes:
        return x
    return _compiled_move(Layout(layout.mesh, *present.axes), layout)(x)


@functools.lru_cache(maxsize=4096)
def _compiled_move(source: Layout, target: Layout) -> Any:
    moves = plan_moves(source.axes, target.axes)

    def redistribution(x: jax.Array) -> jax.Array:
        with scope(reason="redistribute"):
            return jax.shard_map(
                functools.partial(move, moves=moves), mesh=target.mesh, in_specs=source.spec, out_specs=target.spec
            )(x)

    return jax.jit(redistribution)


def replicated(mesh: jax.sharding.Mesh, rank: int) -> Layout:
    """Return the layout of an array whole on every device."""
    return Layout(mesh, *(None,) * rank)
