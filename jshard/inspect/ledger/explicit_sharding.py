"""What the types of an explicit mesh ask for, outside shard_map: an array's type says how it lies, and so what a
reduction or a reshard of it must move. The counts are those that the partitioner was measured to make of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.sharding import AxisType

from jshard.layouts.axes import REDUCTIONS
from jshard.layouts.layout import as_axes

PRICED = REDUCTIONS.keys() - {"reduce"}  # but those by a function of the user's

Moved = tuple[str, tuple[str, ...], tuple[int, ...], Any]  # collective, mesh axes, shape on one device, dtype


def typed_collectives(eqn: Any) -> Iterator[Moved]:
    """The collectives of one equation on explicitly sharded arrays."""
    name = eqn.primitive.name
    if name in ("argmax", "argmin"):
        result = eqn.outvars[0].aval
        for axis in eqn.params["axes"]:
            if mesh_axes := split_of(eqn.invars[0].aval)[axis]:
                candidates = (_group(result, mesh_axes), *_local_shape(result))  # everybody's best, and where it was
                for dtype in (eqn.invars[0].aval.dtype, result.dtype):
                    yield "all_gather", mesh_axes, candidates, dtype
    elif name in PRICED:
        split = split_of(eqn.invars[0].aval)
        yield from _all_reduces([split[axis] for axis in eqn.params["axes"]], eqn.outvars[0].aval)
    elif name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        one, other = (split_of(operand.aval) for operand in eqn.invars)
        split = [one[a] for a, b in zip(left, right, strict=True) if one[a] == other[b]]
        yield from _all_reduces(split, eqn.outvars[0].aval)
    elif name == "reshard":
        yield from _reshard(eqn.invars[0].aval, eqn.outvars[0].aval)


def _all_reduces(split: list[tuple[str, ...]], result: Any) -> Iterator[Moved]:
    """One for each array axis that is summed away, the last one first."""
    for mesh_axes in reversed(split):
        if mesh_axes:
            yield "all_reduce", mesh_axes, _local_shape(result, without=mesh_axes), result.dtype


def _reshard(source: Any, target: object) -> Iterator[Moved]:
    """An all-to-all for each mesh axis that goes to another array axis, an all-gather for each that goes away."""
    have, wanted = split_of(source), split_of(target)
    shape = list(_local_shape(source))
    for axis, names in reversed(list(enumerate(have))):
        for name in reversed(names):
            if not any(name in names for names in wanted):
                shape[axis] *= _group(source, (name,))
                yield "all_gather", (name,), tuple(shape), source.dtype
            elif name not in wanted[axis]:
                yield "all_to_all", (name,), tuple(shape), source.dtype


def split_of(aval: object) -> list[tuple[str, ...]]:
    """For each axis of an array, the explicit mesh axes that split it."""
    sharding, rank = getattr(aval, "sharding", None), len(getattr(aval, "shape", ()))
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return [()] * rank
    return [as_axes(each) for each in (*sharding.spec, *[None] * (rank - len(sharding.spec)))]


def _local_shape(aval: Any, without: tuple[str, ...] = ()) -> tuple[int, ...]:
    """The shape on one device, as if no axis were split over `without`."""
    kept = [[name for name in names if name not in without] for names in split_of(aval)]
    return tuple(size // _group(aval, names) for size, names in zip(aval.shape, kept, strict=True))


def _group(aval: Any, mesh_axes: Any) -> int:
    return math.prod(aval.sharding.mesh.shape[name] for name in mesh_axes)
