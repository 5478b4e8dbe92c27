"""Rules of what holds a program of its own: loops, branches, checkpoints, functions with a derivative of their own."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Var

from jshard.errors import JShardError
from jshard.layers.partition.halves import zeros_like_result
from jshard.layers.partition.part import Part, vary
from jshard.layers.partition.plan import Names, Plan, Remat, Step
from jshard.layers.partition.planner import Planned, Planner, PlanRule, number, traced_whole
from jshard.layers.partition.prefetch import is_smooth, padded, scan_ahead, smooth
from jshard.layers.partition.readers import is_one_turn
from jshard.layers.partition.run import Rule, Run, SomeLayers
from jshard.layers.partition.stages import in_turn
from jshard.layers.partition.value import Value, need_before
from jshard.layers.remat import CHUNK, recomputed
from jshard.layouts.primitives import ELEMENTWISE
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import CALLS, CHECKPOINTS, Eqn, bare, called, equations, holds, part_of, scanned, variables
from jshard.programs.provenance import scope, source_of
from jshard.signals.signal import Signal

ONE_TURN, AHEAD, TANGENTS = "one turn", "gathered ahead", "tangents"

# -- plans --


def _plan_anew(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    made, inside = plan.program(eqn.params["jaxpr"], [plan.array(value).inside() for value in values])
    return [plan.force(value).outside() for value in made], Step(inside=(inside,))


def _plan_scan(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """What is carried is split as it goes in, or further as the loop leaves it; the axis that one goes along is whole, or split
    over the stages of a pipeline, which run one after the other."""
    jaxpr, (count, carried) = eqn.params["jaxpr"], scanned(eqn)
    values = [plan.array(value) for value in values]
    consts, carry, over = values[:count], values[count : count + carried], values[count + carried :]
    if is_one_turn(eqn) and not any(value.signal for value in over):
        return _plan_one_turn(plan, eqn, [*consts, *carry], over)
    lead = () if plan.stage is None or eqn.params["reverse"] else (plan.stage.mesh_axis,)
    lead = lead if any(value.axes[0] == lead for value in over) else ()
    over = [_plan_led_by(plan, value, lead) for value in over]
    consts = [value.outside() for value in consts] if lead else consts
    for value in over:
        if value.is_undecided and value.parameter is not None and value.of[0] is not None:
            value.parameter.roles[value.of[0]] = "scan"

    def body(axes: list[Axes]) -> tuple[list[Value], Plan]:
        state = [Value(value.shape, a, value.dtype) for value, a in zip(carry, axes, strict=True)]
        made, inside = plan.program(jaxpr, [*(v.inside() for v in consts), *state, *(v.one_turn() for v in over)])
        made[carried:] = [plan.force(value) for value in made[carried:]]
        for value, a in zip(made, axes, strict=False):
            plan.need(value, a)
        return made, inside

    axes, made, inside = _settled([plan.force(value).axes for value in carry], consts, body)
    need_before(consts, plan.need)
    for value, a in zip(carry, axes, strict=True):
        plan.need(value, a)
    results = [Value(value.shape, a, value.dtype) for value, a in zip(carry, axes, strict=True)]
    for variable, value in zip(eqn.outvars[carried:], made[carried:], strict=True):
        results.append(Value(tuple(variable.aval.shape), (lead, *value.axes), value.dtype))
    ahead = any(value.prefetches for value in over)
    if ahead:
        _check_ahead(eqn, next(value.signal for value in over if value.prefetches))
    regather = not holds(jaxpr, CHECKPOINTS) and _keeps_no_parameter(over)
    how, remat = AHEAD if ahead else "", _remat_of(over)
    return results, Step(how, inside=(inside,), carried=tuple(axes), lead=lead, remat=remat, regather=regather)


def _check_ahead(eqn: Eqn, signal: Signal | None) -> None:
    """Refuse to gather the layers of a loop one ahead where the model says how several of them run."""
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
    """Whether the backward pass marks the layers' parameters again, as it gathers them: kept, they would be stacked anew."""
    signals = [value.signal for value in over if value.signal is not None]
    return any(value.regathers for value in over) or (bool(signals) and not any(each.store_keep for each in signals))


def _remat_of(over: Sequence[Value]) -> Remat:
    """What the signals of the layers' parameters say is computed anew, which has to be one thing."""
    said = {v.signal.remat: v.signal for v in over if v.signal is not None and v.signal.remat}
    if len(said) > 1:
        one, other, *_ = said.values()
        raise JShardError(
            f"{one} and {other} ({other.at('remat')}) say different remat for the layers of one loop",
            hint="give both the same: the layers of a loop are computed anew as a whole",
        )
    return next(iter(said), "")


def _plan_one_turn(plan: Planner, eqn: Eqn, given: Sequence[Value], over: Sequence[Value]) -> Planned:
    """Plan a loop of one turn: what it closes over is read as anywhere else."""
    each = [_plan_led_by(plan, value, ()).one_turn() for value in over]
    made, inside = plan.program(eqn.params["jaxpr"], [*given, *each])
    _, carried = scanned(eqn)
    left = zip(eqn.outvars[carried:], [plan.force(value) for value in made[carried:]], strict=True)
    stacked = [Value(tuple(v.aval.shape), ((), *value.axes), value.dtype) for v, value in left]
    return [*made[:carried], *stacked], Step(ONE_TURN, inside=(inside,))


def _plan_led_by(plan: Planner, value: Value, lead: tuple[str, ...]) -> Value:
    lies = value.axes if value.rest is None else value.rest
    return value if lies[0] == lead else plan.place(value, (lead, *value.axes[1:]))


def _settled(
    axes: list[Axes], consts: Sequence[Value], body: Callable[[list[Axes]], tuple[list[Value], Plan]]
) -> tuple[list[Axes], list[Value], Plan]:
    """Split what is carried as the body leaves it, where that is split further, until it stays so."""
    for _ in range(3):
        made, inside = body(axes)
        after = [new.axes if _finer(old, new.axes) else old for old, new in zip(axes, made, strict=False)]
        if after == axes:
            return axes, made, inside
        axes = after
        for value in consts:
            value.within.clear()
    return axes, *body(axes)


def _finer(old: Axes, new: Axes) -> bool:
    return old != new and all(b[: len(a)] == a for a, b in zip(old, new, strict=True))


def _plan_while(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    asked, values = eqn.params, [plan.array(value) for value in values]
    of_test, of_body = asked["cond_nconsts"], asked["body_nconsts"]
    test_consts, consts, carry = values[:of_test], values[of_test : of_test + of_body], values[of_test + of_body :]

    def body(axes: list[Axes]) -> tuple[list[Value], Plan]:
        made, inside = plan.program(asked["body_jaxpr"], [*(value.inside() for value in consts), *state(axes)])
        for value, a in zip(made, axes, strict=True):
            plan.need(value, a)
        return made, inside

    def state(axes: list[Axes]) -> list[Value]:
        return [Value(value.shape, a, value.dtype) for value, a in zip(carry, axes, strict=True)]

    axes, _, inside = _settled([plan.force(value).axes for value in carry], consts, body)
    need_before(consts, plan.need)
    for value, a in zip(carry, axes, strict=True):
        plan.need(value, a)
    (found,), test = plan.program(asked["cond_jaxpr"], [*(value.outside() for value in test_consts), *state(axes)])
    plan.need(found, ())
    return state(axes), Step(inside=(test, inside), carried=tuple(axes))


def _plan_cond(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """All branches leave their results as the first does."""
    index, *given = [plan.force(value) for value in values]
    plans, axes = [], None
    for branch in eqn.params["branches"]:
        made, inside = plan.program(branch, [value.outside() for value in given])
        made = [plan.force(value) for value in made]
        axes = axes or [value.axes for value in made]
        for value, a in zip(made, axes, strict=True):
            plan.need(value, a)
        plans.append(inside)
    if eqn.params.get("branches_platforms") is None:
        plan.need(index, ())
    results = zip(eqn.outvars, axes or (), strict=True)
    return [Value(tuple(v.aval.shape), a, v.aval.dtype) for v, a in results], Step(inside=tuple(plans))


def _plan_own_derivative(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """Plan the function itself. Its derivative is planned when JAX asks for it."""
    shapes = {(value.shape, value.axes) for value in values if value.shape}
    primitives = {each.primitive.name for each in equations(called(eqn))}
    by_tangents = not primitives - ELEMENTWISE - CALLS.keys() and len(shapes) <= 1
    pairs = list(zip(values, eqn.invars, strict=True))
    values = [plan.force(value).outside() if isinstance(atom, Var) else value for value, atom in pairs]
    made, inside = plan.program(called(eqn), values)
    # what moves an operand can't be transposed, as a rule for tangents is
    return [plan.force(value).outside() for value in made], Step(TANGENTS if by_tangents else "", inside=(inside,))


def _plan_dropped(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """A placement in the model's own code: the configuration says how arrays lie."""
    return list(values), Step()


def _plan_refused(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    if plan.is_first:
        return [number(variable.aval) for variable in eqn.outvars], Step()
    raise own_devices(source_of(eqn), eqn.primitive.name)


# -- runs --


def _before(run: Run, parts: Sequence[Part], claim: Signal | None) -> None:
    """Gather, cut and mark before a loop what each of its turns would."""

    def need(part: Part, axes: Axes, names: Names) -> None:
        with contextlib.nullcontext() if part.signal is None else scope(claim=part.signal.name):
            run.local(part, axes, claim, names)

    need_before(parts, need)


def _within(part: Part, x: Array) -> Part:
    return part.inside(x=x)


def _alike(part: Part, x: Array) -> Part:
    return part.outside(x=x)


def _made(run: Run, part: Part, step: Step) -> Part:
    """What can go into another trace: an array. A stored parameter stays at rest, and is gathered where it is used."""
    return part if part.make is None else run.force(part, step.claim)


def _like(run: Run, parts: Sequence[Part], axes: Sequence[Axes], claim: Signal | None) -> list[Array]:
    return [run.place(part, each, claim).x for part, each in zip(parts, axes, strict=True)]


def _checkpoint(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    how = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
    return _anew(run, eqn, parts, step, lambda body: jax.checkpoint(body, **how))


def _regathered(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    return _anew(run, eqn, parts, step, lambda body: recomputed(body, "", regather=True))


def _anew(run: Run, eqn: Eqn, parts: list[Part], step: Step, wrapped: Callable[[Any], Any]) -> list[Part]:
    parts, found = [_made(run, part, step) for part in parts], list[Part]()

    def body(*xs: Array) -> list[Array]:
        made = run.run(
            eqn.params["jaxpr"], [part.inside(x=x) for part, x in zip(parts, xs, strict=True)], step.inside[0]
        )
        found[:] = [run.force(part, step.claim_behind) for part in made]
        return [part.x for part in found]

    return _results(wrapped(body), parts, found)


def _results(body: Callable[..., list[Array]], parts: Sequence[Part], found: list[Part]) -> list[Part]:
    """Run a body that leaves in `found` how its results are split."""
    outs = body(*(part.x for part in parts))
    return [_alike(part, x) for part, x in zip(found, outs, strict=True)]


def _scan(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    asked, jaxpr, axes, lead = eqn.params, eqn.params["jaxpr"], step.carried, step.lead
    count, carried = scanned(eqn)
    parts = [_made(run, part, step) for part in parts]
    consts, carry, over = parts[:count], parts[count : count + carried], parts[count + carried :]
    if step.how == ONE_TURN:
        return _one_turn(run, eqn, [*consts, *carry], over, step)
    over = [_led_by(run, part, lead, step) for part in over]
    if lead:  # else gradients would be summed over stages where one stage is at work
        consts = [_alike(part, vary(part.x, frozenset(lead))) for part in consts]
    made: list[Part] = []
    inner: list[Part] = []

    def turn(carries: Sequence[Array], each: Sequence[Any], given: Sequence[Array]) -> tuple[Any, Any]:
        inner[:] = map(_within, consts, given)
        inner.extend(Part(part.shape, a, x) for part, a, x in zip(carry, axes, carries, strict=True))
        inner.extend(x if isinstance(x, Part) else part.one_turn(x=x) for part, x in zip(over, each, strict=True))
        made[:] = run.run(jaxpr, inner, step.inside[0])
        made[carried:] = [run.force(part, step.claim_behind) for part in made[carried:]]
        return _like(run, made[:carried], axes, step.claim_behind), [part.x for part in made[carried:]]

    start, given = _like(run, carry, axes, step.claim), [part.x for part in consts]
    if consts or step.how == AHEAD:
        jax.make_jaxpr(turn)(
            start, [part.x[0] for part in over], given
        )  # tells what a turn makes of what it closes over
    _before(run, consts, step.claim_behind)
    layer = lambda carries, each: turn(carries, each, [part.x for part in consts])
    length = asked["length"] // math.prod(run.sizes[name] for name in lead)

    def layers(carries: list[Array]) -> tuple[list[Array], list[Array]]:
        if step.how == AHEAD:
            return _ahead(eqn, length, over, inner[count + carried :], layer, carries, step.remat)
        one = recomputed(layer, step.remat, regather=step.regather, in_scan=asked["unroll"] < length)
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
    results = [Part(part.shape, a, x) for part, a, x in zip(carry, axes, last, strict=True)]
    shapes = [tuple(variable.aval.shape) for variable in eqn.outvars[carried:]]
    return results + [Part(s, (lead, *p.axes), y) for s, p, y in zip(shapes, made[carried:], ys, strict=True)]


def _one_turn(run: Run, eqn: Eqn, given: Sequence[Part], over: Sequence[Part], step: Step) -> list[Part]:
    each = [part.one_turn(x=lax.squeeze(part.x, (0,))) for part in (_led_by(run, part, (), step) for part in over)]
    made = run.run(eqn.params["jaxpr"], [*given, *each], step.inside[0])
    _, carried = scanned(eqn)
    shapes = [tuple(variable.aval.shape) for variable in eqn.outvars[carried:]]
    left = zip(shapes, [run.force(part, step.claim_behind) for part in made[carried:]], strict=True)
    return [*made[:carried], *(Part(shape, ((), *part.axes), part.x[None]) for shape, part in left)]


def _first_of(
    layer: Callable[..., Any], some: SomeLayers, carry: list[Array], xs: list[Array], *, length: int, **how: Any
) -> tuple[list[Array], list[Array]]:
    """Run the first layers of a loop, as many as `some` says; those behind them leave what is carried as it is, and zeros."""
    _, none = zeros_like_result(layer, carry, [x[0] for x in xs])

    def one(carry: Any, xs: list[Array]) -> Any:
        number, carry = carry
        with scope(times=some.times, turns=str(length)):
            carry, left = lax.cond(number < some.number, lambda: layer(carry, xs), lambda: (carry, none))
        return (number + 1, carry), left

    (_, carry), left = lax.scan(one, (jnp.zeros((), jnp.int32), carry), xs, length=length, **how)
    return carry, left


def _ahead(
    eqn: Eqn,
    length: int,
    over: Sequence[Part],
    seen: Sequence[Part],
    layer: Callable[..., Any],
    carry: list[Array],
    remat: Remat,
) -> tuple[list[Array], list[Array]]:
    """Run a loop whose layers are gathered one ahead. `seen` are the parts of a layer that has been traced: what it gathers."""
    ahead = {at: list(seen[at].gathers()) for at, part in enumerate(over) if part.prefetches}
    others = [at for at in range(len(over)) if at not in ahead]

    def gather(at: int, path: Any, steps: Any, x: Any) -> Any:
        part = over[at].one_turn(x=x)
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
                parts[at].follow(path).gathered[steps] = next(it)
        return layer(carries, [parts[at] for at in range(len(over))])

    shards, each = [over[at].x for at in ahead], [over[at].x for at in others]
    return scan_ahead(
        one, gathers, carry, shards, each, length=length, reverse=eqn.params["reverse"],
        travels=any(over[at].rest is not None for at in ahead), remat="" if remat == CHUNK else remat,
    )  # fmt: skip


def _led_by(run: Run, part: Part, lead: tuple[str, ...], step: Step) -> Part:
    """The axis that a scan goes along is whole on every device, or split over stages, of a stored parameter too."""
    lies = part.axes if part.rest is None else part.rest
    return part if lies[0] == lead else run.place(part, (lead, *part.axes[1:]), step.claim)


def _while(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    asked, axes, parts = eqn.params, step.carried, [_made(run, part, step) for part in parts]
    of_test, of_body = asked["cond_nconsts"], asked["body_nconsts"]
    test_consts, consts, carry = parts[:of_test], parts[of_test : of_test + of_body], parts[of_test + of_body :]
    of_test_plan, of_body_plan = step.inside

    def state(carries: Sequence[Array]) -> list[Part]:
        return [Part(part.shape, a, x) for part, a, x in zip(carry, axes, carries, strict=True)]

    def body(carries: Sequence[Array], given: Sequence[Any]) -> list[Array]:
        made = run.run(asked["body_jaxpr"], [*map(_within, consts, given), *state(carries)], of_body_plan)
        return _like(run, made, axes, step.claim_behind)

    def test(carries: Sequence[Array]) -> Array:
        given = [*map(_alike, test_consts, [p.x for p in test_consts]), *state(carries)]
        (found,) = run.run(asked["cond_jaxpr"], given, of_test_plan)
        return run.place(found, (), step.claim_behind).x

    start, given = _like(run, carry, axes, step.claim), [part.x for part in consts]
    if consts:
        jax.make_jaxpr(body)(start, given)  # tells what a turn makes of what it closes over
    _before(run, consts, step.claim_behind)
    last = lax.while_loop(test, lambda carries: body(carries, [part.x for part in consts]), start)
    return state(last)


def _cond(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    index, *given = [run.force(part, step.claim) for part in parts]

    def branch(jaxpr: Any, plan: Plan) -> Callable[..., list[Array]]:
        def body(*xs: Array) -> list[Array]:
            made = [run.force(p, step.claim_behind) for p in run.run(jaxpr, list(map(_alike, given, xs)), plan)]
            return _like(run, made, step.results, step.claim_behind)

        return body

    xs, by_platform = [part.x for part in given], eqn.params.get("branches_platforms")
    bodies = [branch(each, plan) for each, plan in zip(eqn.params["branches"], step.inside, strict=True)]
    if by_platform is None:
        outs = lax.switch(run.place(index, (), step.claim).x, bodies, *xs)
    else:  # of the others no program may be made here
        named = {name: body for names, body in zip(by_platform, bodies, strict=True) for name in names or ["default"]}
        outs = lax.platform_dependent(*xs, **named)
    return [Part(tuple(v.aval.shape), a, x) for v, a, x in zip(eqn.outvars, step.results, outs, strict=True)]


def alone(eqn: Any) -> Callable[..., list[Any]]:
    """The function on global arrays that one equation is."""
    jaxpr = part_of(bare(called(eqn)), [eqn], variables(eqn.invars), eqn.outvars)
    return lambda *xs: jax_core.eval_jaxpr(jaxpr, [], *xs)


def _described(parts: Sequence[Part]) -> list[Any]:
    return [jax.ShapeDtypeStruct(part.shape, part.x.dtype) for part in parts]


def _own_call(
    run: Run, eqn: Eqn, parts: Sequence[Part], step: Step
) -> tuple[list[Part], list[Part], Callable[..., list[Array]]]:
    """The operands of a function with a derivative of its own, those that are no literals; what it runs on them, and where
    that leaves its results."""
    pairs = zip(parts, eqn.invars, strict=True)
    parts = [run.force(part, step.claim) for part, atom in pairs if isinstance(atom, Var)]
    found = list[Part]()

    def call(*xs: Array) -> list[Array]:
        it = iter(list(map(_alike, parts, xs)))
        args = [next(it) if isinstance(a, Var) else run.literal(a) for a in eqn.invars]
        found[:] = [run.force(part, step.claim_behind) for part in run.run(called(eqn), args, step.inside[0])]
        return [part.x for part in found]

    return parts, found, call


def _custom_jvp(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    """The derivative is the function's own, run on parts as well."""
    if step.how != TANGENTS:
        return _custom_vjp(run, eqn, parts, step)
    parts, found, own = _own_call(run, eqn, parts, step)
    whole_call, given, count, claim = alone(eqn), _described(parts), len(eqn.outvars), step.claim

    def both(*xs: Any) -> Any:
        primals = list(xs[: len(parts)])
        out, out_t = jax.jvp(whole_call, primals, padded(xs[len(parts) :], primals))
        return [*out, *smooth(out_t)]

    call = jax.custom_jvp(own)

    @call.defjvp
    def _rule(primals: Any, tangents: Any) -> Any:
        some = [Part(part.shape, part.axes, t) for part, t in zip(parts, tangents, strict=True) if is_smooth(part.x)]
        jaxpr = traced_whole(both, [*given, *smooth(given)])
        results = run.planned(jaxpr, [*map(_alike, parts, primals), *some], claim)
        found[:] = outs = [run.force(part, claim) for part in results[:count]]
        xs = [part.x for part in outs]
        return xs, padded(_like(run, results[count:], [p.axes for p in outs if is_smooth(p.x)], claim), xs)

    return _results(call, parts, found)


def _custom_vjp(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    """The two halves of the function's own derivative, each run on parts."""
    parts, found, own = _own_call(run, eqn, parts, step)
    for part in parts:
        if part.asked is not None:
            part.asked.add(frozenset())  # its gradient is whole: bwd sums it
    whole_call, given, kept, claim = alone(eqn), _described(parts), list[Part](), step.claim
    tree: Any = None

    def half(*xs: Any) -> Any:
        nonlocal tree
        outs, back = jax.vjp(whole_call, *xs)
        residuals, tree = jax.tree.flatten(back)
        return [*outs, *residuals]

    call = jax.custom_vjp(own)

    def fwd(*xs: Array) -> Any:
        made = run.planned(traced_whole(half, given), list(map(_alike, parts, xs)), claim)
        results = [run.force(part, claim) for part in made]
        found[:], kept[:] = results[: len(eqn.outvars)], results[len(eqn.outvars) :]
        return [part.x for part in found], [part.x for part in kept]

    def bwd(residuals: Any, cotangents: Any) -> Any:
        ends, residual_parts = _described(found), list(map(_alike, kept, residuals))

        def other_half(*xs: Any) -> Any:
            return smooth(jax.tree.unflatten(tree, xs[: len(kept)])(padded(xs[len(kept) :], ends)))

        some = [Part(p.shape, p.axes, ct) for p, ct in zip(found, cotangents, strict=True) if is_smooth(p.x)]
        jaxpr = traced_whole(other_half, [*_described(kept), *_described(some)])
        after = iter(run.planned(jaxpr, [*residual_parts, *some], claim))
        return tuple(run.place(next(after), part.axes, claim).x if is_smooth(part.x) else None for part in parts)

    call.defvjp(fwd, bwd)
    return _results(call, parts, found)


def _dropped(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    return list(parts)


def own_devices(line: str, name: str) -> JShardError:
    """Return the error for a call of `name`, which is not for whole arrays."""
    return JShardError(
        f"{line} calls {name}, which has collectives and devices of its own",
        hint="give the model its path without it, or write axis_types: auto under jshard, to leave the program to XLA",
    )


OWN_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
PLANS: dict[str, PlanRule] = {
    **dict.fromkeys(("checkpoint", "remat2", "remat", "regathered"), _plan_anew),
    **dict.fromkeys(("sharding_constraint", "reshard", "mesh_cast"), _plan_dropped),
    **dict.fromkeys(("shard_map", "pallas_call"), _plan_refused),
    **dict.fromkeys(OWN_DERIVATIVES, _plan_own_derivative),
    "cond": _plan_cond, "scan": _plan_scan, "while": _plan_while,
}  # fmt: skip
RULES: dict[str, Rule] = {
    **dict.fromkeys(("checkpoint", "remat2", "remat"), _checkpoint),
    **dict.fromkeys(("sharding_constraint", "reshard", "mesh_cast"), _dropped),
    "cond": _cond, "custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp,
    "custom_vjp_call_jaxpr": _custom_vjp, "regathered": _regathered, "scan": _scan, "while": _while,
}  # fmt: skip
