"""Rules of cuts along a split axis: devices send each other what their parts of the pieces are made of, or what is small is
summed, as only those that have it give it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshard.kernels.collectives import axis_index, permute
from jshard.layers.partition.choice import choose, ways
from jshard.layers.partition.local_sizes import ranges_of
from jshard.layers.partition.part import Deferred, Here, Part
from jshard.layers.partition.plan import Names, Step, key_of
from jshard.layers.partition.planner import Planned, Planner, PlanRule, known, traced_whole
from jshard.layers.partition.run import Rule, Run
from jshard.layers.partition.value import Later, Value
from jshard.layouts.redistribution import Axes, Move
from jshard.programs.jaxprs import Eqn
from jshard.programs.provenance import scope


@dataclasses.dataclass(frozen=True)
class Sent:
    """A run of elements needed by `target` from `source`: its first place in both shards, and its length."""

    source: int
    target: int
    taken: int
    put: int
    size: int


def sent(ranges: Sequence[range], held: int, devices: int) -> list[list[Sent]]:
    """Return the rounds of transfers. In a round a device sends at most one run and receives at most one. Runs that
    stay on their device are in rounds of their own."""
    each = []
    before = 0  # in the part of all pieces, one behind another
    for some in ranges:
        share = len(some) // devices
        for target in range(devices):
            low = some.start + target * share
            for source in range(low // held, (low + share - 1) // held + 1):
                at, end = max(low, source * held), min(low + share, (source + 1) * held)
                each.append(Sent(source, target, at - source * held, before + at - low, end - at))
        before += share
    rounds: list[list[Sent]] = []
    for one in sorted(each, key=lambda one: (one.source != one.target, -one.size)):
        stays = one.source == one.target
        free = (
            some for some in rounds
            if (some[0].source == some[0].target) == stays
            and not any(one.source == other.source or one.target == other.target for other in some)
        )  # fmt: skip
        found = next(free, None)
        if found is None:
            rounds.append([one])
        else:
            found.append(one)
    return rounds


def cut(x: Array, axis: int, names: tuple[str, ...], ranges: Sequence[range], devices: int) -> list[Array]:
    """Return this device's shard of each piece of an array split by `names` along `axis`. Costs one permute for each
    round."""
    held, me, shares = x.shape[axis], axis_index(names), [len(some) // devices for some in ranges]
    rounds = sent(ranges, held, devices)
    beside = max(some[0].size for some in rounds)  # room at both ends: of what is sent not all may be needed
    shape = [*x.shape[:axis], sum(shares) + 2 * beside, *x.shape[axis + 1 :]]
    out = jnp.zeros(shape, x.dtype)
    for some in rounds:
        width = some[0].size
        first, skipped, put, size = np.zeros((4, devices), np.int32)
        for one in some:
            first[one.source] = min(one.taken, held - width)
            skipped[one.target] = one.taken - first[one.source]
            put[one.target], size[one.target] = one.put - skipped[one.target] + beside, one.size
        window = lax.dynamic_slice_in_dim(x, jnp.asarray(first)[me], width, axis)
        if some[0].source != some[0].target:
            window = permute(window, names, pairs=[(one.source, one.target) for one in some])
        place = lax.broadcasted_iota(np.int32, window.shape, axis) - jnp.asarray(skipped)[me]
        is_sent = (place >= 0) & (place < jnp.asarray(size)[me])
        to = jnp.asarray(put)[me]
        there = lax.dynamic_slice_in_dim(out, to, width, axis)
        out = lax.dynamic_update_slice_in_dim(out, jnp.where(is_sent, window, there), to, axis)
    ends = np.cumsum([beside, *shares])
    return [lax.slice_in_dim(out, int(at), int(end), axis=axis) for at, end in zip(ends[:-1], ends[1:], strict=True)]


CUT = "cut"  # each device gives the others what their parts are made of


def _plan_cut(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """Pieces of a split axis stay split where each divides. Of others those much smaller than the array are summed, and else
    the split moves to another axis, if there is one."""
    (value,) = values
    split = _split(eqn, value)
    if split is None or (value.is_put_off and value.signal is None):
        return plan.by_table(eqn, values)
    axis, ranges = split
    names = value.axes[axis]
    devices = ways(names, plan.sizes)
    if any(not some or len(some) % devices or some.step >= 2 for some in ranges):
        moves = {name for some in choose(known(eqn), values, plan.sizes).values() for name in some}.issuperset(names)
        if 2 * max(map(len, ranges)) * (devices if moves else 1) > value.shape[axis]:  # a sum has more on the wire
            return plan.by_table(eqn, values)
        look = lambda x: _looked_up(eqn, x, axis, ranges)
        body = plan.once(key_of(eqn), lambda: traced_whole(look, [eqn.invars[0].aval]))
        results, inside = plan.program(body, values)
        return results, Step(body=body, inside=(inside,))

    def piece(variable: Any) -> Value:
        shape, dtype = tuple(variable.aval.shape), variable.aval.dtype
        if value.signal is None:
            plan.need(value, value.axes)
            return Value(shape, value.axes, dtype)

        def recipe(axes: Axes, others: Names) -> None:
            plan.need(value, value.axes, others)
            plan.need(Value(shape, value.axes, dtype, signal=value.signal), axes, others)

        return Later(shape, value.axes, dtype, recipe, signal=value.signal)

    key = value, eqn.primitive, str(eqn.params)  # an array is cut once for all its uses, and its gradients joined once
    return plan.once(key, lambda: [piece(variable) for variable in eqn.outvars]), Step(CUT)


def _split(eqn: Eqn, x: Part | Value) -> tuple[int, list[range]] | None:
    """Return the split and cut axis, and the range of each piece along it."""
    split = [(axis, ranges) for axis, ranges in ranges_of(eqn, x.shape).items() if x.axes[axis]]
    return split[0] if len(split) == 1 else None


def _cut(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    (part,), split = parts, _split(eqn, parts[0])
    if step.how != CUT or split is None:
        return run.by_table(eqn, parts, step)
    axis, ranges = split
    names = part.axes[axis]

    @functools.cache
    def pieces(others: Names) -> list[Array]:
        x = run.local(part, part.axes, step.claim, others)
        if part.signal is None:
            by = run.moving(step.claim)(tuple(Move("permute", name, axis, axis) for name in names))
        else:
            by = scope(key="reduction" if names == part.signal.reduction else "column")
        with by:
            devices = math.prod(run.sizes[name] for name in names)
            return [_as_it_lies(eqn, piece, part.axes) for piece in cut(x, axis, names, ranges, devices)]

    def piece(number: int, variable: Any) -> Part:
        shape = tuple(variable.aval.shape)
        there = lambda others: Here(shape, part.axes, pieces(others)[number], signal=part.signal)
        if part.signal is None:
            return there(frozenset())
        make = lambda axes, others, moving: there(others).local(axes, others, moving)
        return Deferred(shape, part.axes, make, signal=part.signal)

    key = eqn.primitive, str(eqn.params)  # an array is cut once for all its uses, and its gradients joined once
    made = part.uses.parts
    if key not in made:
        made[key] = [piece(number, variable) for number, variable in enumerate(eqn.outvars)]
    return made[key]


def _as_it_lies(eqn: Eqn, x: Array, axes: Axes) -> Array:
    """Cut along the whole axes, without a collective."""
    if eqn.primitive.name == "split":
        return x
    asked, is_split = eqn.params, [bool(names) for names in axes]
    starts = [0 if s else start for s, start in zip(is_split, asked["start_indices"], strict=True)]
    ends = [n if s else end for s, end, n in zip(is_split, asked["limit_indices"], x.shape, strict=True)]
    strides = [1 if s else stride for s, stride in zip(is_split, asked["strides"] or (1,) * x.ndim, strict=True)]
    return lax.slice(x, starts, ends, strides)


def _looked_up(eqn: Eqn, x: Array, axis: int, ranges: Sequence[range]) -> list[Array]:
    """Look the pieces up: devices that have none of one give zeros."""
    x = _as_it_lies(eqn, x, tuple(("split",) if at == axis else () for at in range(x.ndim)))
    return [jnp.take(x, np.asarray(some), axis=axis, mode="clip") for some in ranges]


PLANS: dict[str, PlanRule] = {"slice": _plan_cut, "split": _plan_cut}
RULES: dict[str, Rule] = {"slice": _cut, "split": _cut}
