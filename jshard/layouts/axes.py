"""The table of JAX primitives for the partition and the ledger: the factors of every array axis.

Each axis is a product of factors, major first. `x[M,K] @ w[K,N]` has three factors: the result
keeps M and N, and K is summed. A split over devices costs nothing for a kept factor, and a sum over
devices for a summed factor. A fixed factor must not be split.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jshard.layouts import primitives
from jshard.layouts.primitives import FIXED, KEPT, LOOKUP, REDUCTIONS, is_joined, unknown_parameters
from jshard.programs.jaxprs import Eqn

Factored = tuple[tuple[int, ...], ...]  # for each axis of an array, its factors, major first


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of an equation: by operand and result, with the size and kind of each."""

    operands: tuple[Factored, ...]
    results: tuple[Factored, ...]
    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    sums: tuple[int, ...] = ()  # results summed over every factor they lack


class _New:
    """A counter for the factors of an equation."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kinds: list[str] = []

    def __call__(self, size: int, kind: str = KEPT) -> tuple[int, ...]:
        self.sizes.append(int(size))
        self.kinds.append(kind)
        return (len(self.sizes) - 1,)

    def all(self, shape: Sequence[int], fixed: Sequence[int] = ()) -> Factored:
        return tuple(self(size, FIXED if axis in fixed else KEPT) for axis, size in enumerate(shape))

    def done(self, operands: Sequence[Factored], results: Sequence[Factored]) -> Factors:
        return Factors(tuple(operands), tuple(results), tuple(self.sizes), tuple(self.kinds))


Params = Mapping[str, Any]  # of an equation
Shapes = Sequence[tuple[int, ...]]
Rule = Callable[[Params, _New, Shapes, Shapes], tuple[Sequence[Factored], Sequence[Factored]]]


def factors(eqn: Eqn) -> Factors | None:
    """Return the factors of an equation, or None without a rule or with an unknown parameter."""
    name = eqn.primitive.name
    rule = RULES.get(name)
    if rule is None or unknown_parameters(eqn):
        return None
    if name in REDUCTIONS and not is_joined(name, eqn.invars[0].aval.dtype):
        rule = _reduce(FIXED)
    ins = [tuple(v.aval.shape) for v in eqn.invars]
    outs = [tuple(v.aval.shape) for v in eqn.outvars]
    if rule is _elementwise:
        return _of_shapes(tuple(ins), tuple(outs))
    new = _New()
    found = new.done(*rule(eqn.params, new, ins, outs))
    return dataclasses.replace(found, sums=SUMS.get(name, ()))


def spread(
    of: Sequence[int], names: Sequence[str], counts: Sequence[int], sizes: Mapping[str, int]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the mesh axes of an array axis factor by factor, major first, as far as they divide."""
    left = list(names)
    for factor in of:
        some: list[str] = []
        rest = counts[factor]
        while left and not rest % sizes[left[0]]:
            rest //= sizes[left[0]]
            some.append(left.pop(0))
        if some:
            yield factor, tuple(some)
        if rest >= 2:
            return


def _elementwise(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Factor an elementwise operation: operands may be scalars or have broadcast axes of size 1."""
    out = new.all(outs[0])
    alike = [tuple(f if n == m else () for f, n, m in zip(out, shape, outs[0], strict=False)) for shape in ins]
    return alike, [out] * len(outs)


@functools.lru_cache(maxsize=4096)
def _of_shapes(ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]) -> Factors:
    """Return the factors of an elementwise equation, cached: most equations of a trace are elementwise."""
    new = _New()
    return new.done(*_elementwise({}, new, ins, outs))


def _broadcast(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    out = new.all(outs[0])
    operand = (
        out[to] if n == outs[0][to] else () for n, to in zip(ins[0], params["broadcast_dimensions"], strict=True)
    )
    return [tuple(operand)], [out]


def _reshape(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Factor both shapes of a reshape, with the operand's axes in the order of `dimensions`, if given."""
    order = params.get("dimensions")
    order = range(len(ins[0])) if order is None else order
    permuted, out = common_factors([ins[0][axis] for axis in order], outs[0], new)
    old = dict(zip(order, permuted, strict=True))
    return [tuple(old[axis] for axis in range(len(old)))], [out]


def common_factors(old: Sequence[int], made: Sequence[int], new: _New) -> tuple[Factored, Factored]:
    """Factor two shapes of the same elements by common axes: of 6 x 4 as 4 x 6, a leading 2."""
    before: list[tuple[int, ...]] = [()] * len(old)
    after: list[tuple[int, ...]] = [()] * len(made)
    for ours, theirs in _grouped(old, made):
        have, want = {axis: old[axis] for axis in ours}, {axis: made[axis] for axis in theirs}
        while ours and (size := math.gcd(have[ours[0]], want[theirs[0]])) > 1:
            factor = new(size)
            for axis, left, found in ((ours[0], have, before), (theirs[0], want, after)):
                found[axis] += factor
                left[axis] //= size
            ours, theirs = ours[have[ours[0]] == 1 :], theirs[want[theirs[0]] == 1 :]
        for left, found in ((have, before), (want, after)):
            for axis, size in left.items():
                found[axis] += new(size, FIXED) if size != 1 else ()
    return tuple(before), tuple(after)


def _grouped(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of axes with equal sizes on both sides, without axes of size 1."""
    before = [axis for axis, size in enumerate(old) if size != 1]
    after = [axis for axis, size in enumerate(new) if size != 1]
    if 0 in old:
        yield before, after
        return
    while before:
        one, other = [before.pop(0)], [after.pop(0)]
        while (have := math.prod(old[a] for a in one)) != (got := math.prod(new[a] for a in other)):
            if have < got:
                one.append(before.pop(0))
            else:
                other.append(after.pop(0))
        yield one, other


def _transpose(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    old = new.all(ins[0])
    return [old], [tuple(old[axis] for axis in params["permutation"])]


def _squeeze(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    old = new.all(ins[0])
    return [old], [tuple(factor for axis, factor in enumerate(old) if axis not in params["dimensions"])]


def _reduce(kind: str) -> Rule:
    def rule(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
        axes = params["axes"] if "axes" in params else params["dimensions"]
        old = tuple(new(n, kind if axis in axes else KEPT) for axis, n in enumerate(ins[0]))
        left = tuple(factor for axis, factor in enumerate(old) if axis not in axes)
        return [old if shape else () for shape in ins], [left] * len(outs)

    return rule


def _dot_general(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    (summed, their_summed), (batch, their_batch) = params["dimension_numbers"]
    left: list[Any] = [new(n) for n in ins[0]]
    right: list[Any] = [new(n) for n in ins[1]]
    for one, other in zip(batch, their_batch, strict=True):
        right[other] = left[one]
    for one, other in zip(summed, their_summed, strict=True):
        left[one] = right[other] = new(ins[0][one], "sum")
    free = [left[a] for a in range(len(left)) if a not in (*summed, *batch)]
    free += [right[a] for a in range(len(right)) if a not in (*their_summed, *their_batch)]
    return [tuple(left), tuple(right)], [(*(left[a] for a in batch), *free)]


def _ragged_dot_general(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Factor like `dot_general`, with fixed factors for the grouped axis and the groups."""
    numbers = params["ragged_dot_dimension_numbers"]
    (left, right), (out,) = _dot_general({"dimension_numbers": numbers.dot_dimension_numbers}, new, ins, outs)
    (row,), groups = numbers.lhs_ragged_dimensions, [right[axis] for axis in numbers.rhs_group_dimensions]
    for (factor,) in (left[row], *groups):
        new.kinds[factor] = FIXED
    (summed, _), (batch, _) = numbers.dot_dimension_numbers
    order = [*batch, *(summed if row in summed else (a for a in range(len(left)) if a not in (*summed, *batch)))]
    lead = [left[axis] for axis in order[: order.index(row)]] if ins[2][1:] else []  # one list of sizes serves all
    out = [of for of in out if of not in groups]
    grouped = [new(n, FIXED) for n in outs[0][: len(outs[0]) - len(out)]]
    return [left, right, (*lead, new(ins[2][-1], FIXED))], [(*grouped, *out)]


def _bitcast(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Keep the common axes. Only one side has a last axis for the pieces of each number: it is fixed."""
    lead = new.all(min(ins[0], outs[0], key=len))
    return tuple([(*lead, *(new(n, FIXED) for n in shape[len(lead) :])) for shape in each] for each in (ins, outs))


def _convolution(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Factor batch and features, and groups of either; spatial axes are fixed."""
    numbers = params["dimension_numbers"]
    x, w, y = (list(new.all(shape, range(len(shape)))) for shape in (*ins, *outs))
    batch, features = numbers.lhs_spec[:2]
    of_kernel, into = numbers.rhs_spec[0], numbers.rhs_spec[1]
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    group, batch_group = (new(groups) if groups >= 2 else ()), (new(batches) if batches >= 2 else ())
    rows, summed = new(ins[0][batch] // batches), new(ins[1][into], "sum")
    made_of = new(ins[1][of_kernel] // (groups * batches))
    x[batch], x[features], w[into] = (*batch_group, *rows), (*group, *summed), summed
    w[of_kernel] = (*group, *batch_group, *made_of)
    y[numbers.out_spec[0]], y[numbers.out_spec[1]] = rows, w[of_kernel]
    return [tuple(x), tuple(w)], [tuple(y)]


def _along(*names: str, also: Callable[[Any], Any] | None = None) -> Rule:
    """Return a rule with fixed factors for the axes named by parameters; all other axes are kept."""

    def rule(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
        fixed = {int(axis) for name in names for axis in np.atleast_1d(params[name])}
        fixed |= set(also(params)) if also is not None else set()
        return _keeping([axis for axis in range(len(ins[0])) if axis not in fixed], new, ins, outs)

    return rule


def _keeping(axes: Iterable[int], new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Keep these axes in all operands and results, and fix all other axes."""
    kept = {axis: new(ins[0][axis]) for axis in axes}
    return tuple(
        [tuple(kept[axis] if axis in kept else new(n, FIXED) for axis, n in enumerate(shape)) for shape in each]
        for each in (ins, outs)
    )


def _resized(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Fix the axes of different sizes (a slice, an update, a tile), and keep all other axes."""
    sizes = zip(*filter(None, (*ins, *outs)), strict=True)
    return _keeping([axis for axis, each in enumerate(sizes) if len({*each}) == 1], new, ins, outs)


def _stack(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    each, at = new.all(ins[0]), params["axis"]
    return [each] * len(ins), [(*each[:at], new(len(ins), FIXED), *each[at:])]


def _unstack(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    each, at = new.all(outs[0]), params["axis"]
    return [(*each[:at], new(len(outs), FIXED), *each[at:])], [each] * len(outs)


def _gather(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Factor a lookup. Along a split, looked-up axis, every device looks up all rows; results are summed."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    indices: list[Any] = [new(n) for n in ins[1][:-1]]
    together = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    table: list[Any] = []
    window: list[Any] = []
    for axis, (size, n) in enumerate(zip(sizes, ins[0], strict=True)):
        if axis in together:
            table.append(indices[together[axis]])
            continue
        looked_up = axis in numbers.start_index_map
        whole = size >= n and not looked_up
        table.append(new(n) if whole else new(n, LOOKUP if looked_up and size == 1 else FIXED))
        if axis not in numbers.collapsed_slice_dims:
            window.append(table[axis] if whole else new(size, FIXED))
    rows, windows = iter(indices), iter(window)
    out = tuple(next(windows) if axis in numbers.offset_dims else next(rows) for axis in range(len(outs[0])))
    return [tuple(table), (*indices, new(ins[1][-1], FIXED))], [out]


def _scatter(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Factor a scatter: windows are kept, and devices may add different rows of updates."""
    numbers = params["dimension_numbers"]
    inserted, together = numbers.inserted_window_dims, numbers.operand_batching_dims
    indices: list[Any] = [new(n, "sum") for n in ins[1][:-1]]
    table: list[Any] = []
    window = [axis for axis in range(len(ins[0])) if axis not in (*inserted, *together)]
    to = dict(zip(numbers.update_window_dims, window, strict=True))
    whole = [axis for at, axis in to.items() if ins[2][at] >= ins[0][axis]]
    for axis, n in enumerate(ins[0]):
        looked_up = axis in numbers.scatter_dims_to_operand_dims
        kind = LOOKUP if looked_up and axis in inserted else KEPT if axis in whole and not looked_up else FIXED
        table.append(new(n, kind))
    for axis, other in zip(together, numbers.scatter_indices_batching_dims, strict=True):
        table[axis] = indices[other] = new(ins[0][axis])
    rows = iter(indices)
    updates = []
    for axis, n in enumerate(ins[2]):
        if axis not in to:
            updates.append(next(rows))
        else:
            updates.append(table[to[axis]] if n >= ins[0][to[axis]] else new(n, FIXED))
    return [tuple(table), (*indices, new(ins[1][-1], FIXED)), tuple(updates)], [tuple(table)]


def _each(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    each = [new.all(shape) for shape in ins]
    return each, each


def _made(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Factor an array made from positions, from a key, or from whole arrays."""
    return _fixed(ins, new), [new.all(shape) for shape in outs]


def _batch(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Keep the leading batch axes, and fix the last axes: two of a matrix."""
    last = len(params["fft_lengths"]) if "fft_lengths" in params else 2
    return _keeping(range(len(ins[0]) - last), new, ins, outs)


def _pad(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    return _keeping([axis for axis, each in enumerate(params["padding_config"]) if not any(each)], new, ins, outs)


def _cudnn_attention(params: Params, new: _New, ins: Shapes, outs: Shapes) -> Any:
    """Factor NVIDIA's attention of `q, k, v, bias`, lengths, offsets and pages; backward also of
    saved results. Rows and heads are kept, except with dropout drawn for all rows, a function of
    the scores, or offsets between documents."""
    q, k, _, bias, *lengths = ins[:10]
    is_whole = params["dropout_rate"] or params.get("score_mod") is not None  # a function of scores, since jax 0.12
    if is_whole or any(math.prod(shape) for shape in lengths[2:]):
        return _fixed(ins, new), _fixed(outs, new)
    heads, places = (1, 2) if params["layout"] else (2, 1)
    rows, groups = new(q[0]), new(k[heads])
    all_heads = groups + new(q[heads] // k[heads])
    queries, keys, biased = (list(each) for each in _fixed([q, k, bias], new))
    queries[0] = keys[0] = rows
    queries[heads], keys[heads] = all_heads, groups
    for axis, of in enumerate((rows, all_heads)) if len(bias) == 4 else ():
        biased[axis] = of if bias[axis] >= 2 else ()
    of_rows = [(rows,) if shape == q[:1] else _fixed([shape], new)[0] for shape in lengths]
    kept = (rows, all_heads, queries[places])
    of_forward = [of for _, of in zip(ins[10:], (kept, tuple(queries), tuple(queries)), strict=False)]
    operands = [tuple(queries), tuple(keys), tuple(keys), tuple(biased), *of_rows, *of_forward]
    return operands, (operands if of_forward else [tuple(queries), kept])[: len(outs)]


def _fixed(shapes: Sequence[Sequence[int]], new: _New) -> list[Factored]:
    return [new.all(shape, range(len(shape))) for shape in shapes]


# The gradient of a bias shared by rows or heads.
SUMS = {"dot_product_attention_bwd_wrapper": (3,)}


def _moved(p: Params) -> list[int]:
    """Return the axes changed by a window: wider than 1, strided, dilated or padded."""
    told = [p.get(key) or (1,) * len(p["window_dimensions"]) for key in ("window_strides", "base_dilation")]
    each = zip(p["window_dimensions"], *told, p["padding"], strict=True)
    return [axis for axis, (*ones, padding) in enumerate(each) if {*ones} != {1} or any(padding)]


_windowed = _along(also=_moved)

RULES: dict[str, Rule] = {
    **dict.fromkeys(primitives.ELEMENTWISE, _elementwise),
    **{name: _reduce(kind) for name, kind in REDUCTIONS.items()},
    **dict.fromkeys([*primitives.CUMULATIVE.split(), "split", "top_k"], _along("axis")),
    **dict.fromkeys(primitives.WINDOWED.split(), _windowed),
    **dict.fromkeys(primitives.SCATTERS, _scatter),
    **dict.fromkeys(primitives.FROM_WHOLE.split(), _made),
    **dict.fromkeys(primitives.ATTENTION.split(), _cudnn_attention),
    **dict.fromkeys(primitives.MATRICES.split(), _batch),
    "bitcast_convert_type": _bitcast, "broadcast_in_dim": _broadcast, "concatenate": _along("dimension"),
    "conv_general_dilated": _convolution, "dot_general": _dot_general, "dynamic_slice": _resized,
    "dynamic_update_slice": _resized, "fft": _batch, "gather": _gather, "optimization_barrier": _each, "pad": _pad,
    "ragged_dot_general": _ragged_dot_general, "random_clone": _elementwise, "reshape": _reshape, "rev": _along("dimensions"),
    "slice": _resized, "sort": _along("dimension"), "squeeze": _squeeze, "stack": _stack, "tile": _resized,
    "transpose": _transpose, "unstack": _unstack,
}  # fmt: skip
