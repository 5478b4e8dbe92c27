"""Rules of loops: what is carried stays split alike, and what each turn would move alike is moved before them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.errors import JShardError
from jshard.layers.partition.halves import zeros_like_result
from jshard.layers.partition.part import Here, Part, Stored, here_of, vary
from jshard.layers.partition.plan import Names, Plan, Remat, Step, names_of
from jshard.layers.partition.planner import Planned, Planner, PlanRule
from jshard.layers.partition.prefetch import scan_ahead
from jshard.layers.partition.readers import is_one_turn
from jshard.layers.partition.run import Rule, Run, SomeLayers
from jshard.layers.partition.stages import in_turn
from jshard.layers.partition.value import Unplaced, Value, need_before, needs_of_turns, values_of
from jshard.layers.remat import CHUNK, recomputed
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import CHECKPOINTS, Eqn, Tree, holds, scanned
from jshard.programs.provenance import scope, source_of
from jshard.signals.signal import Signal

ONE_TURN, AHEAD = "one turn", "gathered ahead"

# -- plans --


def _plan_scan(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """Plan a scan. The carry is split as on entry, or further as the body leaves it. The scanned axis is whole, or
    split over stages of a pipeline, which run in turn."""
    jaxpr, (count, carried) = eqn.params["jaxpr"], scanned(eqn)
    values = [plan.array(value) for value in values]
    consts, carry, over = values[:count], values[count : count + carried], values[count + carried :]
    if is_one_turn(eqn) and not any(value.signal for value in over):
        return _plan_one_turn(plan, eqn, [*consts, *carry], over)
    lead = () if plan.stage is None or eqn.params["reverse"] else (plan.stage.mesh_axis,)
    lead = lead if any(value.axes[0] == lead for value in over) else ()
    over = [_plan_led_by(plan, value, lead) for value in over]
    consts = [value.renewed() for value in consts] if lead else consts
    for value in over:
        if isinstance(value, Unplaced) and value.is_undecided:
            value.scan(0)

    def body(axes: list[Axes]) -> tuple[list[Value], Plan]:
        state, each = values_of(eqn.outvars[:carried], axes), [value.one_turn() for value in over]
        made, inside = plan.program(jaxpr, [*(value.inside() for value in consts), *state, *each])
        with plan.ending(inside):
            made[carried:] = [plan.force(value) for value in made[carried:]]
            for value, a in zip(made, axes, strict=False):
                plan.need(value, a)
        return made, inside

    axes, made, inside = _settled([plan.force(value).axes for value in carry], consts, body)
    before = tuple(tuple(needs_of_turns(value.uses.within)) for value in consts)
    _plan_before(plan, consts)
    for value, a in zip(carry, axes, strict=True):
        plan.need(value, a)
    results = values_of(eqn.outvars, [*axes, *((lead, *value.axes) for value in made[carried:])])
    ahead = any(value.prefetches for value in over)
    if ahead:
        _check_ahead(eqn, next(value.signal for value in over if value.prefetches))
    regather = not holds(jaxpr, CHECKPOINTS) and _keeps_no_parameter(over)
    how, remat = AHEAD if ahead else "", _remat_of(over)
    step = Step(how, inside=(inside,), carried=tuple(axes), before=before)
    return results, dataclasses.replace(step, lead=lead, remat=remat, regather=regather)


def _check_ahead(eqn: Eqn, signal: Signal | None) -> None:
    """Refuse `prefetch` if the model groups several layers in a turn."""
    assert signal is not None
    if eqn.params["unroll"] >= 2:
        raise JShardError(
            f"{signal} says store.prefetch ({signal.at('store.prefetch')}) for layers of which {eqn.params['unroll']} are one "
            f"turn of their loop ({source_of(eqn)})",
            hint="remove `unroll`, or store.prefetch: one layer is gathered ahead",
        )
    if holds(eqn.params["jaxpr"], CHECKPOINTS):
        raise JShardError(
            f"{signal} says store.prefetch ({signal.at('store.prefetch')}) for layers that say themselves what is computed "
            f"anew ({source_of(eqn)})",
            hint="remove one: of layers that are gathered ahead their input is kept, and what `remat` says",
        )


def _keeps_no_parameter(over: Sequence[Value]) -> bool:
    """Return whether the backward pass marks or gathers the layers' parameters again; kept, they would be stacked
    once more."""
    signals = [value.signal for value in over if value.signal is not None]
    return any(value.regathers for value in over) or (bool(signals) and not any(each.store_keep for each in signals))


def _remat_of(over: Sequence[Value]) -> Remat:
    """Return the common `remat` of the signals of the layers' parameters."""
    said = {v.signal.remat: v.signal for v in over if v.signal is not None and v.signal.remat}
    if len(said) > 1:
        one, other, *_ = said.values()
        raise JShardError(
            f"{one} and {other} ({other.at('remat')}) say different remat for the layers of one loop",
            hint="give both the same: the layers of a loop are computed anew as a whole",
        )
    return next(iter(said), "")


def _plan_one_turn(plan: Planner, eqn: Eqn, given: Sequence[Value], over: Sequence[Value]) -> Planned:
    """Plan a loop of a single turn, with its closed-over values read as outside a loop."""
    each = [_plan_led_by(plan, value, ()).one_turn() for value in over]
    made, inside = plan.program(eqn.params["jaxpr"], [*given, *each])
    _, carried = scanned(eqn)
    with plan.ending(inside):
        left = [((), *plan.force(value).axes) for value in made[carried:]]
    return [*made[:carried], *values_of(eqn.outvars[carried:], left)], Step(ONE_TURN, inside=(inside,))


def _plan_led_by(plan: Planner, value: Value, lead: tuple[str, ...]) -> Value:
    return value if value.lies[0] == lead else plan.place(value, (lead, *value.axes[1:]))


def _settled(
    axes: list[Axes], consts: Sequence[Value], body: Callable[[list[Axes]], tuple[list[Value], Plan]]
) -> tuple[list[Axes], list[Value], Plan]:
    """Split the carry as the body leaves it, if further, to the fixpoint."""
    for _ in range(3):
        made, inside = body(axes)
        after = [new.axes if _finer(old, new.axes) else old for old, new in zip(axes, made, strict=False)]
        if after == axes:
            return axes, made, inside
        axes = after
        for value in consts:
            value.uses.within.clear()
    return axes, *body(axes)


def _plan_before(plan: Planner, values: Sequence[Value]) -> None:
    """Plan the moves before a loop that each of its turns would repeat."""

    def need(value: Value, axes: Axes, names: Names) -> None:
        plan.need(value, axes, names)
        once = plan.brought[-1]
        for inside in value.uses.all_within():
            each = inside.needed.get((axes, names), once)
            each.before = each.before if each is once else once

    need_before(values, need)


def _finer(old: Axes, new: Axes) -> bool:
    return old != new and all(b[: len(a)] == a for a, b in zip(old, new, strict=True))


def _plan_while(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    asked, values = eqn.params, [plan.array(value) for value in values]
    of_test, of_body = asked["cond_nconsts"], asked["body_nconsts"]
    test_consts, consts, carry = values[:of_test], values[of_test : of_test + of_body], values[of_test + of_body :]

    def body(axes: list[Axes]) -> tuple[list[Value], Plan]:
        made, inside = plan.program(asked["body_jaxpr"], [*(value.inside() for value in consts), *state(axes)])
        with plan.ending(inside):
            for value, a in zip(made, axes, strict=True):
                plan.need(value, a)
        return made, inside

    state = functools.partial(values_of, eqn.outvars)
    axes, _, inside = _settled([plan.force(value).axes for value in carry], consts, body)
    _plan_before(plan, consts)
    for value, a in zip(carry, axes, strict=True):
        plan.need(value, a)
    (found,), test = plan.program(asked["cond_jaxpr"], [*(value.renewed() for value in test_consts), *state(axes)])
    with plan.ending(test):
        plan.need(found, ())
    return state(axes), Step(inside=(test, inside), carried=tuple(axes))


# -- runs --


def _is_as_planned(consts: Sequence[Here], others: Sequence[tuple[Here, Array]]) -> bool:
    """Return whether a turn's needs are as planned: nothing varies over more mesh axes than at planning."""
    varying = lambda part, x: jax.typeof(x).mat.varying - names_of(part.lies)
    beyond = frozenset().union(*(varying(part, part.x) for part in consts), *(varying(*each) for each in others))
    return all(beyond <= part.beyond for part in consts)


def _before(run: Run, parts: Sequence[Here], step: Step, *, is_planned: bool) -> None:
    """Gather, cut and mark before a loop instead of in each turn: as planned, or as a trace of a turn has it."""

    def need(part: Here, axes: Axes, names: Names) -> None:
        with contextlib.nullcontext() if part.signal is None else scope(claim=part.signal.name):
            run.local(part, axes, step.claim_behind, names)

    for part, needs in zip(parts, step.before, strict=True) if is_planned else ():
        for path, axes, names in needs:
            need(part.follow(path), axes, names)
    need_before(parts, need)


def _scan(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    asked, jaxpr, axes, lead = eqn.params, eqn.params["jaxpr"], step.carried, step.lead
    count, carried = scanned(eqn)
    arrays = [run.array(part, step.claim) for part in parts]
    consts, carry, over = arrays[:count], arrays[count : count + carried], arrays[count + carried :]
    if step.how == ONE_TURN:
        return _one_turn(run, eqn, [*consts, *carry], over, step)
    over = [_led_by(run, part, lead, step) for part in over]
    if lead:  # else gradients would be summed over stages where one stage is at work
        consts = [part.renewed(x=vary(part.x, frozenset(lead))) for part in consts]
    inner: list[Here] = []
    left: list[Here] = []  # behind each turn

    def turn(carries: Sequence[Array], each: Sequence[Any], given: Sequence[Array]) -> tuple[Any, Any]:
        inner[:] = [part.inside(x=x) for part, x in zip(consts, given, strict=True)]
        inner.extend(here_of(eqn.outvars[:carried], axes, carries))
        inner.extend(x if isinstance(x, Here) else part.one_turn(x=x) for part, x in zip(over, each, strict=True))
        made = run.run(jaxpr, inner, step.inside[0])
        left[:] = [run.force(part, step.claim_behind) for part in made[carried:]]
        return run.lying(made[:carried], axes, step.claim_behind), [part.x for part in left]

    start, given = run.lying(carry, axes, step.claim), [part.x for part in consts]
    others = [*zip(carry, start, strict=True), *((part, part.x) for part in over)]
    is_planned = step.how != AHEAD and _is_as_planned(consts, others)
    if not is_planned:  # a trace tells what a turn makes of what it closes over
        jax.make_jaxpr(turn)(start, [part.x[0] for part in over], given)
    _before(run, consts, step, is_planned=is_planned)
    layer = lambda carries, each: turn(carries, each, [part.x for part in consts])
    length = asked["length"] // math.prod(run.sizes[name] for name in lead)
    one = recomputed(layer, step.remat, regather=step.regather, in_scan=asked["unroll"] < length)

    def layers(carries: list[Array]) -> tuple[list[Array], list[Array]]:
        if step.how == AHEAD:
            return _ahead(eqn, length, over, inner[count + carried :], layer, carries, step.remat)
        how = {"length": length, "reverse": asked["reverse"], "unroll": asked["unroll"]}
        xs = [part.x for part in over]
        if run.some_layers is None or run.some_layers.loop is not eqn:
            return lax.scan(one, carries, xs, **how)
        return _first_of(one, run.some_layers, carries, xs, **how)

    start = [vary(x, frozenset(lead)) for x in start]
    if lead:
        last, ys = in_turn(layers, start, *lead, **run.by)
        with scope(**run.by):
            last = [run.reduce(x, lead, "sum", step.claim_behind) for x in last]
    else:
        last, ys = layers(start)
    assert all({*inn.uses.needed} <= {*c.uses.needed} for c, inn in zip(consts, inner, strict=False)), (eqn, step)
    return here_of(eqn.outvars, [*axes, *((lead, *part.axes) for part in left)], [*last, *ys])


def _one_turn(run: Run, eqn: Eqn, given: Sequence[Here], over: Sequence[Here], step: Step) -> list[Part]:
    each = [part.one_turn(x=lax.squeeze(part.x, (0,))) for part in (_led_by(run, part, (), step) for part in over)]
    made = run.run(eqn.params["jaxpr"], [*given, *each], step.inside[0])
    _, carried = scanned(eqn)
    left = [run.force(part, step.claim_behind) for part in made[carried:]]
    stacked = here_of(eqn.outvars[carried:], (((), *part.axes) for part in left), (part.x[None] for part in left))
    return [*made[:carried], *stacked]


def _first_of(
    layer: Callable[..., Any], some: SomeLayers, carry: list[Array], xs: list[Array], *, length: int, **how: Any
) -> tuple[list[Array], list[Array]]:
    """Run the first layers of a loop, as many as `some` says; the others pass the carry on and give zeros."""
    _, none = zeros_like_result(layer, carry, [x[0] for x in xs])

    def one(carry: Tree, xs: list[Array]) -> Any:
        number, carry = carry
        with scope(times=some.times, turns=str(length)):
            carry, left = lax.cond(number < some.number, lambda: layer(carry, xs), lambda: (carry, none))
        return (number + 1, carry), left

    (_, carry), left = lax.scan(one, (jnp.zeros((), jnp.int32), carry), xs, length=length, **how)
    return carry, left


def _ahead(
    eqn: Eqn,
    length: int,
    over: Sequence[Here],
    seen: Sequence[Here],
    layer: Callable[..., Any],
    carry: list[Array],
    remat: Remat,
) -> tuple[list[Array], list[Array]]:
    """Run a loop with each layer gathered a turn ahead. `seen` are the shards of a traced layer: they list its
    gathers."""
    ahead = {at: list(turn.gathers()) for at, turn in enumerate(seen) if isinstance(turn, Stored) and turn.prefetches}
    others = [at for at in range(len(over)) if at not in ahead]

    def gather(at: int, path: Any, steps: Any, x: Any) -> Any:
        part = over[at].one_turn(x=x)
        assert isinstance(part, Stored)
        with contextlib.nullcontext() if part.signal is None else scope(claim=part.signal.name):
            return part.follow(path).gather(steps)

    gathers = [
        (number, functools.partial(gather, at, *use)) for number, (at, uses) in enumerate(ahead.items()) for use in uses
    ]

    def one(carries: list[Any], full: list[Any], each: list[Any]) -> Any:
        parts: dict[int, Any] = dict(zip(others, each, strict=True))
        it = iter(full)
        for at, uses in ahead.items():
            # the dtype alone is read, and no use can gather it once more
            parts[at] = over[at].one_turn(x=jax.ShapeDtypeStruct((), over[at].x.dtype))
            for path, steps in uses:
                parts[at].follow(path).uses.gathered[steps] = next(it)
        return layer(carries, [parts[at] for at in range(len(over))])

    shards, each = [over[at].x for at in ahead], [over[at].x for at in others]
    return scan_ahead(
        one, gathers, carry, shards, each, length=length, reverse=eqn.params["reverse"],
        travels=any(over[at].is_stored for at in ahead), remat="" if remat == CHUNK else remat,
    )  # fmt: skip


def _led_by(run: Run, part: Here, lead: tuple[str, ...], step: Step) -> Here:
    """Return the layouts of scanned operands: the scanned axis is whole, or split over stages, also of a stored
    parameter."""
    return part if part.lies[0] == lead else run.place(part, (lead, *part.axes[1:]), step.claim)


def _while(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    asked, axes, arrays = eqn.params, step.carried, [run.array(part, step.claim) for part in parts]
    of_test, of_body = asked["cond_nconsts"], asked["body_nconsts"]
    test_consts, consts, carry = arrays[:of_test], arrays[of_test : of_test + of_body], arrays[of_test + of_body :]
    of_test_plan, of_body_plan = step.inside

    state = functools.partial(here_of, eqn.outvars, axes)

    def body(carries: Sequence[Array], given: Sequence[Any]) -> list[Array]:
        inner = [part.inside(x=x) for part, x in zip(consts, given, strict=True)]
        made = run.run(asked["body_jaxpr"], [*inner, *state(carries)], of_body_plan)
        return run.lying(made, axes, step.claim_behind)

    def test(carries: Sequence[Array]) -> Array:
        given = [*(part.renewed() for part in test_consts), *state(carries)]
        (found,) = run.run(asked["cond_jaxpr"], given, of_test_plan)
        return run.place(found, (), step.claim_behind).x

    start, given = run.lying(carry, axes, step.claim), [part.x for part in consts]
    if consts:
        jax.make_jaxpr(body)(start, given)  # tells what a turn makes of what it closes over
    _before(run, consts, step, is_planned=False)
    last = lax.while_loop(test, lambda carries: body(carries, [part.x for part in consts]), start)
    return state(last)


PLANS: dict[str, PlanRule] = {"scan": _plan_scan, "while": _plan_while}
RULES: dict[str, Rule] = {"scan": _scan, "while": _while}
