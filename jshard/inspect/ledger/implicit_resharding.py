"""What nobody asked for and the compiler decides: operations on explicitly split arrays, outside shard_map, that can't be
done by each device on its own part. Their types say along which mesh axes something has to move, not how much.

An operation that is not known here to be local counts as one that moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jshard.inspect.ledger.explicit_sharding import REDUCTIONS, split_of
from jshard.jaxprs import CALLS, bare
from jshard.layouts.layout import Layout

# Others look into these, and into what a shard_map asks for.
HOLD_OTHERS = frozenset(CALLS) | frozenset("shard_map scan while cond".split())
# Each element by itself, or whole axes in another order: every device has what it needs.
LOCAL = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type "
    "broadcast_in_dim cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to "
    "erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow iota "
    "is_finite le le_to lgamma log log1p log2 logistic lt lt_to max mesh_cast min mul mulhi name ne neg nextafter not "
    "one_minus_square optimization_barrier or polygamma polynomial population_count pow pvary random_bits "
    "random_clone random_fold_in random_gamma_grad random_seed random_split random_unwrap random_wrap real "
    "reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square squeeze stack stop_gradient sub tan tanh threefry2x32 transpose "
    "xor zeta".split()
)
PRICED = REDUCTIONS | frozenset(["argmax", "argmin"])  # by `typed`

Split = list[tuple[str, ...]]  # for each axis of an array, the mesh axes that it lies over
Rule = Callable[
    [Any, list[Split], list[Split]], list[str]
]  # from an equation and how all that goes in and comes out is split


def decided_by_compiler(eqn: Any) -> tuple[str, ...]:
    """The mesh axes along which the compiler has to move something for this equation; () when it need not, or when the
    types tell how much."""
    name = eqn.primitive.name
    if name in HOLD_OTHERS:
        return _wanted_elsewhere(eqn) if "out_shardings" in eqn.params else ()
    if name in LOCAL or name in PRICED:
        return ()
    given, made = [_split(v.aval) for v in eqn.invars], [_split(v.aval) for v in eqn.outvars]
    if not any(names for each in (*given, *made) for names in each):
        return ()
    rule = RULES.get(name) or (_scatter if name.startswith("scatter") else _anything)
    return tuple(dict.fromkeys(rule(eqn, given, made)))


def _split(aval: Any) -> Split:
    """Mesh axes of one device split nothing."""
    return [tuple(name for name in names if aval.sharding.mesh.shape[name] > 1) for names in split_of(aval)]


def _on(split: Split, axes: Iterable[int]) -> list[str]:
    return [name for axis in axes for name in split[axis]]


def _anything(eqn: Any, given: list[Split], made: list[Split]) -> list[str]:
    return [name for each in (*given, *made) for names in each for name in names]


def _wanted_elsewhere(eqn: Any) -> tuple[str, ...]:
    """The mesh axes of results that a call promises in another sharding than its body leaves them in."""
    found: list[str] = []
    for wanted, variable in zip(eqn.params["out_shardings"], bare(eqn.params["jaxpr"]).outvars, strict=True):
        source = _split(variable.aval)
        if hasattr(wanted, "spec") and any(source):
            axes = Layout.from_sharding(wanted, len(source)).axes
            target = [tuple(name for name in names if wanted.mesh.shape[name] > 1) for names in axes]
            found += [name for one, two in zip(source, target, strict=True) if one != two for name in (*one, *two)]
    return tuple(dict.fromkeys(found))


def _reshard(eqn: Any, given: list[Split], made: list[Split]) -> list[str]:
    """Priced where a mesh axis goes away or goes elsewhere; not where two change places, or the order on one axis."""
    source, target = given[0], made[0]
    turned: list[str] = []
    for have, wanted in zip(source, target, strict=True):
        kept = tuple(name for name in have if name in wanted)
        if have[: len(kept)] != kept or wanted[: len(kept)] != kept:
            turned += [*have, *wanted]
    moved = [name for have, wanted in zip(source, target, strict=True) for name in have if name not in wanted]
    moved = [name for name in moved if name in _anything(eqn, [], [target])]
    return [*turned, *(moved if len(moved) > 1 else [])]


def _placed(eqn: Any, given: list[Split], made: list[Split]) -> list[str]:
    pairs = [each for each in zip(given, made, strict=True) if any(each[0]) and each[0] != each[1]]
    return [name for each in pairs for name in _anything(eqn, [], [*each])]


def _dot(eqn: Any, given: list[Split], made: list[Split]) -> list[str]:
    """Priced where both operands lie alike on what is summed away."""
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    one, other, result = given[0], given[1], made[0]
    found: list[str] = []
    for a, b in zip(left, right, strict=True):
        found += [*one[a], *other[b]] if one[a] != other[b] else []
    batch: Split = []
    for a, b in zip(left_batch, right_batch, strict=True):
        found += [*one[a], *other[b]] if one[a] and other[b] and one[a] != other[b] else []
        batch.append(one[a] or other[b])
    free = [names for axis, names in enumerate(one) if axis not in (*left, *left_batch)]
    free += [names for axis, names in enumerate(other) if axis not in (*right, *right_batch)]
    for have, wanted in zip([*batch, *free], result, strict=True):
        found += have if wanted[: len(have)] != have else ()
    return found


def _convolution(eqn: Any, given: list[Split], made: list[Split]) -> list[str]:
    """Local where only the batch is split, or the features that come out."""
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["feature_group_count"] * eqn.params["batch_group_count"] > 1:
        return _anything(eqn, given, made)
    batch, features = numbers.lhs_spec[0], numbers.rhs_spec[0]
    found = _on(given[0], (axis for axis in range(len(given[0])) if axis != batch))
    found += _on(given[1], (axis for axis in range(len(given[1])) if axis != features))
    wanted = {numbers.out_spec[0]: given[0][batch], numbers.out_spec[1]: given[1][features]}
    for axis, names in enumerate(made[0]):
        have = wanted.get(axis, ())
        found += [*have, *names] if names[: len(have)] != have else []
    return found


def _reshape(eqn: Any, given: list[Split], made: list[Split]) -> list[str]:
    """Local where what is split is the first of the axes that become one, or that one becomes, and stays so."""
    found: list[str] = []
    if eqn.params["dimensions"] is not None:
        return _anything(eqn, given, made)
    old, new = eqn.invars[0].aval, eqn.outvars[0].aval
    for before, after in _grouped(old.shape, new.shape):
        have, wanted = [given[0][axis] for axis in before], [made[0][axis] for axis in after]
        if not any(have) or have == wanted:
            continue
        first, *rest = have
        goes, *others = wanted or [()]
        size = math.prod(old.sharding.mesh.shape[name] for name in first)
        full = after and not old.shape[before[0]] % size and not new.shape[after[0]] % size
        if any(rest) or any(others) or first != goes or not full:
            found += [name for names in (*have, *wanted) for name in names]
    return found


def _grouped(old: tuple[int, ...], new: tuple[int, ...]) -> Iterable[tuple[list[int], list[int]]]:
    """Runs of axes with as many elements before as after, without axes of size 1."""
    before = [axis for axis, size in enumerate(old) if size != 1]
    after = [axis for axis, size in enumerate(new) if size != 1]
    while before:
        one, other = [before.pop(0)], [after.pop(0)] if after else []
        while other and (have := math.prod(old[a] for a in one)) != (got := math.prod(new[a] for a in other)):
            if have < got:
                one.append(before.pop(0))
            else:
                other.append(after.pop(0))
        yield one, other


def _moves_along(axes_of: Callable[[Any], Iterable[int]]) -> Rule:
    """Local where none of these axes is split, of whatever goes in or comes out."""

    def rule(eqn: Any, given: list[Split], made: list[Split]) -> list[str]:
        axes = list(axes_of(eqn))
        pairs = zip((*given, *made), (*eqn.invars, *eqn.outvars), strict=True)
        return [name for each, variable in pairs if variable.aval.shape for name in _on(each, axes)]

    return rule


def _along(parameter: str) -> Rule:
    """Local where the axes that a parameter names are not split."""
    return _moves_along(lambda eqn: np.atleast_1d(eqn.params[parameter]).tolist())


def _resized(old: Any, new: Any) -> list[int]:
    """The axes of two variables that are not of one size."""
    pairs = enumerate(zip(old.aval.shape, new.aval.shape, strict=True))
    return [axis for axis, (one, other) in pairs if one != other]


_cut = _moves_along(lambda eqn: _resized(eqn.invars[0], eqn.outvars[0]))
_written_into = _moves_along(lambda eqn: _resized(eqn.invars[0], eqn.invars[1]))
_pad = _moves_along(lambda eqn: [axis for axis, how in enumerate(eqn.params["padding_config"]) if any(how)])
_windowed = _moves_along(lambda eqn: [axis for axis, size in enumerate(eqn.params["window_dimensions"]) if size > 1])


def _gather(eqn: Any, given: list[Split], made: list[Split]) -> list[str]:
    """Local where the axes that are looked up in are whole, or go with axes of the indices that lie alike."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, indices = given
    together = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    shape = eqn.invars[0].aval.shape
    found = _on(table, (a for a in range(len(table)) if a not in together and sizes[a] != shape[a]))
    for axis, other in together.items():
        one, two = table[axis], indices[other]
        found += [*one, *two] if one and two and one != two else []
    free = [*_on(table, (a for a in range(len(table)) if a not in together)), *_on(indices, range(len(indices)))]
    kept = [name for names in made[0] for name in names]
    return found + [name for name in free if free.count(name) > 1 or name not in kept]


def _scatter(eqn: Any, given: list[Split], made: list[Split]) -> list[str]:
    """Local where what is written into is whole along the axes that are looked up, and what is written as well."""
    numbers, (full, indices, updates) = eqn.params["dimension_numbers"], given
    inserted, together = numbers.inserted_window_dims, numbers.operand_batching_dims
    window = [axis for axis in range(len(full)) if axis not in (*inserted, *together)]
    old, new = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    part = [a for a, other in zip(window, numbers.update_window_dims, strict=True) if old[a] != new[other]]
    found = _on(full, (*inserted, *part))
    places = [axis for axis in range(len(updates)) if axis not in numbers.update_window_dims]
    looked_up = [n for n in range(len(places)) if n not in numbers.scatter_indices_batching_dims]
    found += [*_on(updates, (places[n] for n in looked_up)), *_on(indices, looked_up)]
    kept = [name for names in made[0] for name in names]
    return found + [name for name in _anything(eqn, [full, updates], []) if name not in kept]


RULES: dict[str, Rule] = {
    "concatenate": _along("dimension"), "conv_general_dilated": _convolution, "cumlogsumexp": _along("axis"),
    "cummax": _along("axis"), "cummin": _along("axis"), "cumprod": _along("axis"), "cumsum": _along("axis"),
    "device_put": _placed, "dot_general": _dot, "dynamic_slice": _cut, "dynamic_update_slice": _written_into,
    "gather": _gather, "pad": _pad, "reduce_window": _windowed, "reduce_window_max": _windowed,
    "reduce_window_min": _windowed, "reduce_window_sum": _windowed, "reshape": _reshape, "reshard": _reshard,
    "rev": _along("dimensions"), "select_and_gather_add": _windowed, "select_and_scatter_add": _windowed, "slice": _cut,
    "sort": _along("dimension"), "split": _along("axis"), "unstack": _along("axis"),
}  # fmt: skip
