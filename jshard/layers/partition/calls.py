"""Rules of primitives with programs inside: branches, checkpoints, functions with their own derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core as jax_core
from jax import Array, lax
from jax.extend.core import Var

from jshard.errors import JShardError
from jshard.layers.partition.part import Here, Part, filled, here_of
from jshard.layers.partition.plan import Plan, Step
from jshard.layers.partition.planner import Planned, Planner, PlanRule, number, traced_whole
from jshard.layers.partition.prefetch import is_smooth, padded, smooth
from jshard.layers.partition.run import Rule, Run
from jshard.layers.partition.value import Value, values_of
from jshard.layers.remat import recomputed
from jshard.layouts.primitives import ELEMENTWISE
from jshard.programs.jaxprs import CALLS, Eqn, OpenJaxpr, Tree, bare, called, equations, part_of, variables
from jshard.programs.provenance import source_of

TANGENTS = "tangents"

# -- plans --


def _plan_anew(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    made, inside = plan.program(eqn.params["jaxpr"], [plan.array(value).inside() for value in values])
    with plan.ending(inside):
        return [plan.force(value).renewed() for value in made], Step(inside=(inside,))


def _plan_cond(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """All branches leave their results as the first does."""
    index, *given = [plan.force(value) for value in values]
    plans, axes = [], None
    for branch in eqn.params["branches"]:
        made, inside = plan.program(branch, [value.renewed() for value in given])
        with plan.ending(inside):
            made = [plan.force(value) for value in made]
            axes = axes or [value.axes for value in made]
            for value, a in zip(made, axes, strict=True):
                plan.need(value, a)
        plans.append(inside)
    if eqn.params.get("branches_platforms") is None:
        plan.need(index, ())
    return values_of(eqn.outvars, axes or ()), Step(inside=tuple(plans))


def _plan_own_derivative(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    """Plan the function itself. Its derivative is planned when JAX asks for it."""
    shapes = {(value.shape, value.axes) for value in values if value.shape}
    primitives = {each.primitive.name for each in equations(called(eqn))}
    by_tangents = not primitives - ELEMENTWISE - CALLS.keys() and len(shapes) <= 1
    pairs = list(zip(values, eqn.invars, strict=True))
    values = [plan.force(value).renewed() if isinstance(atom, Var) else value for value, atom in pairs]
    made, inside = plan.program(called(eqn), values)
    how = TANGENTS if by_tangents else ""  # what moves an operand can't be transposed, as a rule for tangents is
    with plan.ending(inside):
        return [plan.force(value).renewed() for value in made], Step(how, inside=(inside,))


def _plan_refused(plan: Planner, eqn: Eqn, values: list[Value]) -> Planned:
    if plan.is_first:
        return [number(variable.aval) for variable in eqn.outvars], Step()
    raise own_devices(source_of(eqn), eqn.primitive.name)


# -- runs --


def _checkpoint(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    how = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
    return _anew(run, eqn, parts, step, lambda body: jax.checkpoint(body, **how))


def _regathered(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    return _anew(run, eqn, parts, step, lambda body: recomputed(body, "", regather=True))


def _anew(run: Run, eqn: Eqn, parts: list[Part], step: Step, wrapped: Callable[[Any], Any]) -> Sequence[Part]:
    arrays, found = [run.array(part, step.claim) for part in parts], list[Here]()

    def body(*xs: Array) -> list[Array]:
        inner = [part.inside(x=x) for part, x in zip(arrays, xs, strict=True)]
        made = run.run(eqn.params["jaxpr"], inner, step.inside[0])
        found[:] = [run.force(part, step.claim_behind) for part in made]
        return [part.x for part in found]

    return _results(wrapped(body), arrays, found)


def _results(body: Callable[..., list[Array]], parts: Sequence[Here], found: list[Here]) -> Sequence[Part]:
    """Run a body and record in `found` the layout of its results."""
    outs = body(*(part.x for part in parts))
    return filled(found, outs)


def _cond(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    index, *given = [run.force(part, step.claim) for part in parts]

    def branch(jaxpr: OpenJaxpr, plan: Plan) -> Callable[..., list[Array]]:
        def body(*xs: Array) -> list[Array]:
            made = [run.force(part, step.claim_behind) for part in run.run(jaxpr, filled(given, xs), plan)]
            return run.lying(made, step.results, step.claim_behind)

        return body

    xs, by_platform = [part.x for part in given], eqn.params.get("branches_platforms")
    bodies = [branch(each, plan) for each, plan in zip(eqn.params["branches"], step.inside, strict=True)]
    if by_platform is None:
        outs = lax.switch(run.place(index, (), step.claim).x, bodies, *xs)
    else:  # of the others no program may be made here
        named = {name: body for names, body in zip(by_platform, bodies, strict=True) for name in names or ["default"]}
        outs = lax.platform_dependent(*xs, **named)
    return here_of(eqn.outvars, step.results, outs)


def alone(eqn: Eqn) -> Callable[..., list[Any]]:
    """Return the equation as a function on global arrays."""
    jaxpr = part_of(bare(called(eqn)), [eqn], variables(eqn.invars), eqn.outvars)
    return lambda *xs: jax_core.eval_jaxpr(jaxpr, [], *xs)


def _described(parts: Sequence[Here]) -> list[Any]:
    return [jax.ShapeDtypeStruct(part.shape, part.x.dtype) for part in parts]


def _own_call(
    run: Run, eqn: Eqn, parts: Sequence[Part], step: Step
) -> tuple[list[Here], list[Here], Callable[..., list[Array]]]:
    """Return the non-literal operands of a function with its own derivative, its run on them, and the layout of the
    results."""
    pairs = zip(parts, eqn.invars, strict=True)
    own = [run.force(part, step.claim) for part, atom in pairs if isinstance(atom, Var)]
    found = list[Here]()

    def call(*xs: Array) -> list[Array]:
        it = iter(filled(own, xs))
        args = [next(it) if isinstance(a, Var) else run.constant(a.val, a.aval.dtype) for a in eqn.invars]
        found[:] = [run.force(part, step.claim_behind) for part in run.run(called(eqn), args, step.inside[0])]
        return [part.x for part in found]

    return own, found, call


def _custom_jvp(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    """The derivative is the function's own, run on parts as well."""
    if step.how != TANGENTS:
        return _custom_vjp(run, eqn, parts, step)
    arrays, found, own = _own_call(run, eqn, parts, step)
    whole_call, given, count, claim = alone(eqn), _described(arrays), len(eqn.outvars), step.claim

    def both(*xs: Tree) -> Any:
        primals = list(xs[: len(arrays)])
        out, out_t = jax.jvp(whole_call, primals, padded(xs[len(arrays) :], primals))
        return [*out, *smooth(out_t)]

    call = jax.custom_jvp(own)

    @call.defjvp
    def _rule(primals: Tree, tangents: Tree) -> Any:
        some = [Here(part.shape, part.axes, t) for part, t in zip(arrays, tangents, strict=True) if is_smooth(part.x)]
        jaxpr = traced_whole(both, [*given, *smooth(given)])
        results = run.planned(jaxpr, [*filled(arrays, primals), *some], claim)
        found[:] = outs = [run.force(part, claim) for part in results[:count]]
        xs = [part.x for part in outs]
        return xs, padded(run.lying(results[count:], [p.axes for p in outs if is_smooth(p.x)], claim), xs)

    return _results(call, arrays, found)


def _custom_vjp(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> Sequence[Part]:
    """The two halves of the function's own derivative, each run on parts."""
    arrays, found, own = _own_call(run, eqn, parts, step)
    for part in arrays:
        if part.uses.asked is not None:
            part.uses.asked.add(frozenset())  # its gradient is whole: bwd sums it
    whole_call, given, kept, claim = alone(eqn), _described(arrays), list[Here](), step.claim
    tree: Any = None

    def half(*xs: Tree) -> Any:
        nonlocal tree
        outs, back = jax.vjp(whole_call, *xs)
        residuals, tree = jax.tree.flatten(back)
        return [*outs, *residuals]

    call = jax.custom_vjp(own)

    def fwd(*xs: Array) -> Any:
        made = run.planned(traced_whole(half, given), filled(arrays, xs), claim)
        results = [run.force(part, claim) for part in made]
        found[:], kept[:] = results[: len(eqn.outvars)], results[len(eqn.outvars) :]
        return [part.x for part in found], [part.x for part in kept]

    def bwd(residuals: Any, cotangents: Tree) -> Any:
        ends, residual_parts = _described(found), filled(kept, residuals)

        def other_half(*xs: Tree) -> Any:
            return smooth(jax.tree.unflatten(tree, xs[: len(kept)])(padded(xs[len(kept) :], ends)))

        some = [Here(p.shape, p.axes, ct) for p, ct in zip(found, cotangents, strict=True) if is_smooth(p.x)]
        jaxpr = traced_whole(other_half, [*_described(kept), *_described(some)])
        after = iter(run.planned(jaxpr, [*residual_parts, *some], claim))
        return tuple(run.place(next(after), part.axes, claim).x if is_smooth(part.x) else None for part in arrays)

    call.defvjp(fwd, bwd)
    return _results(call, arrays, found)


def own_devices(line: str, name: str) -> JShardError:
    """Return the error for `name`, a call on devices of its own and not on whole arrays."""
    return JShardError(
        f"{line} calls {name}, which has collectives and devices of its own",
        hint="give the model its path without it, or write axis_types: auto under jshard, to leave the program to XLA",
    )


# of the model's own: the configuration says how arrays lie
PLACEMENTS = ("sharding_constraint", "reshard", "mesh_cast")
OWN_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
PLANS: dict[str, PlanRule] = {
    **dict.fromkeys(("checkpoint", "remat2", "remat", "regathered"), _plan_anew),
    **dict.fromkeys(PLACEMENTS, lambda plan, eqn, values: ([*values], Step())),
    **dict.fromkeys(("shard_map", "pallas_call"), _plan_refused),
    **dict.fromkeys(OWN_DERIVATIVES, _plan_own_derivative),
    "cond": _plan_cond,
}  # fmt: skip
RULES: dict[str, Rule] = {
    **dict.fromkeys(("checkpoint", "remat2", "remat"), _checkpoint),
    **dict.fromkeys(PLACEMENTS, lambda run, eqn, parts, step: parts),
    "cond": _cond, "custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp,
    "custom_vjp_call_jaxpr": _custom_vjp, "regathered": _regathered,
}  # fmt: skip
