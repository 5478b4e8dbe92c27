"""The collectives implied by the types of an explicit mesh, outside shard_map. A type has its
array's sharding, so it tells what a reduction or a reshard moves; counts are as measured of the
partitioner. For other operations that a device can't do on its own shard, types tell the mesh axes
of the traffic, but not the bytes. An operation not known to be local counts as moving data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.sharding import AxisType

from jshard.layouts.axes import REDUCTIONS, Factors, factors, spread
from jshard.layouts.layout import Layout, as_axes
from jshard.layouts.primitives import KEPT
from jshard.programs.jaxprs import CALLS, Eqn, bare

PRICED = REDUCTIONS.keys() - {"reduce"}  # `reduce` takes a function of the user

Moved = tuple[str, tuple[str, ...], tuple[int, ...], Any]  # collective, mesh axes, shape on one device, dtype
# The walk enters these; their own equations are priced there.
HOLD_OTHERS = frozenset(CALLS) | frozenset("shard_map scan while cond".split())
# Made of nothing or of a key: every device computes its own shard.
MADE = frozenset(
    "iota random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap".split()
)
# Local by the table of axes, but the compiler gathers some of them.
UNPROVEN = frozenset("cholesky eigh fft lu qr svd tile top_k triangular_solve tridiagonal_solve".split())
ANYWHERE = (
    frozenset("mesh_cast one_device_cast one_device_sum pvary bitcast_convert_type broadcast_in_dim".split()) | MADE
)

Split = list[tuple[str, ...]]  # for each axis of an array, the mesh axes that split it


# -- collectives priced by types --


def typed_collectives(eqn: Any) -> Iterator[Moved]:
    """Yield the collectives of an equation on explicitly sharded arrays."""
    name = eqn.primitive.name
    if name in ("argmax", "argmin"):
        result = eqn.outvars[0].aval
        for axis in eqn.params["axes"]:
            if mesh_axes := split_of(eqn.invars[0].aval)[axis]:
                candidates = (_group(result, mesh_axes), *_local_shape(result))  # each device's best, and its index
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
        yield from _priced_reshard(eqn.invars[0].aval, eqn.outvars[0].aval)


def _all_reduces(split: list[tuple[str, ...]], result: Any) -> Iterator[Moved]:
    """Yield an all-reduce for each summed array axis, the last axis first."""
    for mesh_axes in reversed(split):
        if mesh_axes:
            yield "all_reduce", mesh_axes, _local_shape(result, without=mesh_axes), result.dtype


def _priced_reshard(source: Any, target: object) -> Iterator[Moved]:
    """Yield an all-to-all for each mesh axis moved to another array axis, an all-gather for each dropped one."""
    have, wanted = split_of(source), split_of(target)
    shape = list(_local_shape(source))
    for axis, names in reversed(list(enumerate(have))):
        for name in reversed(names):
            if not any(name in names for names in wanted):
                shape[axis] *= _group(source, (name,))
                yield "all_gather", (name,), tuple(shape), source.dtype
            elif name not in wanted[axis]:
                yield "all_to_all", (name,), tuple(shape), source.dtype


def split_of(aval: object) -> Split:
    """Return, for each axis of an array, the explicit mesh axes in its sharding."""
    sharding, rank = getattr(aval, "sharding", None), len(getattr(aval, "shape", ()))
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return [()] * rank
    return [as_axes(each) for each in (*sharding.spec, *[None] * (rank - len(sharding.spec)))]


def _local_shape(aval: Any, without: tuple[str, ...] = ()) -> tuple[int, ...]:
    """Return the shape on a device, as if no axis were split over `without`."""
    kept = [[name for name in names if name not in without] for names in split_of(aval)]
    return tuple(size // _group(aval, names) for size, names in zip(aval.shape, kept, strict=True))


def _group(aval: Any, mesh_axes: Any) -> int:
    return math.prod(aval.sharding.mesh.shape[name] for name in mesh_axes)


# -- operations left to the compiler --


def decided_by_compiler(eqn: Eqn) -> tuple[str, ...]:
    """Return the mesh axes of the compiler's own traffic for this equation; () if none, or if types tell the bytes."""
    name = eqn.primitive.name
    if name in HOLD_OTHERS:
        return _wanted_elsewhere(eqn) if "out_shardings" in eqn.params else ()
    if name in ANYWHERE or name in PRICED:
        return ()
    operands, results = [_split(v.aval) for v in eqn.invars], [_split(v.aval) for v in eqn.outvars]
    names = [name for split in (*operands, *results) for names in split for name in names]
    if not names:
        return ()
    table = None if name in UNPROVEN else factors(eqn)
    if name in ("reshard", "device_put"):
        moved = _reshard(operands, results) if name == "reshard" else _placed(operands, results)
    else:
        moved = names if table is None else _moved(eqn, table, operands, results)
    return tuple(dict.fromkeys(moved))


def _moved(eqn: Any, table: Factors, operands: list[Split], results: list[Split]) -> list[str]:
    """Return the mesh axes moved by an equation, by the table of axes. It moves nothing if all operands split a kept
    factor alike, results split it at least so, a product splits its sums alike, and no other factor is split."""
    sizes = next(v.aval.sharding.mesh.shape for v in (*eqn.invars, *eqn.outvars) if not v.aval.sharding.mesh.empty)
    moved: list[str] = []
    have = _by_factor(operands, table.operands, table, sizes, moved)
    wanted = _by_factor(results, table.results, table, sizes, moved)
    priced = "sum" if eqn.primitive.name == "dot_general" else None  # its type tells how much
    for factor, kind in enumerate(table.kinds):
        mine, theirs = have.get(factor, []), wanted.get(factor, [])
        one = max(mine, key=len, default=())
        local = {KEPT: ((), one), priced: (one,)}.get(kind)
        if local is None:
            moved += [name for names in (*mine, *theirs) for name in names]
            continue
        if any(names not in local for names in mine):
            moved += [name for names in mine for name in names]
        if any(names[: len(one)] != one for names in theirs):
            moved += one
    return moved


def _by_factor(
    splits: list[Split], factored: Any, table: Factors, sizes: Any, moved: list[str]
) -> dict[int, list[tuple[str, ...]]]:
    """Return the mesh axes of each factor, as each array has them; axes ending within a factor are moved."""
    by_factor: dict[int, list[tuple[str, ...]]] = {}
    for names, numbers in (axis for pair in zip(splits, factored, strict=True) for axis in zip(*pair, strict=True)):
        over = dict(spread(numbers, names, table.sizes, sizes))
        for factor in numbers:
            by_factor.setdefault(factor, []).append(over.get(factor, ()))
        moved += names[sum(map(len, over.values())) :]
    return by_factor


def _split(aval: Any) -> Split:
    return _over_several(split_of(aval), aval.sharding.mesh)


def _over_several(axes: Any, mesh: Any) -> Split:
    """Drop mesh axes of size 1: they split nothing."""
    return [tuple(name for name in names if mesh.shape[name] >= 2) for names in axes]


def _wanted_elsewhere(eqn: Eqn) -> tuple[str, ...]:
    """Return the mesh axes of results promised in a sharding other than their sharding in the body."""
    found: list[str] = []
    for wanted, variable in zip(eqn.params["out_shardings"], bare(eqn.params["jaxpr"]).outvars, strict=True):
        source = _split(variable.aval)
        if hasattr(wanted, "spec") and any(source):
            target = _over_several(Layout.from_sharding(wanted, len(source)).axes, wanted.mesh)
            found += [name for one, two in zip(source, target, strict=True) if one != two for name in (*one, *two)]
    return tuple(dict.fromkeys(found))


def _reshard(operands: list[Split], results: list[Split]) -> list[str]:
    """Return the mesh axes of a reshard without a price in types: axes that change places, or their order."""
    source, target = operands[0], results[0]
    turned: list[str] = []
    for have, wanted in zip(source, target, strict=True):
        kept = tuple(name for name in have if name in wanted)
        if have[: len(kept)] != kept or wanted[: len(kept)] != kept:
            turned += [*have, *wanted]
    moved = [name for have, wanted in zip(source, target, strict=True) for name in have if name not in wanted]
    moved = [name for name in moved if any(name in names for names in target)]
    return [*turned, *(moved if len(moved) >= 2 else [])]


def _placed(operands: list[Split], results: list[Split]) -> list[str]:
    pairs = [pair for pair in zip(operands, results, strict=True) if any(pair[0]) and pair[0] != pair[1]]
    return [name for pair in pairs for split in pair for names in split for name in names]
