"""Device meshes built from names and sizes, and parts of them by device number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jshard.errors import JShardError
from jshard.layouts.before_compiling import change_programs
from jshard.layouts.compilation_cache import keep_in_order

# Returns the mesh of the loaded configuration, if any: set by jshard.signals.
loaded_mesh: Callable[[], Mesh | AbstractMesh | None] = lambda: None
keep_in_order()
change_programs()
AXIS_TYPES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def build_mesh(
    sizes: Mapping[str, int], *, axis_types: str = "explicit", label: str = "the mesh", across: Sequence[str] = ()
) -> Mesh:
    """Return a mesh in JAX's device order. One size may be -1, for all remaining devices. `label`
    begins the errors. `across` are the mesh axes across slices: they come first, as the devices of
    a slice come before those of the next."""
    present = jax.devices()
    if across and all(hasattr(device, "slice_index") for device in present):  # pretend devices have none
        present = sorted(present, key=lambda device: device.slice_index)
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise JShardError(
                f'{label} has {size} devices along mesh axis "{name}"',
                hint="use 1 or more, or -1 for all that are left",
            )
    open_axis = {size: name for name, size in sizes.items()}.get(-1)
    if open_axis is not None:
        known = abs(math.prod(sizes.values()))
        if len(present) % known:
            raise JShardError(
                f'{label} leaves mesh axis "{open_axis}" open, but {len(present)} devices do not divide by {known}',
                hint=f"give sizes whose product divides {len(present)}",
            )
        sizes = {**sizes, open_axis: len(present) // known}
    count = math.prod(sizes.values())
    if count > len(present):
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise JShardError(
            f"{label} asks for {product} = {count} devices, but {len(present)} {'are' if present[1:] else 'is'} here",
            hint=f"make it smaller, or pretend with JAX_NUM_CPU_DEVICES={count} PJRT_NPROC={2 * count} JAX_PLATFORMS=cpu",
        )
    check_slices(present[:count], sizes, across, label)
    grid = np.array(present[:count], dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AXIS_TYPES[axis_types],) * len(sizes))


def check_slices(devices: Sequence[Any], sizes: Mapping[str, int], across: Sequence[str], label: str) -> None:
    """Raise an error unless exactly the mesh axes `across` cross the slices of real devices.
    Pretend devices are in no slice. GPUs are in slices too, but their mesh need not name them."""
    if devices[0].platform == "cpu" or (devices[0].platform != "tpu" and not across):
        return
    number = [device.slice_index for device in devices]
    slices, asked = len(set(number)), math.prod(sizes[name] for name in across)
    each = len(devices) // asked
    if number == [one for one in dict.fromkeys(number) for _ in range(each)]:
        return
    names = f"{' and '.join(map(repr, across))} over dcn for {asked} slices" if across else "no mesh axis over dcn"
    there = f"{slices} slices" if slices >= 2 else "one slice"
    raise JShardError(
        f"{label} has {names.replace(chr(39), chr(34))}, and its {len(devices)} devices are in {there}",
        hint=f"write slice: {{size: {slices}, over: dcn}}, and make the other sizes multiply to {len(devices) // slices}"
        if slices >= 2
        else f"write {across[0]}: {sizes[across[0]]}",
    )


def present_mesh() -> Any:
    """Return the mesh of `jax.set_mesh`, else of the loaded configuration, else None."""
    here = jax.sharding.get_abstract_mesh()
    if here.empty:
        return loaded_mesh()
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # JAX raises it in a trace, where an abstract mesh is enough
        return here


def in_place_of_set(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager[Any]:
    """Replace the mesh of `jax.set_mesh` by `mesh` inside, unless none is set or a trace is running."""
    here = jax.sharding.get_abstract_mesh()
    if here.empty or present_mesh() is here or not isinstance(mesh, Mesh):
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def check_in_use(mesh: Mesh | AbstractMesh) -> None:
    """Raise an error if the mesh of `jax.set_mesh` is not the mesh of a program over `mesh`."""
    here = jax.sharding.get_abstract_mesh()
    if here.empty or here.manual_axes or (here.shape, here.axis_types) == (mesh.shape, mesh.axis_types):
        return
    raise JShardError(
        f"jax.set_mesh has set the mesh {sizes_of(here)}, and this program is over the mesh {sizes_of(mesh)}",
        hint="remove jax.set_mesh, or write jax.set_mesh(jshard.mesh())",
    )


def sizes_of(mesh: Mesh | AbstractMesh) -> str:
    """Return the axes of a mesh with their sizes: `{data: 2, tensor: 4}`."""
    return f"{{{', '.join(f'{name}: {size}' for name, size in mesh.shape.items())}}}"


def workers_mesh(mesh: Mesh, workers: Sequence[int] | None, *, label: str) -> tuple[Mesh, tuple[str, ...]]:
    """Return the part of `mesh` with these device numbers, and its mesh axes; for all devices, `mesh`
    itself. A part is for programs outside jit, where types carry no layout: its axes are Auto."""
    if workers is None or list(workers) == list(range(mesh.size)):
        return mesh, tuple(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        raise JShardError(
            f"{label} names workers, which need the devices of a mesh, and the devices of this mesh are not here",
            hint="name a mesh axis instead: shard: {axis: 0, mesh: data}",
        )
    flat = list(mesh.devices.flat)
    missing = [worker for worker in workers if not 0 <= worker < len(flat)]
    if missing:
        raise JShardError(
            f"{label} names worker {missing[0]}, but the mesh has {len(flat)} devices",
            hint=f"use numbers from 0 to {len(flat) - 1}",
        )
    grid = np.array([flat[worker] for worker in workers], dtype=object)
    return Mesh(grid, ("workers",), axis_types=(AxisType.Auto,)), ("workers",)


def homes_of(arrays: Iterable[Any], full: object) -> list[Any]:
    """Return a mesh for each set of devices with an array: `full` for its own devices, or without any."""
    known = {tuple(full.devices.flat): full} if isinstance(full, Mesh) else {}
    found: dict[Any, Any] = {}
    for array in arrays:
        sharding = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            devices = tuple(sharding.mesh.devices.flat)
            found.setdefault(devices, known.get(devices, sharding.mesh))
    return list(found.values()) if known and found else [full]


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether an array's layout on this mesh is part of its type."""
    return all(kind == AxisType.Explicit for kind in mesh.axis_types)


def with_axis_types(mesh: Mesh, axis_types: str) -> Mesh:
    """Return a mesh with "explicit" axes, for layouts in types, or "auto" axes, for the compiler."""
    kinds = (AXIS_TYPES[axis_types],) * len(mesh.axis_names)
    if mesh.axis_types == kinds:
        return mesh
    return mesh.update(axis_types=kinds)


def absent_mesh(sizes: Mapping[str, int], *, axis_types: str = "explicit") -> Any:
    """Return a mesh of absent devices, for programs to be traced and not run. No size is -1."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AXIS_TYPES[axis_types],) * len(sizes))
