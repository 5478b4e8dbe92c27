"""`sum`, `mean` and `max` of a sharded array: each device's partial result, then an all-reduce."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jshard.errors import JShardError
from jshard.kernels.all_reduction import all_reduce
from jshard.kernels.collectives import axis_size
from jshard.layers.strategy import all_reduce_of
from jshard.layouts.layout import Layout
from jshard.layouts.redistribution import as_array, redistribute
from jshard.signals.active_config import configuration, mesh
from jshard.signals.scope import active, resolve, tensor_layout, unplaced
from jshard.signals.signal import Signal

Axis = int | Sequence[int] | None
Kind = Literal["sum", "mean", "max", "min"]


def sum(x: Any, axis: Axis = None, keepdims: bool = False) -> jax.Array:
    """Sum over `axis` (default: all axes), for any sharding of `x`."""
    return _reduce("sum", x, axis, keepdims)


def mean(x: Any, axis: Axis = None, keepdims: bool = False) -> jax.Array:
    """Take the mean over `axis`: the sum over all devices, divided by the global size."""
    return _reduce("mean", x, axis, keepdims)


def max(x: Any, axis: Axis = None, keepdims: bool = False) -> jax.Array:
    """Take the maximum over `axis`. Its gradient is shared among equal elements, as by `jnp.max`."""
    return _reduce("max", x, axis, keepdims)


@dataclasses.dataclass(frozen=True)
class ReductionBody:
    """The per-device program of a reduction."""

    kind: Kind
    axes: tuple[int, ...]
    keepdims: bool
    mesh_axes: tuple[str, ...]
    algorithm: Any = "xla"  # of the all-reduce

    def __call__(self, x: jax.Array) -> jax.Array:
        match self.kind:
            case "max" | "min":
                top = _largest(self, x) if jnp.issubdtype(x.dtype, jnp.inexact) else _top(self, x)
                return top if self.keepdims else jnp.squeeze(top, self.axes)
            case "sum":
                return self._total(x)
            case _:
                count = math.prod(x.shape[axis] for axis in self.axes) * axis_size(self.mesh_axes)
                total = self._total(x)
                return total / jnp.asarray(count, total.dtype)

    def _total(self, x: jax.Array) -> jax.Array:
        return all_reduce(jnp.sum(x, self.axes, keepdims=self.keepdims), self.mesh_axes, algorithm=self.algorithm)


def _top(body: ReductionBody, x: jax.Array) -> jax.Array:
    of_device = jnp.max if body.kind == "max" else jnp.min
    return all_reduce(of_device(x, body.axes, keepdims=True), body.mesh_axes, op=body.kind, algorithm="xla")


_largest = jax.custom_jvp(_top, nondiff_argnums=(0,))


@_largest.defjvp
def _largest_derivative(body: ReductionBody, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Return the maximum, or minimum, and the mean of the tangents of all elements equal to it."""
    (x,), (moves,) = primals, tangents
    top = _largest(body, x)
    attained = (x == top).astype(x.dtype)
    total = lambda x: all_reduce(jnp.sum(x, body.axes, keepdims=True), body.mesh_axes, algorithm="xla")
    return top, total(attained * moves / total(attained))


def _reduce(kind: Kind, x: jax.Array, axis: Axis, keepdims: bool) -> jax.Array:
    with resolve(())[1]:
        return _reduced(kind, jnp.asarray(as_array(x, label=f"jshard.{kind}")), axis, keepdims)


def _reduced(kind: Kind, x: jax.Array, axis: Axis, keepdims: bool) -> jax.Array:
    axes = _axes(kind, axis, x.ndim)
    if kind == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.float32)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return _local(kind, x, axes, keepdims, all_axes=axis is None)
    layout = _layout(x, axes)
    if layout is None:
        return {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}[kind](x, axes, keepdims=keepdims)
    x = redistribute(x, layout, label=str(active() or f"jshard.{kind}"))
    mesh_axes = tuple(name for reduced in axes for name in layout.axes[reduced])
    body = ReductionBody(kind, axes, keepdims, mesh_axes, _algorithm(kind, layout.mesh, mesh_axes))
    kept = [() if number in axes else names for number, names in enumerate(layout.axes)]
    target = kept if keepdims else [names for number, names in enumerate(kept) if number not in axes]
    return _program(body, layout, Layout(layout.mesh, *target), x)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _program(body: ReductionBody, source: Layout, target: Layout, x: jax.Array) -> jax.Array:
    return jax.shard_map(body, mesh=source.mesh, in_specs=source.spec, out_specs=target.spec)(x)


def _layout(x: jax.Array, axes: tuple[int, ...]) -> Layout | None:
    """Return the layout of `x`, if sharded, else the active signal's; None without either."""
    present, signal = Layout.of(x), active()
    if unplaced.value:  # here only closed-over arrays have a layout
        return None
    if present is not None and present.mesh_axes:
        if isinstance(present.mesh, jax.sharding.Mesh):
            return present
        loaded = mesh() if configuration() is not None else None
        if loaded is not None and loaded.abstract_mesh == present.mesh:
            return Layout(loaded, *present.axes)
        return present
    if signal is None:
        return present if present is None or isinstance(present.mesh, jax.sharding.Mesh) else None
    return _signal_layout(signal, x.ndim, axes)


def _signal_layout(signal: Signal, rank: int, axes: tuple[int, ...]) -> Layout:
    layout = tensor_layout(signal, rank)
    if signal.reduction and axes:
        layout = layout.with_axis(axes[0], (*layout.axes[axes[0]], *signal.reduction))
    return layout


def _local(kind: Kind, x: jax.Array, axes: tuple[int, ...], keepdims: bool, *, all_axes: bool) -> jax.Array:
    """Reduce inside a shard_map: `x` is split over its varying mesh axes, along array axes decided by the signal."""
    varying = tuple(sorted(jax.typeof(x).mat.varying))
    if all_axes or not varying:
        mesh_axes = varying
    else:
        signal = active()
        if signal is None:
            raise JShardError(
                f"jshard.{kind} over axis {axes[0]} inside a shard_map can't tell which mesh axes of "
                f"{', '.join(varying)} split it",
                hint=f"call it under a signal that says so, or reduce every axis: jshard.{kind}(x)",
            )
        layout = _signal_layout(signal, x.ndim, axes)
        mesh_axes = tuple(name for reduced in axes for name in layout.axes[reduced] if name in varying)
    on = None if active() is None else mesh()
    return ReductionBody(kind, axes, keepdims, mesh_axes, _algorithm(kind, on, mesh_axes))(x)


def _algorithm(kind: str, on: Any, mesh_axes: tuple[str, ...]) -> str:
    """Return the signal's algorithm for an all-reduce; a kernel named for `max` is an error: kernels add."""
    if not mesh_axes:
        return "xla"
    return all_reduce_of(active(), on, {"max": "adds, and jshard.max does not"}.get(kind))


def _axes(kind: str, axis: Axis, rank: int) -> tuple[int, ...]:
    axes = tuple(range(rank)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    for number in axes:
        if not -rank <= number < rank:
            raise JShardError(
                f"jshard.{kind} over axis {number} of a rank-{rank} array",
                hint=f"use an axis from 0 to {rank - 1}" if rank else "leave the axis out",
            )
    return tuple(sorted({number % rank for number in axes}))
