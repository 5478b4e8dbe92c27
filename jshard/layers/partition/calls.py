"""Rules of what holds a program of its own: loops, branches, checkpoints, functions with a derivative of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Var

from jshard.errors import JShardError
from jshard.kernels.invariant_cast import set_varying
from jshard.layers.partition.engine import Partition, Rule, SomeLayers, traced_whole
from jshard.layers.partition.part import Part, vary
from jshard.layers.partition.prefetch import is_smooth, padded, scan_ahead, smooth
from jshard.layers.partition.readers import is_one_turn
from jshard.layers.partition.stages import in_turn
from jshard.layers.partition.ticks import zeros_like_result
from jshard.layers.remat import CHUNK, recomputed
from jshard.layouts.primitives import ELEMENTWISE
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import CALLS, CHECKPOINTS, bare, called, equations, holds, part_of, scanned, variables
from jshard.programs.provenance import scope, source_of


def _alike(part: Part, x: Any) -> Part:
    """The same place for another array: in another trace nothing may be remembered of this one."""
    return part.renewed(x, make=None)


def _within(part: Part, x: Any) -> Part:
    """The same place in a loop or a checkpoint, which may close over what has been made of this one."""
    inside = dataclasses.replace(_alike(part, x), cache=dict(part.cache), gathered=dict(part.gathered))
    inside.casts = {key: _within(each, each.x) for key, each in part.casts.items() if each.make is None}
    part.within.append(inside)
    return inside


def _before(run: Partition, parts: Sequence[Part]) -> None:
    """Gather, cut and mark what each turn of a loop would, once and before it: else each turn has a collective, or one in its
    gradient."""
    for part in parts:
        part.settle()
        with contextlib.nullcontext() if part.signal is None else scope(claim=part.signal.name):
            for each in _inside(part):
                for axes, names in each.cache:
                    if isinstance(axes, tuple):  # else what was made of it is remembered
                        run.local(part, axes, names)
            for key in dict.fromkeys(key for each in _inside(part) for key in each.casts):
                cast = part.follow([key])
                cast.within = [each.casts[key] for each in _inside(part) if key in each.casts]
                _before(run, [cast])


def _inside(part: Part) -> Iterator[Part]:
    for each in part.within:
        yield each
        yield from _inside(each)


def _made(run: Partition, part: Part) -> Part:
    """What can go into another trace: an array. A stored parameter stays at rest, and is gathered where it is used."""
    return part if part.make is None else run.force(part)


def _like(run: Partition, parts: Sequence[Part], axes: Sequence[Axes]) -> list[Array]:
    return [run.place(part, each).x for part, each in zip(parts, axes, strict=True)]


def _checkpoint(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    how = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
    return _anew(run, eqn, parts, lambda body: jax.checkpoint(body, **how))


def _regathered(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    return _anew(run, eqn, parts, lambda body: recomputed(body, "", regather=True))


def _anew(run: Partition, eqn: Any, parts: list[Part], wrapped: Callable[[Any], Any]) -> list[Part]:
    parts, found = [_made(run, part) for part in parts], list[Part]()

    def body(*xs: Array) -> list[Array]:
        found[:] = map(run.force, run.run(eqn.params["jaxpr"], list(map(_within, parts, xs))))
        return [part.x for part in found]

    return _results(wrapped(body), parts, found)


def _results(body: Callable[..., list[Array]], parts: Sequence[Part], found: list[Part]) -> list[Part]:
    """Run a body that leaves in `found` how its results are split."""
    outs = body(*(part.x for part in parts))
    return [_alike(part, x) for part, x in zip(found, outs, strict=True)]


def _scan(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """What is carried is split as it goes in, or further as the loop leaves it; the axis that one goes along is whole, or split
    over the stages of a pipeline, which run one after the other."""
    asked, jaxpr = eqn.params, eqn.params["jaxpr"]
    count, carried = scanned(eqn)
    parts = [_made(run, part) for part in parts]
    consts, carry, over = parts[:count], parts[count : count + carried], parts[count + carried :]
    if is_one_turn(eqn) and not any(part.signal for part in over):
        return _one_turn(run, eqn, [*consts, *carry], over)
    lead = () if run.stage is None or asked["reverse"] else (run.stage.mesh_axis,)
    lead = lead if any(part.axes[0] == lead for part in over) else ()
    over = [_led_by(run, part, lead) for part in over]
    if lead:  # else gradients would be summed over stages where one stage is at work
        parts[:count] = [_alike(part, vary(part.x, frozenset(lead))) for part in parts[:count]]
    for part in over:
        if part.is_undecided and part.parameter is not None and part.of[0] is not None:
            part.parameter.roles[part.of[0]] = "scan"
    made: list[Part] = []
    inner: list[Part] = []

    def step(
        axes: list[Axes], carries: Sequence[Array], each: Sequence[Any], consts: Sequence[Array]
    ) -> tuple[Any, Any]:
        inner[:] = map(_within, parts[:count], consts)
        inner.extend(Part(part.shape, a, x) for part, a, x in zip(carry, axes, carries, strict=True))
        inner.extend(x if isinstance(x, Part) else _one_of(part, x) for part, x in zip(over, each, strict=True))
        made[:] = run.run(jaxpr, inner)
        made[carried:] = map(run.force, made[carried:])
        return _like(run, made[:carried], axes), [part.x for part in made[carried:]]

    axes = [part.axes for part in map(run.force, carry)]
    axes, types = _settled(axes, lambda axes: _traced(
        lambda *xs: step(axes, xs[count : count + carried], xs[count + carried :], xs[:count]),
        [*(p.x for p in consts), *_like(run, carry, axes), *(p.x[0] for p in over)], made, carried))  # fmt: skip
    consts = parts[:count]
    _before(run, consts)
    layer = lambda carries, each: step(axes, carries, each, [part.x for part in consts])
    if run.only_axes and types is not None and not lead:
        layer = lambda carries, each: ([*map(_of_type, types[:carried])], [*map(_of_type, types[carried:])])
    length = asked["length"] // run.ways(lead)

    def layers(carries: list[Array]) -> tuple[list[Array], list[Array]]:
        if any(part.prefetches for part in over):
            return _ahead(eqn, length, over, inner[count + carried :], layer, carries)
        remat, regather = _remat_of(over), not holds(jaxpr, CHECKPOINTS) and _keeps_no_parameter(over)
        one = recomputed(layer, remat, regather=regather, in_scan=asked["unroll"] < length)
        how = {"length": length, "reverse": asked["reverse"], "unroll": asked["unroll"]}
        xs = [part.x for part in over]
        if run.some_layers is None or run.some_layers.loop is not eqn:
            return lax.scan(one, carries, xs, **how)
        return _first_of(one, run.some_layers, carries, xs, **how)

    start = [vary(x, frozenset(lead)) for x in _like(run, carry, axes)]
    if lead and run.stage is not None:
        last, ys = in_turn(layers, start, *lead, **run.stage.by)
        with scope(**run.stage.by):
            last = [run.reduce(x, lead, "sum") for x in last]
    else:
        last, ys = layers(start)
    results = [Part(part.shape, a, x) for part, a, x in zip(carry, axes, last, strict=True)]
    shapes = [tuple(variable.aval.shape) for variable in eqn.outvars[carried:]]
    return results + [Part(s, (lead, *p.axes), y) for s, p, y in zip(shapes, made[carried:], ys, strict=True)]


def _one_turn(run: Partition, eqn: Any, given: Sequence[Part], over: Sequence[Part]) -> list[Part]:
    """Run a loop of one turn: what it closes over is read as anywhere else."""
    each = [_one_of(part, lax.squeeze(part.x, (0,))) for part in (_led_by(run, part, ()) for part in over)]
    made = run.run(eqn.params["jaxpr"], [*given, *each])
    _, carried = scanned(eqn)
    shapes = [tuple(variable.aval.shape) for variable in eqn.outvars[carried:]]
    left = zip(shapes, map(run.force, made[carried:]), strict=True)
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


def _keeps_no_parameter(over: Sequence[Part]) -> bool:
    """Whether the backward pass marks the layers' parameters again, as it gathers them: kept, they would be stacked anew."""
    signals = [part.signal for part in over if part.signal is not None]
    return any(part.regathers for part in over) or (bool(signals) and not any(each.store_keep for each in signals))


def _ahead(
    eqn: Any, length: int, over: Sequence[Part], seen: Sequence[Part], layer: Callable[..., Any], carry: list[Array]
) -> tuple[list[Array], list[Array]]:
    """Run a loop whose layers are gathered one ahead. `seen` are the parts of a layer that has been traced: what it gathers."""
    ahead = {at: list(seen[at].gathers()) for at, part in enumerate(over) if part.prefetches}
    others = [at for at in range(len(over)) if at not in ahead]
    signal = over[next(iter(ahead))].signal
    remat = _remat_of(over)
    if eqn.params["unroll"] >= 2 and signal is not None:
        raise JShardError(
            f"{signal} says store.prefetch ({signal.at('store.prefetch')}) for layers of which {eqn.params['unroll']} are one "
            f"turn of their loop ({source_of(eqn)})",
            hint="remove `unroll`, or store.prefetch: one layer is gathered ahead",
        )
    if holds(eqn.params["jaxpr"], CHECKPOINTS) and signal is not None:
        raise JShardError(
            f"{signal} says store.prefetch ({signal.at('store.prefetch')}) for layers that say themselves what is computed "
            f"anew ({source_of(eqn)})",
            hint="remove one: of layers that are gathered ahead their input is kept, and what `remat` says",
        )

    def gather(at: int, path: Any, steps: Any, x: Any) -> Any:
        part = _one_of(over[at], x)
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
            parts[at] = _one_of(over[at], jax.ShapeDtypeStruct((), over[at].x.dtype))
            for path, steps in uses:
                parts[at].follow(path).gathered[steps] = next(it)
        return layer(carries, [parts[at] for at in range(len(over))])

    shards, each = [over[at].x for at in ahead], [over[at].x for at in others]
    return scan_ahead(
        one, gathers, carry, shards, each, length=length, reverse=eqn.params["reverse"],
        travels=any(over[at].rest is not None for at in ahead), remat="" if remat == CHUNK else remat,
    )  # fmt: skip


def _remat_of(over: Sequence[Part]) -> str | tuple[str, ...]:
    """What the signals of the layers' parameters say is computed anew, which has to be one thing."""
    said = {part.signal.remat: part.signal for part in over if part.signal is not None and part.signal.remat}
    if len(said) > 1:
        one, other, *_ = said.values()
        raise JShardError(
            f"{one} and {other} ({other.at('remat')}) say different remat for the layers of one loop",
            hint="give both the same: the layers of a loop are computed anew as a whole",
        )
    return next(iter(said), "")


Types = Sequence[Any]  # of what the body of a loop makes


def _traced(body: Callable[..., Any], xs: Sequence[Any], made: list[Part], carried: int) -> tuple[list[Axes], Types]:
    """How the results that are carried are split when the body runs once; nothing of this trace stays."""
    types = jax.make_jaxpr(body)(*xs).out_avals
    return [part.axes for part in made[:carried]], types


def _of_type(aval: Any) -> Array:
    return set_varying(jnp.zeros(aval.shape, aval.dtype), aval.mat.varying)


def _settled(
    axes: list[Axes], once: Callable[[list[Axes]], tuple[list[Axes], Types]]
) -> tuple[list[Axes], Types | None]:
    """Split what is carried as the body leaves it, where that is split further; until it stays so, and has these types."""
    for _ in range(3):
        after, types = once(axes)
        further = [_finer(old, new) for old, new in zip(axes, after, strict=True)]
        if not any(further):
            return axes, types
        axes = [new if is_finer else old for old, new, is_finer in zip(axes, after, further, strict=True)]
    return axes, None


def _finer(old: Axes, new: Axes) -> bool:
    return old != new and all(b[: len(a)] == a for a, b in zip(old, new, strict=True))


def _led_by(run: Partition, part: Part, lead: tuple[str, ...]) -> Part:
    """The axis that a scan goes along is whole on every device, or split over stages, of a stored parameter too."""
    lies = part.axes if part.rest is None else part.rest
    return part if lies[0] == lead else run.place(part, (lead, *part.axes[1:]))


def _one_of(part: Part, x: Any) -> Part:
    """One of those that a scan goes along: a layer of stacked parameters is a parameter."""
    rest = part.axes if part.rest is None and part.prefetches else part.rest
    rest = None if rest is None else rest[1:]
    return part.renewed(x, shape=part.shape[1:], axes=part.axes[1:], rest=rest, of=part.of[1:])


def _while(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    asked, parts = eqn.params, [_made(run, part) for part in parts]
    of_test, of_body = asked["cond_nconsts"], asked["body_nconsts"]
    test_consts, consts, carry = parts[:of_test], parts[of_test : of_test + of_body], parts[of_test + of_body :]
    made: list[Part] = []

    def step(axes: list[Axes], carries: Sequence[Array], given: Sequence[Any]) -> list[Array]:
        state = [Part(part.shape, a, x) for part, a, x in zip(carry, axes, carries, strict=True)]
        made[:] = run.run(asked["body_jaxpr"], [*map(_within, consts, given), *state])
        return _like(run, made, axes)

    def test(carries: Sequence[Array]) -> Array:
        state = [Part(part.shape, a, x) for part, a, x in zip(carry, axes, carries, strict=True)]
        (found,) = run.run(asked["cond_jaxpr"], [*map(_alike, test_consts, [p.x for p in test_consts]), *state])
        return run.place(found, ()).x

    axes = [part.axes for part in map(run.force, carry)]
    axes, _ = _settled(axes, lambda axes: _traced(
        lambda *xs: step(axes, xs[len(consts) :], xs[: len(consts)]),
        [*(p.x for p in consts), *_like(run, carry, axes)], made, len(carry)))  # fmt: skip
    _before(run, consts)
    last = lax.while_loop(test, lambda c: step(axes, c, [p.x for p in consts]), _like(run, carry, axes))
    return [Part(part.shape, a, x) for part, a, x in zip(carry, axes, last, strict=True)]


def _cond(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """All branches leave their results as the first does."""
    index, *given = [run.force(part) for part in parts]
    made: list[Part] = []

    def branch(jaxpr: Any, axes: list[Axes] | None) -> Callable[..., list[Array]]:
        def body(*xs: Array) -> list[Array]:
            made[:] = map(run.force, run.run(jaxpr, list(map(_alike, given, xs))))
            return [part.x for part in made] if axes is None else _like(run, made, axes)

        return body

    branches, xs = eqn.params["branches"], [part.x for part in given]
    axes, _ = _traced(branch(branches[0], None), xs, made, len(eqn.outvars))
    bodies, by_platform = [branch(each, axes) for each in branches], eqn.params.get("branches_platforms")
    if by_platform is None:
        outs = lax.switch(run.place(index, ()).x, bodies, *xs)
    else:  # of the others no program may be made here
        named = {name: body for names, body in zip(by_platform, bodies, strict=True) for name in names or ["default"]}
        outs = lax.platform_dependent(*xs, **named)
    return [Part(tuple(v.aval.shape), a, x) for v, a, x in zip(eqn.outvars, axes, outs, strict=True)]


def alone(eqn: Any) -> Callable[..., list[Any]]:
    """The function on global arrays that one equation is."""
    jaxpr = part_of(bare(called(eqn)), [eqn], variables(eqn.invars), eqn.outvars)
    return lambda *xs: jax_core.eval_jaxpr(jaxpr, [], *xs)


def _described(parts: Sequence[Part]) -> list[Any]:
    return [jax.ShapeDtypeStruct(part.shape, part.x.dtype) for part in parts]


def _own_call(
    run: Partition, eqn: Any, parts: Sequence[Part]
) -> tuple[list[Part], list[Part], Callable[..., list[Array]]]:
    """The operands of a function with a derivative of its own, those that are no literals; what it runs on them, and where
    that leaves its results."""
    parts = [run.force(part) for part, atom in zip(parts, eqn.invars, strict=True) if isinstance(atom, Var)]
    found = list[Part]()

    def call(*xs: Array) -> list[Array]:
        it = iter(list(map(_alike, parts, xs)))
        args = [next(it) if isinstance(a, Var) else run.literal(a) for a in eqn.invars]
        found[:] = map(run.force, run.run(called(eqn), args))
        return [part.x for part in found]

    return parts, found, call


@contextlib.contextmanager
def _near(run: Partition, claim: Any) -> Iterator[None]:
    """JAX runs the derivative of a function when the program has been run: let the nearest claim be that of the function."""
    before, run.nearest = run.nearest, claim
    try:
        yield
    finally:
        run.nearest = before


def _custom_jvp(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """The derivative is the function's own, run on parts as well."""
    primitives = {each.primitive.name for each in equations(called(eqn))}
    if primitives - ELEMENTWISE - CALLS.keys() or len({(part.shape, part.axes) for part in parts if part.shape}) > 1:
        return _custom_vjp(run, eqn, parts)  # what moves an operand can't be transposed, as a rule for tangents is
    parts, found, own = _own_call(run, eqn, parts)
    whole_call, given, count = alone(eqn), _described(parts), len(eqn.outvars)

    def both(*xs: Any) -> Any:
        primals = list(xs[: len(parts)])
        out, out_t = jax.jvp(whole_call, primals, padded(xs[len(parts) :], primals))
        return [*out, *smooth(out_t)]

    call = jax.custom_jvp(own)

    @call.defjvp
    @_near(run, run.nearest)
    def _rule(primals: Any, tangents: Any) -> Any:
        some = [Part(part.shape, part.axes, t) for part, t in zip(parts, tangents, strict=True) if is_smooth(part.x)]
        jaxpr = traced_whole(both, [*given, *smooth(given)])
        results = run.run(jaxpr, [*map(_alike, parts, primals), *some])
        found[:] = outs = [run.force(part) for part in results[:count]]
        xs = [part.x for part in outs]
        return xs, padded(_like(run, results[count:], [part.axes for part in outs if is_smooth(part.x)]), xs)

    return _results(call, parts, found)


def _custom_vjp(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """The two halves of the function's own derivative, each run on parts."""
    parts, found, own = _own_call(run, eqn, parts)
    for part in parts:
        if part.asked is not None:
            part.asked.add(frozenset())  # its gradient is whole: bwd sums it
    whole_call, given, kept = alone(eqn), _described(parts), list[Part]()
    tree: Any = None

    def half(*xs: Any) -> Any:
        nonlocal tree
        outs, back = jax.vjp(whole_call, *xs)
        residuals, tree = jax.tree.flatten(back)
        return [*outs, *residuals]

    call = jax.custom_vjp(own)

    def fwd(*xs: Array) -> Any:
        results = [run.force(part) for part in run.run(traced_whole(half, given), list(map(_alike, parts, xs)))]
        found[:], kept[:] = results[: len(eqn.outvars)], results[len(eqn.outvars) :]
        return [part.x for part in found], [part.x for part in kept]

    def bwd(residuals: Any, cotangents: Any) -> Any:
        ends, residual_parts = _described(found), list(map(_alike, kept, residuals))

        def other_half(*xs: Any) -> Any:
            return smooth(jax.tree.unflatten(tree, xs[: len(kept)])(padded(xs[len(kept) :], ends)))

        some = [Part(p.shape, p.axes, ct) for p, ct in zip(found, cotangents, strict=True) if is_smooth(p.x)]
        jaxpr = traced_whole(other_half, [*_described(kept), *_described(some)])
        after = iter(run.run(jaxpr, [*residual_parts, *some]))
        return tuple(run.place(next(after), part.axes).x if is_smooth(part.x) else None for part in parts)

    near = _near(run, run.nearest)
    call.defvjp(near(fwd), near(bwd))
    return _results(call, parts, found)


def _dropped(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """A placement in the model's own code: the configuration says how arrays lie."""
    return list(parts)


def _refused(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    if run.only_looks:
        return run.skipped(eqn)
    raise own_devices(source_of(eqn), eqn.primitive.name)


def own_devices(line: str, name: str) -> JShardError:
    """Return the error for a call of `name`, which is not for whole arrays."""
    return JShardError(
        f"{line} calls {name}, which has collectives and devices of its own",
        hint="give the model its path without it, or write axis_types: auto under jshard, to leave the program to XLA",
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys(("checkpoint", "remat2", "remat"), _checkpoint),
    **dict.fromkeys(("sharding_constraint", "reshard", "mesh_cast"), _dropped),
    **dict.fromkeys(("shard_map", "pallas_call"), _refused),
    "cond": _cond, "custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp,
    "custom_vjp_call_jaxpr": _custom_vjp, "regathered": _regathered, "scan": _scan, "while": _while,
}  # fmt: skip
