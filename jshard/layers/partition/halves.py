"""A backward program in two halves: the gradients that others wait for, and those that nobody does, of weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
from jax import Array, lax
from jax._src import source_info_util
from jax.extend.core import Var

from jshard.layers.partition.part import vary
from jshard.programs import jaxprs
from jshard.programs.jaxprs import CHECKPOINTS, Eqn, OpenJaxpr, Tree, bare, called, carried_on, dependent, is_in

Some = tuple[bool, ...]  # of the inputs or results of a jaxpr


@dataclasses.dataclass(frozen=True)
class Place:
    """A place of a buffer `[place, ...]`. A loop along the next axis reads and writes each turn's part there: taking
    it out first, or putting it in afterwards, would copy it once more."""

    buffer: Array
    number: Array

    def read(self) -> Array:
        return lax.dynamic_index_in_dim(self.buffer, self.number, keepdims=False)

    def write(self, x: Array) -> Array:
        return lax.dynamic_update_index_in_dim(self.buffer, x, self.number, 0)

    def read_turn(self, turn: Array) -> Array:
        x = lax.dynamic_slice(self.buffer, self._at(turn), (1, 1, *self.buffer.shape[2:]))
        return x.reshape(x.shape[2:])

    def write_turn(self, turn: Array, x: Array) -> Array:
        return lax.dynamic_update_slice(self.buffer, x[None, None], self._at(turn))

    def _at(self, turn: Array) -> list[Any]:
        return [self.number, turn, *[0] * (self.buffer.ndim - 2)]


class Halves:
    """A program in two halves: `first(xs)` gives the results in `soon` and the values for the second half;
    `second(xs, left)` gives the results in `late`.

    `made` says which inputs depend on the cotangent. Equations that depend on the cotangent run once. Recomputed
    forward equations run in each half that needs them, and are not kept between the halves. Only the first half has
    values for the inputs numbered `own`. A loop becomes two loops: the values left by a turn go to the same turn.
    Inputs and values left may be a Place each. With `into`, the places of the values left, and `results`, those of
    some results, the halves write there and return the buffer.
    """

    def __init__(self, jaxpr: OpenJaxpr, soon: Some, late: Some, made: Some, own: Sequence[int] = ()):
        self.program, self.jaxpr = jaxpr, bare(jaxpr)
        self.soon, self.late = soon, late
        self.read = jaxprs.read_by(jaxprs.level(jaxpr))
        made_of = dependent(jaxpr, made)
        given = {v for n, v in enumerate(self.jaxpr.invars) if n not in own}
        needed = jaxprs.flow_back(jaxpr, soon, lambda eqn, some: _alone(self.jaxpr, eqn, some)[1], False)
        # the second half has them from the first
        here = {v for v, is_needed in needed.items() if is_needed and v in made_of} - given
        self.steps: dict[int, Any] = {}  # by the `id` of the equation

        def of_second(eqn: Eqn, wanted: list[bool]) -> Some:
            wanted = [is_wanted and v not in here for v, is_wanted in zip(eqn.outvars, wanted, strict=True)]
            are_made = tuple(is_in(v, made_of) for v in eqn.invars)
            step = _halved(self.jaxpr, eqn, tuple(needed[v] for v in eqn.outvars), tuple(wanted), are_made)
            self.steps[id(eqn)] = step
            return step.reads[1]

        wanted = jaxprs.flow_back(jaxpr, late, of_second, False)
        self.left = [v for v in (*self.jaxpr.invars, *jaxprs.makers(jaxpr)) if wanted[v] and v in here]
        self.reads = (
            tuple(needed[v] for v in self.jaxpr.invars),
            tuple(wanted[v] and v not in here for v in self.jaxpr.invars),
        )

    def first(
        self, xs: Sequence[Any], into: Any = None, results: Mapping[int, Place] = MappingProxyType({})
    ) -> tuple[list[Any], Any]:
        known, inside, written = dict[Any, Any](), [], set[Any]()
        places = {self.jaxpr.outvars[n]: place for n, place in results.items()}

        def run(eqn: Eqn, xs: list[Any]) -> list[Any]:
            step = self.steps[id(eqn)]
            stacked = list(enumerate(eqn.outvars))[step.carried :] if isinstance(step, _Loop) else []
            there = {n: places[v] for n, v in stacked if v in places and v not in self.read}
            outs, left = step.first(xs, into and into[1][len(inside)], there)
            written.update(eqn.outvars[n] for n in there)
            inside.append(left)
            return outs

        outs = jaxprs.evaluate(self.program, xs, run, known=known)
        for n, place in results.items():
            outs[n] = outs[n] if self.jaxpr.outvars[n] in written else place.write(_read(outs[n]))
        left = [_read(known[v]) for v in self.left]
        return _chosen(outs, self.soon), (_written(into and into[0], left), inside)

    def second(self, xs: Sequence[Any], left: Tree) -> list[Any]:
        own, inside = left or ([], [None] * len(self.steps))  # of a loop that no first half runs nothing is left
        of_first, inside = dict(zip(self.left, own, strict=True)), iter(inside)

        def run(eqn: Eqn, xs: list[Any]) -> list[Any]:
            outs = self.steps[id(eqn)].second(xs, next(inside))
            return [of_first.get(v) if x is None else x for v, x in zip(eqn.outvars, outs, strict=True)]

        own = [of_first.get(v, x) for v, x in zip(self.jaxpr.invars, xs, strict=True)]
        return _chosen(jaxprs.evaluate(self.program, own, run), self.late)


class _Whole:
    """An equation in a half, or in both if it has results for each."""

    def __init__(self, jaxpr: OpenJaxpr, eqn: Eqn, soon: Some, late: Some):
        self.eqn, self.some = eqn, (soon, late)
        self.programs, self.reads = zip(*(_alone(jaxpr, eqn, some) for some in self.some), strict=True)

    def first(self, xs: Sequence[Any], into: None, results: Tree) -> tuple[list[Any], None]:
        return self._run(0, xs), None

    def second(self, xs: Sequence[Any], left: None) -> list[Any]:
        return self._run(1, xs)

    def _run(self, half: int, xs: Sequence[Any]) -> list[Any]:
        program = self.programs[half]
        given = {v: x for v, x in zip(self.eqn.invars, xs, strict=True) if isinstance(v, Var)}
        operands = [] if program is None else [_read(given[v]) for v in program.invars]
        outs = iter(() if program is None else jax_core.eval_jaxpr(program, [], *operands))
        return [next(outs) if is_some else None for is_some in self.some[half]]


class _Call:
    """A call, run as its program."""

    def __init__(self, eqn: Eqn, soon: Some, late: Some, made: Some):
        self.eqn, self.halves = eqn, Halves(called(eqn), soon, late, made)
        self.reads = self.halves.reads

    def first(self, xs: Sequence[Any], into: Tree, results: Tree) -> tuple[list[Any], Any]:
        with standing_at(self.eqn):
            return self.halves.first(xs, into)

    def second(self, xs: Sequence[Any], left: Tree) -> list[Any]:
        with standing_at(self.eqn):
            return self.halves.second(xs, left)


class _Branches:
    """A choice with two halves of each branch: its own values left, and zeros for those of the others."""

    def __init__(self, eqn: Eqn, soon: Some, late: Some, made: Some):
        self.eqn = eqn
        self.branches = [Halves(each, soon, late, made) for each in eqn.params["branches"]]
        reads = ([each.reads[half] for each in self.branches] for half in range(2))
        self.reads = tuple((True, *map(any, zip(*each, strict=True))) for each in reads)

    def first(self, xs: Sequence[Any], into: Tree, results: Tree) -> tuple[list[Any], Any]:
        index, *operands = _chosen(xs, self.reads[0])
        none = [traced(lambda *xs, each=each: each.first(xs)[1], *operands)[1] for each in self.branches]

        def branch(number: int, *xs: Tree) -> tuple[list[Any], list[Any]]:
            outs, left = self.branches[number].first(xs)
            return outs, [*none[:number], left, *none[number + 1 :]]

        with standing_at(self.eqn):
            outs, left = lax.switch(index, [functools.partial(branch, n) for n in range(len(self.branches))], *operands)
        return outs, left if into is None else jax.tree.map(Place.write, into, left)

    def second(self, xs: Sequence[Any], left: Tree) -> list[Any]:
        index, *operands = _chosen(xs, self.reads[1])
        branch = lambda number, left, *xs: self.branches[number].second(xs, left[number])
        branches = [functools.partial(branch, n) for n in range(len(self.branches))]
        with standing_at(self.eqn):
            return lax.switch(index, branches, jax.tree.map(_read, left), *operands)


class _Loop:
    """A scan, in which each half carries its own values."""

    def __init__(self, eqn: Eqn, soon: Some, late: Some, made: Some):
        self.eqn, body = eqn, eqn.params["jaxpr"]
        self.count, self.carried = jaxprs.scanned(eqn)
        carry = slice(self.count, self.count + self.carried)
        made = carried_on(made, carry, lambda made: _dependent_results(body, made))
        soon = carried_on(soon, slice(self.carried), lambda soon: _used(body, soon)[carry])
        own = [n for n in range(self.carried) if soon[n] and made[self.count + n]]
        self.finals = [n for n in own if late[n]]  # of what the first half carries, what the second hands on
        late = tuple(is_late and n not in own for n, is_late in enumerate(late))
        halved = lambda late: Halves(body, soon, late, made, [self.count + n for n in own])
        late = carried_on(late, slice(self.carried), lambda late: halved(late).reads[1][carry])
        self.soon, self.late, self.halves = soon, late, halved(late)
        reads_carry, has_more = any(_used(body, soon)[carry]), any((*soon[self.carried :], *late))
        self.is_last_turn = any(soon) and not reads_carry and not has_more  # that makes what is handed on
        self.reads = tuple(
            (*reads[: carry.start], *wanted[: self.carried], *reads[carry.stop :])
            for reads, wanted in zip(self.halves.reads, (soon, late), strict=True)
        )

    def first(self, xs: Sequence[Any], into: Tree, results: Mapping[int, Place]) -> tuple[list[Any], Any]:
        if self.is_last_turn:
            turn = 0 if self.eqn.params["reverse"] else self.eqn.params["length"] - 1
            one = lambda x: x.read_turn(jnp.int32(turn)) if isinstance(x, Place) else x[turn]
            over = self.count + self.carried
            read = zip(xs[over:], self.reads[0][over:], strict=True)
            now = [*xs[:over], *(one(x) if is_read else None for x, is_read in read)]
            with standing_at(self.eqn):
                outs, left = self.halves.first(now)
            return outs, (left, [])
        run = lambda xs, _: self.halves.first(xs)
        outs, left = self._scanned(xs, self.soon, self.reads[0], None, run, into and into[0], results)
        return outs, (left, _written(into and into[1], [outs[n] for n in self.finals]))

    def second(self, xs: Sequence[Any], left: Tree) -> list[Any]:
        left, finals = left or (None, [])
        run = lambda xs, left: (self.halves.second(xs, left), None)
        outs, _ = self._scanned(xs, self.late, self.reads[1], left, run)
        for n, x in zip(self.finals, finals, strict=True):
            outs[n] = _read(x)
        return outs

    def _scanned(
        self, xs: Sequence[Any], wanted: Some, reads: Some, given: Tree, run: Callable[..., Any], into: Any = None,
        results: Mapping[int, Place] = MappingProxyType({}),
    ) -> tuple[list[Any], Any]:  # fmt: skip
        """Run a half of each turn; unread operands and unwanted results are None."""
        if not any(wanted):
            return [None] * len(wanted), None
        xs = [x if is_read else None for x, is_read in zip(xs, reads, strict=True)]
        consts, start, over = xs[: self.count], xs[self.count :][: self.carried], xs[self.count + self.carried :]
        given, tree = jax.tree.flatten((over, given))
        length = self.eqn.params["length"]
        stacked = [None if isinstance(x, Place) else x for x in given]
        places, inside = jax.tree.flatten(into)
        places = [*results.values(), *places]

        def turn(carry: Tree, each: Any) -> Any:
            (carry, buffers), (number, stacked) = carry, each
            now = [x.read_turn(number) if isinstance(x, Place) else one for x, one in zip(given, stacked, strict=True)]
            over, left = jax.tree.unflatten(tree, now)
            outs, left = run([*consts, *carry, *over], left)
            made = [outs[n] for n in results] + (jax.tree.leaves(left) if into is not None else [])
            buffers = [
                Place(buffer, place.number).write_turn(number, x)
                for buffer, place, x in zip(buffers, places, made, strict=True)
            ]
            ys = [None if n in results else y for n, y in enumerate(outs)][self.carried :]
            return (outs[: self.carried], buffers), (ys, left if into is None else None)

        with standing_at(self.eqn):
            how = {name: self.eqn.params[name] for name in ("reverse", "unroll")}
            start = [_read(x) for x in start], [place.buffer for place in places]
            consts = [_read(x) for x in consts]
            (carry, buffers), (ys, left) = lax.scan(turn, start, (jnp.arange(length), stacked), **how)
        outs = [*carry, *ys]
        for n, buffer in zip(results, buffers, strict=False):
            outs[n] = buffer
        return outs, left if into is None else jax.tree.unflatten(inside, buffers[len(results) :])


def _halved(jaxpr: OpenJaxpr, eqn: Eqn, soon: Some, late: Some, made: Some) -> Any:
    if any(soon) and any(late):
        if called(eqn) is not None:
            return _Call(eqn, soon, late, made)
        if eqn.primitive.name == "cond":
            return _Branches(eqn, soon, late, made[1:])
    if eqn.primitive.name == "scan":
        return _Loop(eqn, soon, late, made)
    return _Whole(jaxpr, eqn, soon, late)


def _alone(jaxpr: OpenJaxpr, eqn: Eqn, some: Sequence[bool]) -> tuple[Any, Some]:
    """Return the program of an equation for some of its results, and the operands it reads."""
    if not any(some):
        return None, (False,) * len(eqn.invars)
    one = jaxprs.part_of(jaxpr, [eqn], dict.fromkeys(jaxprs.variables(eqn.invars)), eqn.outvars)
    live = jaxprs.pruned(one, some).jaxpr
    return live, tuple(is_in(v, live.invars) for v in eqn.invars)


def _used(jaxpr: OpenJaxpr, outs: Some) -> Some:
    """Return the inputs needed by some results."""
    inputs = jaxprs.pruned(jaxpr, outs).inputs
    return tuple(number in inputs for number in range(len(bare(jaxpr).invars)))


def _dependent_results(jaxpr: OpenJaxpr, made: Some) -> Some:
    found = dependent(jaxpr, made)
    return tuple(is_in(v, found) for v in bare(jaxpr).outvars)


def traced(f: Callable[..., Tree], *args: Tree) -> tuple[Any, Tree]:
    """Return the program of `f(*args)` inside a shard_map, and zeros of the types of its results."""
    made, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    zeros = [vary(lax.full(a.shape, 0, a.dtype), a.mat.varying) for a in (v.aval for v in made.jaxpr.outvars)]
    return made, jax.tree.unflatten(jax.tree.structure(shapes), zeros)


def _read(x: Any) -> Any:
    return x.read() if isinstance(x, Place) else x


def _chosen(xs: Sequence[Any], some: Some) -> list[Any]:
    return [_read(x) if is_some else None for x, is_some in zip(xs, some, strict=True)]


def _written(places: Sequence[Place] | None, xs: Sequence[Any]) -> list[Any]:
    return list(xs) if places is None else [place.write(x) for place, x in zip(places, xs, strict=True)]


def standing_at(eqn: Eqn) -> Any:
    """Return a context with the line and scopes of an equation; JAX adds a checkpoint's scope only in lowering."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack = stack.extend("checkpoint") if eqn.primitive.name in CHECKPOINTS else stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


def zeros_like_result(f: Callable[..., Tree], *args: Tree) -> Tree:
    """Make zeros of the types of `f(*args)`, inside a shard_map."""
    return traced(f, *args)[1]
