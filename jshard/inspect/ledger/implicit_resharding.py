"""What nobody asked for and the compiler decides: operations on explicitly split arrays, outside shard_map, that can't be
done by each device on its own part. Their types say along which mesh axes something has to move, not how much.

An operation that is not known to be local counts as one that moves."""

from __future__ import annotations

from typing import Any

from jshard.inspect.ledger.explicit_sharding import PRICED, split_of
from jshard.layouts.axes import Factors, factors, spread
from jshard.layouts.layout import Layout
from jshard.layouts.primitives import KEPT
from jshard.programs.jaxprs import CALLS, Eqn, bare

# Others look into these, and into what a shard_map asks for.
HOLD_OTHERS = frozenset(CALLS) | frozenset("shard_map scan while cond".split())
# Made of nothing, or of a key: every device has what it needs, however the types say it lies.
MADE = frozenset(
    "iota random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap".split()
)
# Local by the table, but not known to be by the compiler, which gathers some of them.
UNPROVEN = frozenset("cholesky eigh fft lu qr svd tile top_k triangular_solve tridiagonal_solve".split())
ANYWHERE = (
    frozenset("mesh_cast one_device_cast one_device_sum pvary bitcast_convert_type broadcast_in_dim".split()) | MADE
)

Split = list[tuple[str, ...]]  # for each axis of an array, the mesh axes that it lies over


def decided_by_compiler(eqn: Eqn) -> tuple[str, ...]:
    """The mesh axes along which the compiler has to move something for this equation; () when it need not, or when the
    types tell how much."""
    name = eqn.primitive.name
    if name in HOLD_OTHERS:
        return _wanted_elsewhere(eqn) if "out_shardings" in eqn.params else ()
    if name in ANYWHERE or name in PRICED:
        return ()
    given, made = [_split(v.aval) for v in eqn.invars], [_split(v.aval) for v in eqn.outvars]
    every = [names for each in (*given, *made) for names in each if names]
    if not every:
        return ()
    found = None if name in UNPROVEN else factors(eqn)
    if name in ("reshard", "device_put"):
        moved = _reshard(given, made) if name == "reshard" else _placed(given, made)
    else:
        moved = [each for names in every for each in names] if found is None else _moved(eqn, found, given, made)
    return tuple(dict.fromkeys(moved))


def _moved(eqn: Any, found: Factors, given: list[Split], made: list[Split]) -> list[str]:
    """Read from the table: all operands split a factor that goes on alike, and results at least as they do; a product splits
    what it sums alike; no other factor is split."""
    sizes = next(v.aval.sharding.mesh.shape for v in (*eqn.invars, *eqn.outvars) if not v.aval.sharding.mesh.empty)
    moved: list[str] = []
    have = _by_factor(given, found.operands, found, sizes, moved)
    wanted = _by_factor(made, found.results, found, sizes, moved)
    priced = "sum" if eqn.primitive.name == "dot_general" else None  # its type tells how much
    for factor, kind in enumerate(found.kinds):
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
    splits: list[Split], factored: Any, found: Factors, sizes: Any, moved: list[str]
) -> dict[int, list[tuple[str, ...]]]:
    """The mesh axes of each factor, as each array has them; those that end within a factor are moved."""
    each: dict[int, list[tuple[str, ...]]] = {}
    for names, numbers in (axis for pair in zip(splits, factored, strict=True) for axis in zip(*pair, strict=True)):
        over = dict(spread(numbers, names, found.sizes, sizes))
        for factor in numbers:
            each.setdefault(factor, []).append(over.get(factor, ()))
        moved += names[sum(map(len, over.values())) :]
    return each


def _split(aval: Any) -> Split:
    return _over_several(split_of(aval), aval.sharding.mesh)


def _over_several(axes: Any, mesh: Any) -> Split:
    """Mesh axes of one device split nothing."""
    return [tuple(name for name in names if mesh.shape[name] >= 2) for names in axes]


def _wanted_elsewhere(eqn: Eqn) -> tuple[str, ...]:
    """The mesh axes of results that a call promises in another sharding than its body leaves them in."""
    found: list[str] = []
    for wanted, variable in zip(eqn.params["out_shardings"], bare(eqn.params["jaxpr"]).outvars, strict=True):
        source = _split(variable.aval)
        if hasattr(wanted, "spec") and any(source):
            target = _over_several(Layout.from_sharding(wanted, len(source)).axes, wanted.mesh)
            found += [name for one, two in zip(source, target, strict=True) if one != two for name in (*one, *two)]
    return tuple(dict.fromkeys(found))


def _reshard(given: list[Split], made: list[Split]) -> list[str]:
    """Priced where a mesh axis goes away or goes elsewhere; not where two change places, or the order on one axis."""
    source, target = given[0], made[0]
    turned: list[str] = []
    for have, wanted in zip(source, target, strict=True):
        kept = tuple(name for name in have if name in wanted)
        if have[: len(kept)] != kept or wanted[: len(kept)] != kept:
            turned += [*have, *wanted]
    moved = [name for have, wanted in zip(source, target, strict=True) for name in have if name not in wanted]
    moved = [name for name in moved if any(name in names for names in target)]
    return [*turned, *(moved if len(moved) >= 2 else [])]


def _placed(given: list[Split], made: list[Split]) -> list[str]:
    pairs = [each for each in zip(given, made, strict=True) if any(each[0]) and each[0] != each[1]]
    return [name for pair in pairs for split in pair for names in split for name in names]
