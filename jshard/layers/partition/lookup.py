"""Rules of lookups: a table that is split where one looks up answers on every device, and the answers are summed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.lax import GatherScatterMode

from jshard.layers.partition.choice import choose, local_size, moved_over, ways
from jshard.layers.partition.local_sizes import Choice, axes_of, local_shape
from jshard.layers.partition.part import Here, Moving, Part, Stored, moving_as
from jshard.layers.partition.plan import PUT_OFF, Step, key_of, names_of, without
from jshard.layers.partition.planner import Planned, Planner, PlanRule, known, traced_whole
from jshard.layers.partition.product import scatters, settle, sum_or_scatter, summed
from jshard.layers.partition.run import Rule, Run, shape_of
from jshard.layers.partition.shape import first
from jshard.layers.partition.value import Resting, Value
from jshard.layouts.axes import Factors
from jshard.layouts.primitives import LOOKUP, SCATTERS
from jshard.programs.jaxprs import Eqn, OpenJaxpr, entry, makers

WHERE_IT_RESTS = "where the table rests"


def _plan_gather(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    by_place = plan.once(key_of(eqn), lambda: _by_place(plan.jaxpr, eqn))
    if by_place is not None:
        results, inside = plan.program(by_place, values)
        return results, Step(body=by_place, inside=(inside,))
    found = known(eqn)
    settle(values, found, eqn)
    choice = choose(found, values, plan.sizes)
    if (there := _plan_at_rest(plan, eqn, values, found, choice)) is not None:
        return there
    if values[1].is_put_off and _looked_up(found).isdisjoint(choice):
        return plan.later(eqn, values, found)  # positions, say: the places are made where the rows are needed
    choice = _moved_over(plan, eqn, values, found, choice)
    plan.placed(values, found, choice)
    shape, axes = shape_of(eqn), list(axes_of(found.results[0], choice))
    scattered = scatters(plan, eqn, axes, _names(found, choice), values[0].signal)
    step = Step(choice=choice, scattered=tuple(scattered))
    return [Value(shape, tuple(axes), eqn.outvars[0].aval.dtype)], step


def _plan_at_rest(plan: Planner, eqn: Eqn, values: list[Value], found: Factors, choice: Choice) -> Planned | None:
    """Plan a lookup in a stored table at rest: look up the rows of all devices in this device's features of every
    word, and send the answers to their rows. Return None if gathering the table takes fewer bytes, or another use
    gathers it anyway."""
    table, indices = values
    if not isinstance(table, Resting) or table.reader != "gather":
        return None
    over = [tuple(name for name in rest if name not in use) for rest, use in zip(table.rest, table.axes, strict=True)]
    names = frozenset(name for some in over for name in some)
    answers, in_result = axes_of(found.results[0], choice), {f for of in found.results[0] for f in of}
    stays = all(f in in_result for some, of in zip(over, found.operands[0], strict=True) if some for f in of)
    if not stays or ways(names, plan.sizes) < 2 or not names <= {name for some in indices.axes for name in some}:
        return None
    if math.prod(local_shape(shape_of(eqn), answers, plan.sizes)) >= local_size(table, plan.sizes):
        return None
    every = without(indices.axes, names)
    own = plan.place(indices, indices.axes)
    plan.have(own, every)
    at_rest = Value(table.shape, table.rest, table.dtype, signal=table.signal, uses=table.uses.anew())
    (here,), step = _plan_gather(plan, eqn, [at_rest, Value(indices.shape, every, indices.dtype)])
    others = without(here.axes, names)
    target = tuple((*want, *(n for n in have if n not in want)) for want, have in zip(answers, others, strict=True))
    plan.have(here, target)
    return [Value(here.shape, target, here.dtype)], dataclasses.replace(step, how=WHERE_IT_RESTS)


def _moved_over(plan: Planner, eqn: Eqn, values: list[Value], found: Factors, choice: Choice) -> Choice:
    """Split another axis of a non-parameter, where a sum of the answers would cost more."""
    looked_up = _looked_up(found)
    names = {name for factor, some in choice.items() if factor in looked_up for name in some}
    rest = {factor: some for factor, some in choice.items() if factor not in looked_up}
    moved = moved_over(found, values, rest, plan.sizes)
    answers = math.prod(local_shape(shape_of(eqn), axes_of(found.results[0], choice), plan.sizes))
    is_small = local_size(values[0], plan.sizes) < 2 * answers
    return moved if is_small and names.issubset(name for some in moved.values() for name in some) else choice


def _names(found: Factors, choice: Choice) -> tuple[str, ...]:
    """Return the mesh axes of the table along the axis of the lookup."""
    looked_up = _looked_up(found)
    each = [of[0] for of in found.operands[0]]
    return tuple(name for factor in each if factor in looked_up for name in choice.get(factor, ()))


def _gather(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    if step.how == WHERE_IT_RESTS:
        return [_where_it_rests(run, eqn, parts, step)]
    if step.how == PUT_OFF:
        return run.later(eqn, parts, step)
    found, numbers, shape = known(eqn), eqn.params["dimension_numbers"], parts[0].shape
    names = _names(found, step.choice)
    table, indices = run.placed(parts, found, step)
    if not names:
        return run.results(eqn, run.bind(eqn, [table, indices], found, step.choice), found, step)
    split = enumerate(axes_of(found.operands[0], step.choice))
    looked_up = {axis: some for axis, some in split if some and found.operands[0][axis][0] in _looked_up(found)}
    mode = GatherScatterMode.from_any(eqn.params["mode"])
    indices, here, valid = _own(run, shape, indices, numbers.start_index_map, looked_up, mode)
    # places of other devices are clipped to a row that is here: they are no longer sorted, nor each another
    at_most = {"mode": GatherScatterMode.CLIP, "indices_are_sorted": False, "unique_indices": False}
    (out,) = run.bind(eqn, [table, indices], found, step.choice, **at_most)
    at = [axis for axis in range(out.ndim) if axis not in numbers.offset_dims]
    beside = jnp.zeros((), out.dtype)
    if mode == GatherScatterMode.FILL_OR_DROP:  # what is outside of the table the first device says
        is_first = sum(lax.axis_index(name) for name in names) == 0
        fill = jnp.asarray(eqn.params["fill_value"], out.dtype)  # JAX's own where the program says none
        beside = jnp.where(lax.broadcast_in_dim(is_first & ~valid, out.shape, at), fill, beside)
    out = jnp.where(lax.broadcast_in_dim(here, out.shape, at), out, beside)
    axes = list(axes_of(found.results[0], step.choice))
    out = sum_or_scatter(run, out, axes, names, step, parts[0].signal)
    return [Here(shape_of(eqn), tuple(axes), out)]


def _where_it_rests(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Part:
    """Look up the rows of all devices where the table rests, and send the answers to where their rows are."""
    table, indices = parts
    assert isinstance(table, Stored)
    names = names_of(table.rest) - names_of(table.axes)
    by_store: Moving = lambda _: moving_as(key="store")
    own, every = run.place(indices, indices.axes, step.claim), without(indices.axes, names)
    indices = Here(indices.shape, every, own.local(every, frozenset(), by_store))
    at_rest = Here(table.shape, table.rest, table.x, signal=table.signal)
    (here,) = _gather(run, eqn, [at_rest, indices], dataclasses.replace(step, how=""))
    (target,) = step.results
    return Here(here.shape, target, here.local(target, frozenset(), by_store))


def _looked_up(found: Factors) -> set[int]:
    return {factor for factor, kind in enumerate(found.kinds) if kind == LOOKUP}


def _by_place(jaxpr: OpenJaxpr, eqn: Eqn) -> Any:
    """Rewrite `x[arange(n), i]`, a lookup of its own for each row, as a lookup in many tables; else return None."""
    numbers, makes = eqn.params["dimension_numbers"], makers(jaxpr)
    shape, last, made = eqn.invars[1].aval.shape, eqn.invars[1].aval.ndim - 1, entry(makes, eqn.invars[1])
    if made is None or made.primitive.name != "concatenate" or made.params["dimension"] != last:
        return None
    if len(made.invars) != shape[last]:
        return None
    together: dict[int, int] = {}  # axis of the table: axis of the indices
    for column, axis in zip(made.invars, numbers.start_index_map, strict=True):
        place = _counts(makes, column)
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


def _counts(makes: Mapping[Any, Eqn], atom: Any) -> int | None:
    """Return the axis along which an array counts its own places, as a reshaped iota does; None for others."""
    eqn = entry(makes, atom)
    if eqn is None:
        return None
    match eqn.primitive.name:
        case "iota":
            return eqn.params["dimension"]
        case "select_n":  # `where(i < 0, i + n, i)`: places are never below zero
            test = entry(makes, eqn.invars[0])
            if test is None or test.primitive.name != "lt" or getattr(test.invars[1], "val", None) != 0:
                return None
            return None if _counts(makes, test.invars[0]) is None else _counts(makes, eqn.invars[1])
        case "broadcast_in_dim" | "convert_element_type" | "copy" | "reshape":
            at, found = _counts(makes, eqn.invars[0]), known(eqn)
            of, results = () if at is None else found.operands[0][at], found.results[0]
            return results.index(of) if of and of in results else None
    return None


def _own(run: Run, shape: Any, indices: Array, start: Any, looked_up: Any, mode: Any) -> Any:
    """Count indices from this device's first row; return them, a mask of its own, and a mask of valid indices."""
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


def _plan_scatter(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    found = known(eqn)
    choice = choose(found, values, plan.sizes)
    # a table written to by places that are split is written whole: only sums of what each device writes can be joined
    for factor in (*_looked_up(found), *(() if _adds(eqn) else summed(found, choice))):
        choice.pop(factor, None)
    plan.placed(values, found, choice)
    if summed(found, choice):
        plan.need(values[0], axes_of(found.results[0], choice))
    return plan.results(eqn, found, choice), Step(choice=choice)


def _adds(eqn: Eqn) -> bool:
    return eqn.primitive.name[len("scatter_") :] in ("add", "sub")


def _scatter(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    found = known(eqn)
    table, indices, updates = run.placed(parts, found, step)
    names = tuple(name for factor in summed(found, step.choice) for name in step.choice[factor])
    if not names:
        return run.results(eqn, run.bind(eqn, [table, indices, updates]), found, step)
    (mine,) = run.bind(eqn, [jnp.zeros_like(table), indices, updates])
    axes = axes_of(found.results[0], step.choice)
    table = run.local(parts[0], axes, step.claim)
    return [Here(shape_of(eqn), axes, table + run.reduce(mine, names, "sum", step.claim))]


PLANS: dict[str, PlanRule] = {"gather": _plan_gather, **dict.fromkeys(SCATTERS, _plan_scatter)}
RULES: dict[str, Rule] = {"gather": _gather, **dict.fromkeys(SCATTERS, _scatter)}
