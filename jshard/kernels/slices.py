"""The mesh axes that cross slices, between which there is a slower network than inside one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
from jax import lax

# What tells them of the loaded configuration: set by jshard.signals, which knows configurations.
loaded_across: Callable[[], tuple[str, ...]] = lambda: ()


def size_along(mesh_axis: str) -> int:
    """Return `lax.axis_size`, which is a trace of `psum(1)`, looked up where it is that of a mesh and not of `jax.vmap`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[mesh_axis] if mesh_axis in mesh.manual_axes else lax.axis_size(mesh_axis)


def devices_of_a_slice() -> int:
    """Return how many devices of each slice are in the mesh that is traced for."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size // math.prod(mesh.shape[name] for name in loaded_across() if name in mesh.axis_names)


def between_and_inside(mesh_axes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Part mesh axes into those that cross slices and those that stay in one, without those of one device."""
    across, names = loaded_across(), [name for name in mesh_axes if size_along(name) > 1]
    return tuple(n for n in names if n in across), tuple(n for n in names if n not in across)


def is_hierarchy(mesh_axes: Iterable[str], elements: int | None = None) -> bool:
    """Return whether a sum of so many elements is one inside each slice, of parts, and then one of these between slices."""
    between, inside = between_and_inside(mesh_axes)
    return bool(between and inside) and (elements is None or elements >= math.prod(map(size_along, inside)))
