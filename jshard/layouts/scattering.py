"""Scattering of an array from the host of a process to the devices of all processes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import Partial

from jshard.errors import JShardError, did_you_mean
from jshard.layouts.gathering import check_root, gather
from jshard.layouts.index_ranges import Box, boxes_of, holders, index, lengths, word_count
from jshard.layouts.layout import Layout, Placement, as_layout
from jshard.layouts.p2p import carry, doors_of, listed, moved, parcels_of, tell, without_mesh
from jshard.layouts.redistribution import redistribute
from jshard.layouts.shard_buffers import Filling

METHODS = ("scatter", "broadcast")
NARROW = tuple(np.dtype(getattr(jnp, name)) for name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"))


def scatter(x: object, layout: Placement, *, root: int = 0, method: str = "scatter") -> jax.Array:
    """Scatter an array from the host of process `root` to `layout`; the other processes pass `None`.

    `layout` is a `Layout`, a `NamedSharding`, or a `PartitionSpec` over the mesh that is set or
    loaded. Every process calls it; no process but the root ever holds more than its part and a few
    blocks of 1 MiB. A mapped file (`np.load(..., mmap_mode="r")`) is read while it is sent.
    `method="broadcast"` sends the whole array to all processes, to be sliced there: the same bits with
    more memory and time. Its gradient is `gather` to the root: for gradients, the other processes pass
    `np.empty(0, dtype)`, not `None`, and get an empty gradient. Inside jit it is `redistribute`.
    """
    if isinstance(x, Tracer):
        return _differentiable(x, as_layout(layout, x.ndim, label="jshard.scatter"), root, method)
    return _scatter(x, layout, root, method)


def _scatter(x: object, layout: Placement, root: int, method: str) -> jax.Array:
    if isinstance(x, Tracer):
        return redistribute(x, layout)
    if not isinstance(layout, Layout):  # only the root knows the rank
        layout = as_layout(layout, None, label="jshard.scatter").sharding
    if isinstance(layout.mesh, AbstractMesh):
        raise JShardError(
            "jshard.scatter was given a layout over a mesh without its devices",
            hint="give it jax.NamedSharding(mesh, spec) or jshard.Layout(mesh, ...) of a mesh of devices",
        )
    with without_mesh():
        return _moved(x, layout, root, method)


def _moved(x: object, where: Any, root: int, method: str) -> jax.Array:
    doors = doors_of(where.mesh.devices.flat[0].platform)
    layout, shape, dtype = _agreed(x, where, root, method, doors)
    moved(method, shape, dtype, f"the host of process {root}", layout.sharding)
    host = _on_host(x) if jax.process_index() == root else None
    if method == "broadcast":
        return _by_broadcast(host, layout, root, shape, dtype)
    filling = Filling(layout.sharding, shape, dtype)
    parts = holders(boxes_of(layout.sharding, shape)).items()
    parcels = [parcel for box, processes in parts for parcel in parcels_of(box, (root,), processes)]

    def take(block: Box) -> np.ndarray:
        assert host is not None
        words = np.empty(word_count(block, dtype.itemsize), np.uint32)
        numbers = words.view(np.uint8)[: math.prod(lengths(block)) * dtype.itemsize].view(dtype)
        numbers.reshape(lengths(block))[...] = host[index(block)]
        return words

    carry(parcels, doors, dtype.itemsize, take, filling.put)
    return filling.finished()


def _by_broadcast(
    host: np.ndarray | None, layout: Layout, root: int, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """Broadcast the bits by JAX's own broadcast: it adds zeros, and -0.0 + 0.0 is another number."""
    from jax.experimental import multihost_utils

    size = math.prod(shape) * dtype.itemsize
    bits = np.zeros(-(-size // 4), np.uint32)
    if host is not None:
        flat = host.ravel().view(np.uint8)
        bits = np.pad(flat, (0, -size % 4)).view(np.uint32) if size % 4 else flat.view(np.uint32)
    bits = multihost_utils.broadcast_one_to_all(bits, is_source=jax.process_index() == root)
    full = np.asarray(bits).view(np.uint8)[:size].view(dtype).reshape(shape)
    return jax.make_array_from_callback(shape, layout.sharding, lambda part: full[part].copy(), dtype=dtype)


# -- checks on all processes before a transfer, so that a mistake is an error on all and not a hang --


def _agreed(x: object, where: Any, root: int, method: str, doors: Mesh) -> tuple[Layout, tuple[int, ...], np.dtype]:
    """Return layout, shape and dtype, equal on all processes. `where` is a Layout, or a NamedSharding."""
    devices = listed(where.mesh.devices.flat)
    call = f'{as_layout(where, None, label="jshard.scatter")!r} of {devices}, root={root!r}, method="{method}"'
    told = tell(doors, {"call": call[:1000], "gave": _described(x)})
    calls, gave = ([each[key] for each in told] for key in ("call", "gave"))
    for process, call in enumerate(calls):
        if call != calls[0]:
            raise JShardError(
                f"process {process} called jshard.scatter with {call}, but process 0 with {calls[0]}",
                hint="call it alike on every process",
            )
    if method not in METHODS:
        hint = did_you_mean(method, METHODS, 'use "scatter" or "broadcast"')
        raise JShardError(f'jshard.scatter has no method "{method}"', hint=hint)
    check_root("jshard.scatter", root)
    here = f"jshard.scatter(x if jax.process_index() == {root} else None, layout, root={root})"
    for process, given in enumerate(gave):
        if process == root and given is None:
            raise JShardError(
                f"process {root} is the root of jshard.scatter and gave no array",
                hint=f"write {here}" if doors.size >= 2 else "give it one",
            )
        if process != root and given is not None and given.get("shape") != [0]:
            raise JShardError(
                f"process {process} gave jshard.scatter an array, but its root is process {root}", hint=f"write {here}"
            )
    given = gave[root]
    if "fault" in given:
        raise JShardError(given["fault"], hint=given["hint"])
    layout = as_layout(where, len(given["shape"]), label="jshard.scatter")
    layout.shard_shape(given["shape"], label="jshard.scatter")
    return layout, tuple(given["shape"]), np.dtype(given["dtype"])


def _described(x: object) -> dict[str, Any] | None:
    """Describe the argument of a process to the others: nothing, an array, or a fault."""
    if x is None:
        return None

    def wrong(fault: str, hint: str) -> dict[str, Any]:
        return {"fault": f"jshard.scatter {fault}", "hint": hint}

    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        fault = "takes an array on the root's host, but this array is on devices of other processes"
        return wrong(fault, "use jshard.place(x, layout)")
    host = _on_host(x)
    held = jax.dtypes.canonicalize_dtype(host.dtype)
    try:
        jax.dtypes.scalar_type_of(held)
    except TypeError:  # a dtype unknown to JAX
        held = None
    if held is None or held in NARROW:
        fault = f"was given an array of {str(host.dtype)[:200]}, which it can't scatter"
        return wrong(fault, "give it numbers, for instance x.astype(np.float32)")
    if held != host.dtype:
        fault = f"was given {host.dtype}, which JAX holds only with JAX_ENABLE_X64=1"
        return wrong(fault, f"give it x.astype(np.{held})")
    return {"shape": list(host.shape), "dtype": host.dtype.name}


def _on_host(x: object) -> np.ndarray:
    """Return an array; numbers and lists have JAX's dtype for them, and all else is an array of objects."""
    try:
        host = np.asarray(x)
    except ValueError:  # a list of unequal lists
        return np.array(None)
    is_plain = hasattr(x, "dtype") or host.dtype.kind not in "biufc"
    return host if is_plain else host.astype(jax.dtypes.canonicalize_dtype(host.dtype))


# -- gradients --


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _differentiable(x: object, layout: Layout, root: int, method: str) -> jax.Array:
    return _scatter(x, layout, root, method)


def _fwd(x: object, layout: Layout, root: int, method: str) -> tuple[jax.Array, Any]:
    if isinstance(x, Tracer):
        return jax.vjp(lambda x: redistribute(x, layout), x)
    home = x.sharding if isinstance(x, jax.Array) else None
    return _scatter(x, layout, root, method), Partial(functools.partial(_bwd, root, home))


def _bwd(root: int, home: jax.sharding.Sharding | None, cotangent: jax.Array) -> tuple[Any]:
    full = gather(cotangent, root=root)
    if full is None:
        full = np.empty(0, cotangent.dtype)
    return (full if home is None else jax.device_put(full, home),)


_differentiable.defvjp(_fwd, lambda layout, root, method, bwd, cotangent: bwd(cotangent))
