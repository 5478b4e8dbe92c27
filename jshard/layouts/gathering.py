"""Gathering of arrays from the devices of all processes to hosts, and placing them on devices."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import Partial

from jshard.errors import JShardError
from jshard.layouts.index_ranges import Box, boxes_of, holders, index, lengths
from jshard.layouts.layout import Layout
from jshard.layouts.p2p import Parcel, carry, doors_of, is_shared, moved, parcels_of, where, without_mesh
from jshard.layouts.redistribution import as_array, redistribute, replicated
from jshard.layouts.shard_buffers import taking
from jshard.programs.jaxprs import Shaped


def gather(x: object, *, root: int | None = None) -> Any:
    """Gather an array to numpy on the host of every process, or only of `root`: the others return `None`.

    Every process calls it. Nothing is gathered on a device, and a process receives only what it
    returns. Its gradient is scatter. Inside jit, where there is no host, it is `redistribute` to a
    whole array. An array on the host stays as it is.
    """
    x = as_array(x, label="jshard.gather")
    if not isinstance(x, jax.Array):
        check_root("jshard.gather", root)
        return x if root in (None, jax.process_index()) else None
    if not isinstance(x, Tracer):
        return _gather(x, root)
    if root is not None and jax.process_count() >= 2:
        raise JShardError(
            "jshard.gather to one root can't be differentiated or compiled, as the other processes would have no result",
            hint="use jshard.gather(x), without root",
        )
    return _differentiable(x)


def _gather(x: jax.Array, root: int | None) -> np.ndarray | None:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise JShardError(
            "jshard.gather was given random keys, which the host can't hold",
            hint="use jshard.gather(jax.random.key_data(x))",
        )
    me, doors = jax.process_index(), doors_of(next(iter(x.sharding.device_set)).platform)
    with without_mesh():
        shared = is_shared("jshard.gather", x, "" if root is None else f"root={root!r}", doors)
    check_root("jshard.gather", root)
    whose = "every process" if root is None else f"process {root}"
    moved("gather", x.shape, x.dtype, where(x), f"the host of {whose}")
    wanted = [root] if root is not None else list(range(jax.process_count()))
    parcels: list[Parcel] = []
    for box, having in holders(boxes_of(x.sharding, x.shape)).items():
        parcels += parcels_of(box, having if shared else wanted, wanted)  # else each process has its own array
    full = np.empty(x.shape, x.dtype) if me in wanted else None

    def keep(block: Box, words: object) -> None:
        if full is not None:
            used = math.prod(lengths(block)) * full.itemsize
            full[index(block)] = np.asarray(words).view(np.uint8)[:used].view(full.dtype).reshape(lengths(block))

    with without_mesh():
        carry(parcels, doors, x.dtype.itemsize, taking(x), keep)
    return full


def check_root(op_name: str, root: int | None) -> None:
    """Raise an error if there is no process `root`."""
    count = jax.process_count()
    if root is not None and root not in range(count):
        there = "there is one process" if count < 2 else f"there are {count} processes"
        raise JShardError(
            f"{op_name} names root {root!r}, but {there}", hint="use 0" if count < 2 else f"use 0 to {count - 1}"
        )


# -- gradients --


@jax.custom_vjp
def _differentiable(x: jax.Array) -> Any:
    return _replicated(x) if isinstance(x, Tracer) else _gather(x, None)


def _replicated(x: jax.Array) -> Any:
    present = Layout.of(x)
    return x if present is None else redistribute(x, replicated(present.mesh, present.rank))


def _fwd(x: jax.Array) -> tuple[Any, Any]:
    if isinstance(x, Tracer):
        return jax.vjp(_replicated, x)
    return _gather(x, None), Partial(functools.partial(_bwd, x.sharding))


def _bwd(sharding: jax.sharding.Sharding, cotangent: object) -> tuple[Any]:
    full = np.asarray(cotangent)  # every process has it, and keeps its parts
    return (jax.make_array_from_callback(full.shape, sharding, lambda part: full[part].copy(), dtype=full.dtype),)


_differentiable.defvjp(_fwd, lambda bwd, cotangent: bwd(cotangent))


# -- arrays known to every process, to devices and back --


def put(array: Any, where: NamedSharding) -> jax.Array:
    """Place an array known to every process; each process fills the shards of its own devices."""
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    if (keys := kind(array)) is not None:
        return typed(put(raw(array), where), keys)
    host = canonical(np.asarray(array))
    return jax.make_array_from_callback(host.shape, where, lambda part: host[part])


def on_host(array: object) -> np.ndarray:
    """Return the array as numpy; for an array on several processes, all of them call this."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return gather(array)
    return np.asarray(array)


def canonical(array: np.ndarray) -> np.ndarray:
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def raw(array: jax.Array | np.ndarray) -> Any:
    """Return the numbers of a random key; return other arrays as they are."""
    return jax.random.key_data(array) if is_key(array) else array


def kind(array: jax.Array) -> str | None:
    """Return the implementation of a random key; None for other arrays."""
    return str(jax.random.key_impl(array)) if is_key(array) else None


def typed(plain: jax.Array, kind: str | None) -> jax.Array:
    """Return the key made of these numbers, or the numbers themselves without a `kind`."""
    return plain if kind is None else jax.random.wrap_key_data(plain, impl=kind)


def is_key(array: Shaped) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
