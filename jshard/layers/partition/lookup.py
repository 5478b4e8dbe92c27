"""Rules of lookups: a table that is split where one looks up answers on every device, and the answers are summed."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.lax import GatherScatterMode

from jshard.layers.partition.engine import Partition, Rule, known, shape_of, traced_whole
from jshard.layers.partition.local_sizes import Choice, axes_of, local_shape
from jshard.layers.partition.part import Moving, Part, moving_as
from jshard.layers.partition.product import settle, sum_or_scatter
from jshard.layers.partition.shape import first
from jshard.layouts.axes import Factors
from jshard.layouts.primitives import LOOKUP, SCATTERS


def _gather(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    by_place = _by_place(run.jaxpr, eqn)
    if by_place is not None:
        return run.run(by_place, parts)
    found = known(eqn)
    settle(parts, found)
    choice = run.choose(found, parts)
    if (answers := _where_it_rests(run, eqn, parts, found, choice)) is not None:
        return [answers]
    numbers, shape = eqn.params["dimension_numbers"], parts[0].shape
    if parts[1].make is not None and _looked_up(found).isdisjoint(choice):
        return run.later(eqn, parts, found)  # positions, say: the places are made where the rows are needed
    choice = _moved_over(run, eqn, parts, found, choice)
    looked_up = {
        axis: choice[of[0]]
        for axis, of in enumerate(found.operands[0])
        if of[0] in _looked_up(found) and of[0] in choice
    }
    table, indices = run.placed(parts, found, choice)
    if not looked_up:
        return run.results(eqn, run.bind(eqn, [table, indices], found, choice), found, choice)
    names = tuple(name for each in looked_up.values() for name in each)
    mode = GatherScatterMode.from_any(eqn.params["mode"])
    indices, here, valid = _own(run, shape, indices, numbers.start_index_map, looked_up, mode)
    # places of other devices are clipped to a row that is here: they are no longer sorted, nor each another
    at_most = {"mode": GatherScatterMode.CLIP, "indices_are_sorted": False, "unique_indices": False}
    (out,) = run.bind(eqn, [table, indices], found, choice, **at_most)
    at = [axis for axis in range(out.ndim) if axis not in numbers.offset_dims]
    beside = jnp.zeros((), out.dtype)
    if mode == GatherScatterMode.FILL_OR_DROP:  # what is outside of the table the first device says
        is_first = sum(lax.axis_index(name) for name in names) == 0
        fill = jnp.asarray(eqn.params["fill_value"], out.dtype)  # JAX's own where the program says none
        beside = jnp.where(lax.broadcast_in_dim(is_first & ~valid, out.shape, at), fill, beside)
    out = jnp.where(lax.broadcast_in_dim(here, out.shape, at), out, beside)
    axes = list(axes_of(found.results[0], choice))
    out = sum_or_scatter(run, out, axes, names, parts[0].signal)
    return [Part(shape_of(eqn), tuple(axes), out)]


def _where_it_rests(run: Partition, eqn: Any, parts: list[Part], found: Factors, choice: Choice) -> Part | None:
    """Look up the rows of all devices in the part of a stored table that each holds, some numbers of every word, and send the
    answers to where their rows are. None where the table would be fewer bytes, or is gathered for another use anyway."""
    table, indices = parts
    if table.rest is None or not table.is_only_looked_up:
        return None
    over = [tuple(name for name in rest if name not in use) for rest, use in zip(table.rest, table.axes, strict=True)]
    names = frozenset(name for some in over for name in some)
    answers, in_result = axes_of(found.results[0], choice), {f for of in found.results[0] for f in of}
    stays = all(f in in_result for some, of in zip(over, found.operands[0], strict=True) if some for f in of)
    if not stays or run.ways(names) < 2 or not names <= {name for some in indices.axes for name in some}:
        return None
    if math.prod(local_shape(shape_of(eqn), answers, run.sizes)) >= run.local_size(table):
        return None
    by_store: Moving = lambda _: moving_as(key="store")
    without = lambda axes: tuple(tuple(name for name in some if name not in names) for some in axes)
    own, whole = run.place(indices, indices.axes), without(indices.axes)
    every = Part(indices.shape, whole, own.local(whole, frozenset(), by_store))
    (found_here,) = _gather(run, eqn, [Part(table.shape, table.rest, table.x, signal=table.signal), every])
    others = without(found_here.axes)
    target = tuple((*want, *(n for n in have if n not in want)) for want, have in zip(answers, others, strict=True))
    return Part(found_here.shape, target, found_here.local(target, frozenset(), by_store))


def _moved_over(run: Partition, eqn: Any, parts: list[Part], found: Factors, choice: Choice) -> Choice:
    """Split another axis of an array that is no parameter, where to sum what is found in it would cost more."""
    looked_up = _looked_up(found)
    names = {name for factor, some in choice.items() if factor in looked_up for name in some}
    rest = {factor: some for factor, some in choice.items() if factor not in looked_up}
    moved = run.moved_over(found, parts, rest)
    answers = math.prod(local_shape(shape_of(eqn), axes_of(found.results[0], choice), run.sizes))
    pays = names.issubset(name for some in moved.values() for name in some) and run.local_size(parts[0]) < 2 * answers
    return moved if pays else choice


def _looked_up(found: Factors) -> set[int]:
    return {factor for factor, kind in enumerate(found.kinds) if kind == LOOKUP}


def _by_place(jaxpr: Any, eqn: Any) -> Any:
    """Rewrite `x[arange(n), i]`, which asks each row for something of its own, as a lookup in many tables; else None."""
    numbers, made = eqn.params["dimension_numbers"], _made_by(jaxpr, eqn.invars[1])
    shape, last = eqn.invars[1].aval.shape, eqn.invars[1].aval.ndim - 1
    if made is None or made.primitive.name != "concatenate" or made.params["dimension"] != last:
        return None
    if len(made.invars) != shape[last]:
        return None
    together: dict[int, int] = {}  # axis of the table: axis of the indices
    for column, axis in zip(made.invars, numbers.start_index_map, strict=True):
        place = _counts(jaxpr, column)
        if place is None or place in together.values() or axis not in numbers.collapsed_slice_dims:
            continue
        if shape[place] == eqn.invars[0].aval.shape[axis]:
            together[axis] = place
    left = [at for at, axis in enumerate(numbers.start_index_map) if axis not in together]
    if not together or not left:
        return None
    together |= dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    rewritten = numbers._replace(
        collapsed_slice_dims=tuple(axis for axis in numbers.collapsed_slice_dims if axis not in together),
        start_index_map=tuple(numbers.start_index_map[at] for at in left),
        operand_batching_dims=tuple(sorted(together)),
        start_indices_batching_dims=tuple(together[axis] for axis in sorted(together)),
    )

    def lookup(table: Array, indices: Array) -> Array:
        columns = [lax.slice_in_dim(indices, at, at + 1, axis=last) for at in left]
        return eqn.primitive.bind(
            table, lax.concatenate(columns, last), **{**eqn.params, "dimension_numbers": rewritten, "indices_are_sorted": False}
        )  # fmt: skip

    return traced_whole(lookup, [v.aval for v in eqn.invars])


def _made_by(jaxpr: Any, atom: Any) -> Any:
    return next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None)


def _counts(jaxpr: Any, atom: Any) -> int | None:
    """Return the axis along which an array counts its own places, as an iota does however it was shaped; None for others."""
    eqn = _made_by(jaxpr, atom)
    if eqn is None:
        return None
    match eqn.primitive.name:
        case "iota":
            return eqn.params["dimension"]
        case "select_n":  # `where(i < 0, i + n, i)`: places are never below zero
            test = _made_by(jaxpr, eqn.invars[0])
            if test is None or test.primitive.name != "lt" or getattr(test.invars[1], "val", None) != 0:
                return None
            return None if _counts(jaxpr, test.invars[0]) is None else _counts(jaxpr, eqn.invars[1])
        case "broadcast_in_dim" | "convert_element_type" | "copy" | "reshape":
            at, found = _counts(jaxpr, eqn.invars[0]), known(eqn)
            of, results = () if at is None else found.operands[0][at], found.results[0]
            return results.index(of) if of and of in results else None
    return None


def _own(run: Partition, shape: Any, indices: Array, start: Any, looked_up: Any, mode: Any) -> Any:
    """Count indices from this device's first row; return them, which of them are its own, and which are in the table at all."""
    inside: list[Array] = []
    valid: list[Array] = []
    columns = []
    for place, axis in enumerate(start):
        column = indices[..., place]
        if mode != GatherScatterMode.FILL_OR_DROP:
            column = jnp.clip(column, 0, shape[axis] - 1)
        valid.append((column >= 0) & (column < shape[axis]))
        if axis in looked_up:
            size = shape[axis] // math.prod(run.sizes[name] for name in looked_up[axis])
            column = column - first(looked_up[axis], size, run.sizes, column.dtype)
            inside.append((column >= 0) & (column < size))
        columns.append(column)
    within = functools.reduce(jnp.logical_and, valid)
    return jnp.stack(columns, -1), functools.reduce(jnp.logical_and, inside) & within, within


def _scatter(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    found = known(eqn)
    adds = eqn.primitive.name[len("scatter_") :] in ("add", "sub")
    choice = run.choose(found, parts)
    # a table written to by places that are split is written whole: only sums of what each device writes can be joined
    sums = [factor for factor, kind in enumerate(found.kinds) if kind == "sum"]
    for factor in (*_looked_up(found), *(() if adds else sums)):
        choice.pop(factor, None)
    table, indices, updates = run.placed(parts, found, choice)
    names = tuple(name for factor in sums for name in choice.get(factor, ()))
    if not names:
        return run.results(eqn, run.bind(eqn, [table, indices, updates]), found, choice)
    (mine,) = run.bind(eqn, [jnp.zeros_like(table), indices, updates])
    axes = axes_of(found.results[0], choice)
    table = run.local(parts[0], axes, frozenset())
    return [Part(shape_of(eqn), axes, table + run.reduce(mine, names, "sum"))]


RULES: dict[str, Rule] = {
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}
