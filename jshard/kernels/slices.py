"""The mesh axes across slices, where the network is slower than inside a slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
from jax import lax

# Returns the mesh axes across slices of the loaded configuration; jshard.signals sets it.
loaded_across: Callable[[], tuple[str, ...]] = lambda: ()


def size_along(mesh_axis: str) -> int:
    """Return `lax.axis_size`, read from the mesh where possible: for axes of `jax.vmap` it is a trace of `psum(1)`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[mesh_axis] if mesh_axis in mesh.manual_axes else lax.axis_size(mesh_axis)


def devices_of_a_slice() -> int:
    """Return the number of devices of each slice in the mesh traced for."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size // math.prod(mesh.shape[name] for name in loaded_across() if name in mesh.axis_names)


def between_and_inside(mesh_axes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split mesh axes of at least two devices into axes across slices and axes inside a slice."""
    across, names = loaded_across(), [name for name in mesh_axes if size_along(name) > 1]
    return tuple(n for n in names if n in across), tuple(n for n in names if n not in across)


def is_hierarchy(mesh_axes: Iterable[str], elements: int | None = None) -> bool:
    """Return True if a sum of this size runs inside each slice first, and then on parts between slices."""
    between, inside = between_and_inside(mesh_axes)
    return bool(between and inside) and (elements is None or elements >= math.prod(map(size_along, inside)))
