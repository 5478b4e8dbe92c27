"""The layout of an array on a mesh: for every axis of the array, the mesh axes to split it."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jshard.errors import JShardError, kind_of, multiples
from jshard.layouts.mesh import present_mesh, sizes_of

MeshAxes = str | Sequence[str] | None


def as_axes(mesh_axes: MeshAxes) -> tuple[str, ...]:
    """Return `None`, a name or names as a tuple of names."""
    if mesh_axes is None:
        return ()
    return (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)


class Layout:
    """`Layout(mesh, "data", None, ("tensor", "seq"))`: axis 0 over data, 1 whole, 2 over tensor and seq."""

    __slots__ = ("axes", "mesh")

    def __init__(self, mesh: Mesh, *axes: MeshAxes):
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise JShardError(
                f"jshard.Layout was given {kind_of(mesh)} as its mesh",
                hint='write jshard.Layout(jshard.mesh(), "data")',
            )
        self.mesh = mesh
        self.axes: tuple[tuple[str, ...], ...] = tuple(as_axes(each) for each in axes)
        seen: dict[str, int] = {}
        for axis, names in enumerate(self.axes):
            for name in names:
                if name not in mesh.shape:
                    raise JShardError(
                        f'axis {axis} is laid over mesh axis "{name}", which the mesh does not have',
                        hint=f"use one of {', '.join(mesh.shape)}",
                    )
                if name in seen:
                    raise JShardError(
                        f'mesh axis "{name}" splits both axis {seen[name]} and axis {axis} of one array',
                        hint=f'take "{name}" away from one of them',
                    )
                seen[name] = axis

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.axes == other.axes and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash((self.mesh, self.axes))

    def __repr__(self) -> str:
        each = ", ".join("whole" if not names else "+".join(names) for names in self.axes)
        return f"Layout([{each}] on {sizes_of(self.mesh)})"

    @property
    def rank(self) -> int:
        return len(self.axes)

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*self.axes)

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """All mesh axes of this layout."""
        return tuple(name for names in self.axes for name in names)

    def ways(self, axis: int) -> int:
        """Return the number of parts of `axis`."""
        return math.prod(self.mesh.shape[name] for name in self.axes[axis])

    def with_axis(self, axis: int, mesh_axes: MeshAxes) -> Layout:
        """Return the layout with `axis` over `mesh_axes`."""
        axes = list(self.axes)
        axes[axis] = as_axes(mesh_axes)
        return Layout(self.mesh, *axes)

    def spare_axis(
        self, mesh_axes: MeshAxes = None, shape: Sequence[int] | None = None, keep: Collection[int] = ()
    ) -> int:
        """Return the axis to split further, outside `keep`: the first whole axis, else the first axis.
        Given a shape, return the first of them divisible over these mesh axes too, if there is one."""
        ways = math.prod(self.mesh.shape[name] for name in as_axes(mesh_axes))
        axes = sorted((axis for axis in range(self.rank) if axis not in keep), key=lambda axis: bool(self.axes[axis]))
        divides = (axis for axis in axes if shape is None or not shape[axis] % (self.ways(axis) * ways))
        return next(divides, axes[0])

    def also_over(self, mesh_axes: MeshAxes, shape: Sequence[int] | None = None, keep: Collection[int] = ()) -> Layout:
        """Return the layout split over these mesh axes too, along the spare axis. A number stays
        whole. Given a shape, a mesh axis is left out if it divides no axis."""
        names = as_axes(mesh_axes)
        if not names or self.rank <= len(keep):
            return self
        axis = self.spare_axis(names, shape, keep)
        split = self.with_axis(axis, (*self.axes[axis], *names))
        if shape is None or not shape[axis] % split.ways(axis):
            return split
        one_by_one = sorted(names, key=lambda name: -self.mesh.shape[name]) if names[1:] else []
        return functools.reduce(lambda layout, name: layout.also_over(name, shape, keep), one_by_one, self)

    def shard_shape(self, shape: Sequence[int], *, label: str = "a layout") -> tuple[int, ...]:
        """Return the shape of a shard; raise an error if the rank differs or a size does not divide."""
        if len(shape) != self.rank:
            raise JShardError(
                f"{label} lays out {self.rank} axes, but the array {tuple(shape)} has {len(shape)}",
                hint=f"give {len(shape)} axes",
            )
        for axis, size in enumerate(shape):
            check_divides(size, self.axes[axis], self.mesh, label=label, what=f"axis {axis} of size {size}")
        return tuple(size // self.ways(axis) for axis, size in enumerate(shape))

    @classmethod
    def from_sharding(cls, sharding: NamedSharding, rank: int) -> Layout:
        """Return the layout of an array of this rank under a sharding."""
        mesh: Any = sharding.mesh
        return cls(mesh, *sharding.spec, *(None,) * (rank - len(sharding.spec)))

    @classmethod
    def of(cls, x: object) -> Layout | None:
        """Return the layout of `x`, if known: from its type on an explicit mesh, else from its sharding."""
        if isinstance(x, jax.ShapeDtypeStruct):
            return cls.from_sharding(x.sharding, x.ndim) if isinstance(x.sharding, NamedSharding) else None
        typed = jax.typeof(x).sharding
        if typed is not None and not typed.mesh.empty and typed.mesh.are_all_axes_explicit:
            concrete = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
            return cls.from_sharding(concrete if isinstance(concrete, NamedSharding) else typed, jax.typeof(x).ndim)
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and isinstance(x.sharding, NamedSharding):
            return cls.from_sharding(x.sharding, x.ndim)
        return None


Placement = Layout | NamedSharding | PartitionSpec


def as_layout(where: Placement, rank: int | None, *, label: str, beside: Layout | None = None) -> Layout:
    """Return `where` as the layout of an array of this rank, or for rank None, of the axes it
    names. A `PartitionSpec` means the mesh of `jax.set_mesh`, else of the loaded configuration,
    else of the layout `beside`."""
    if isinstance(where, Layout):
        return where
    spec, mesh = getattr(where, "spec", where), getattr(where, "mesh", None)
    if not isinstance(spec, PartitionSpec):
        raise JShardError(
            f"{label} was given {kind_of(where)} as layout",
            hint='give it a jshard.Layout, a NamedSharding or a PartitionSpec, as in jax.P("data")',
        )
    if spec.unreduced or spec.reduced or PartitionSpec.UNCONSTRAINED in spec:
        raise JShardError(
            f"{label} was given {spec}, which leaves the layout of an axis open",
            hint="name a mesh axis or None for each axis",
        )
    if "host" in (kind := getattr(where, "memory_kind", None) or ""):
        raise JShardError(
            f"{label} was given a sharding in {kind}, but places arrays in the memory of devices",
            hint="use jshard.place(x, jax.memory.Space.Host)",
        )
    mesh = mesh or present_mesh() or (beside and beside.mesh)
    if mesh is None:
        raise JShardError(
            f"{label} was given {spec}, but no mesh is set or loaded",
            hint=f"give it jax.NamedSharding(mesh, {spec}), or call jshard.load first",
        )
    return Layout(mesh, *spec, *(None,) * ((rank or len(spec)) - len(spec)))


def check_divides(
    size: int, mesh_axes: Sequence[str], mesh: Mesh, *, label: str, what: str, otherwise: str = "pad"
) -> None:
    """Raise an error with the nearest valid sizes if `size` does not divide over `mesh_axes`."""
    ways = math.prod(mesh.shape[name] for name in mesh_axes)
    if not size % ways:
        return
    names = " x ".join(f'"{name}"' for name in mesh_axes)
    axes = "mesh axes" if mesh_axes[1:] else "mesh axis"
    raise JShardError(
        f"{label} splits {what} over {axes} {names} of size {ways}", hint=f"use {multiples(size, ways)}, or {otherwise}"
    )
