"""Programs with parameters on stages, each stage with its own layers: cut where values go from one stage to another."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.errors import JShardError
from jshard.layers.partition.halves import zeros_like_result
from jshard.layers.partition.part import Here, Part, here_of, vary
from jshard.layers.partition.plan import names_of
from jshard.layers.partition.program import Program
from jshard.programs.jaxprs import Piece, Tree, cut, is_in, level, variables
from jshard.programs.provenance import scope
from jshard.signals.active_config import configuration, mesh_to_choose_for
from jshard.signals.claims import Claim, Stage
from jshard.signals.signal import Signal

Group = tuple[str, tuple[str, ...]]  # arrays of one dtype, which vary over the same mesh axes


class Pieces:
    """A program in pieces, run in turn, each on the stage of its parameters.

    A parameter rests split over the stages too, if it divides. One all-to-all in a step sends it to its stage,
    another sends its gradient back. Each piece computes for itself the values without a parameter of a stage.
    """

    def __init__(self, program: Program):
        jaxpr, first, self.program = program.jaxpr, program.stage, program
        assert first is not None
        sizes = mesh_to_choose_for().shape[first.mesh_axis]
        claims = {n: each.claim for n, each in enumerate(program.inputs) if each.claim is not None and each.claim.stage}
        self.claims: dict[int, Claim] = claims
        self.mesh_axis, self.by = first.mesh_axis, first.by
        self.stage_of = {n: self._checked(claim, first, sizes) for n, claim in claims.items()}
        self.stages = sizes
        # where each of `packed` begins in its row
        self.places: dict[tuple[bool, int], tuple[Group, int, tuple[int, ...]]] = {}
        self._check_stages(first, sizes)
        self.owners: list[int] = []  # the stage of each piece
        made_in: dict[Any, int] = {}  # the piece that computes a variable
        origin = {jaxpr.invars[n]: stage for n, stage in self.stage_of.items()}  # made of parameters of one stage alone
        reduced: set[Any] = set()  # of those
        used: dict[Any, int] = {}  # the last piece that uses a variable of another
        for eqn in level(jaxpr):
            operands = variables(eqn.invars)
            stages = {origin[v] for v in operands if v in origin and v not in made_in}
            if len(stages) == 1 and all(v in origin and v not in made_in for v in operands):
                origin |= dict.fromkeys(eqn.outvars, stages.pop())
                largest = max(v.aval.size for v in operands)
                reduced |= {v for v in eqn.outvars if v.aval.size < largest or not reduced.isdisjoint(operands)}
                continue
            # what is reduced of parameters, as a sum of squares, goes on to where it is needed; other stages don't come to it
            if len(stages) >= 2 or any(v in reduced and v not in made_in for v in operands):
                made_in |= {v: self._piece_of(origin[v]) for v in operands if v in origin and v not in made_in}
                stages = set()
            before = [made_in[v] for v in operands if v in made_in]
            if not before and not stages:
                continue
            own = self._piece_of(stages.pop(), max(before, default=0)) if stages else max(before)
            made_in |= dict.fromkeys(eqn.outvars, own)
            used |= {v: max(own, used.get(v, own)) for v in operands if v in made_in}
        outs = list(dict.fromkeys(variables(jaxpr.outvars)))
        made_in |= {v: self._piece_of(origin[v]) for v in outs if v in origin and v not in made_in}
        self.outs = {v: made_in[v] for v in outs if v in made_in}
        self.sent = [
            [v for v, own in made_in.items() if own < number <= used.get(v, own)] for number in range(len(self.owners))
        ]
        self.made: list[list[Any]] = []  # by each piece, for others and as results
        self.pieces: list[Piece] = []
        for number in range(len(self.owners)):
            made = [v for v, own in made_in.items() if own == number and (used.get(v, own) > own or v in self.outs)]
            self.made.append(made)
            self.pieces.append(cut(jaxpr, made, self.sent[number]))
        self.back = [self._backward_of(number) for number in range(len(self.owners))]
        self.rest = cut(jaxpr, [v for v in jaxpr.outvars if not is_in(v, self.outs)])

    def _check_stages(self, first: Stage, sizes: int) -> None:
        """Refuse a stage without parameters, and parameters split over stages at rest but on no stage."""
        program, claims = self.program, self.claims
        for number in set(range(sizes)) - set(self.stage_of.values()):
            raise JShardError(
                f'mesh axis "{self.mesh_axis}" has {sizes} stages, and no parameter is on stage {number} '
                f"({first.signal} has stage {first.number}, {first.signal.at('stage')})",
                hint=f"write stage: {number} for some layers, or make the mesh axis smaller",
            )
        for n, each in enumerate(program.inputs):
            if n not in claims and each.claim is not None and self.mesh_axis in names_of(program.in_axes[n]):
                says = each.claim.signal
                raise JShardError(
                    f'{says} names mesh axis "{self.mesh_axis}" for store ({says.at("store")}), that of stages that signals '
                    "number",
                    hint="give that signal a stage too: what is on one rests split over all",
                )

    def _checked(self, claim: Claim, other: Stage, sizes: int) -> int:
        stage = claim.stage
        assert stage is not None
        if stage.number is None:
            raise JShardError(
                f"{stage.signal} says stage: {stage.signal.stage} ({stage.signal.at('stage')}), and {other.signal} says stage: "
                f"{other.number} ({other.signal.at('stage')})",
                hint="give each signal the number of its stage, or let one stack be split equally",
            )
        if stage.number >= sizes:
            raise JShardError(
                f'{stage.signal} is on stage {stage.number} ({stage.signal.at("stage")}), and mesh axis "{stage.mesh_axis}" '
                f"has {sizes}",
                hint=f"use 0 to {sizes - 1}, or make the mesh axis larger",
            )
        return stage.number

    def _signals_in(self, number: int) -> list[Signal]:
        return [self.claims[n].signal for n in self.pieces[number].inputs if n in self.claims]

    def _backward_of(self, number: int) -> int:
        """Return the stage for the backward of a piece."""
        owner, present = self.owners[number], configuration()
        inside = self._signals_in(number)
        found: dict[int, Signal] = {}
        for signal in inside:
            other = signal if signal.backward is None or present is None else present.lookup((signal.backward,))
            if not other.stage.isdecimal() or int(other.stage) >= self.stages:
                raise JShardError(
                    f"{signal} has its backward as {other} says ({signal.at('backward')}), which is on no stage of its own",
                    hint=f"give it the workers of one stage, or write stage: {self.stages - 1}",
                )
            found.setdefault(int(other.stage), signal)
        if len(found) >= 2:
            one, two, *_ = found.values()
            raise JShardError(
                f"{one} and {two} follow one another on stage {owner}, and have their backward on stages "
                f"{' and '.join(map(str, found))}",
                hint="give both the same backward",
            )
        there = next(iter(found), owner)
        for v in (*self.made[number], *self.sent[number]) if there != owner else ():
            check_smooth(v, f"{inside[0]} has its backward on other workers, and")
        return there

    def _piece_of(self, stage: int, least: int = 0) -> int:
        """Return the first piece of a stage at or after another piece; append a new piece if there is none."""
        if stage not in self.owners[least:]:
            self.owners.append(stage)
        return self.owners.index(stage, least)

    # -- inside the shard_map --

    @property
    def ways(self) -> int:
        return self.program.mesh.shape[self.mesh_axis]

    def __call__(self, *xs: Tree) -> list[Any]:
        return self.program.call(self.run, xs)

    def run(self, xs: Sequence[Array]) -> list[Part]:
        """Return the results of the program: one piece after the other, while the other stages wait."""
        program, everywhere, staged = self.program, list(xs), frozenset({self.mesh_axis})
        own, apart, by = self.own(xs), self.own(xs, backward=True), self.by
        xs = [x if n in self.packed else vary(x, staged) for n, x in enumerate(xs)]
        values, results = dict[Any, Array](), dict[Any, Array]()
        for number, (owner, made) in enumerate(zip(self.owners, self.made, strict=True)):
            with scope(**by):
                values = {v: self._hop(values[v], self.owners[number - 1], owner) for v in self.sent[number]}
            given = [values[v] for v in self.sent[number]]
            mine = self._rows(own, owner)
            if self.back[number] == owner:
                outs = self._on(owner, functools.partial(self.computed, number), mine, xs, given)
            else:
                outs = self._with_backward_apart(number, mine, self._rows(apart, self.back[number]), xs, given)
            values |= dict(zip(made, outs, strict=True))
            results |= {v: x for v, x in zip(made, outs, strict=True) if v in self.outs}
        run = program.running()
        free = iter(run.run(self.rest.jaxpr, [program.part(n, everywhere[n]) for n in self.rest.inputs], program.plan))
        with scope(**by):
            claim = program.claim_behind
            summed = {v: run.reduce(x, (self.mesh_axis,), "sum", claim) for v, x in results.items()}
        made = {v: Here(tuple(v.aval.shape), program.found[v], x) for v, x in summed.items()}
        return [made[v] if is_in(v, made) else next(free) for v in program.jaxpr.outvars]

    def _rows(self, own: dict[Group, Array], stage: int) -> dict[Group, Array]:
        """Return the parameters of a stage, if a device has all stages; else its own."""
        return {group: x[stage % len(x)] for group, x in own.items()}

    def _hop(self, x: Array, stage: int, other: int) -> Array:
        return lax.ppermute(x, self.mesh_axis, [(stage, other)]) if self.ways >= 2 else x

    def _on(self, stage: int, f: Callable[..., Any], *args: Tree) -> Any:
        """Return the results of `f` on a stage, zeros on the others."""
        none = zeros_like_result(f, *args)
        with scope(times="1", turns="1"):
            return lax.cond(lax.axis_index(self.mesh_axis) == stage % self.ways, f, lambda *_: none, *args)

    def _with_backward_apart(
        self, number: int, mine: Tree, theirs: Tree, xs: list[Array], given: list[Array]
    ) -> list[Array]:
        """Run a piece with its backward on another stage: that stage receives the piece's inputs and cotangents, and
        computes the piece again. `theirs` are the piece's parameters there."""
        owner, there = self.owners[number], self.back[number]
        by = {"claim": self._signals_in(number)[0].name, "key": "backward"}
        smooth = [n for n, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def forward(mine: Tree, theirs: Tree, xs: list[Array], given: list[Array]) -> tuple[list[Array], Any]:
            outs = self._on(owner, functools.partial(self.computed, number), mine, xs, given)
            return outs, (theirs, xs, given)

        def pulled(theirs: Tree, xs: list[Array], given: list[Array], cotangents: list[Array]) -> Any:
            def again(theirs: Tree, some: list[Array], given: list[Array]) -> list[Array]:
                full = dict(enumerate(xs)) | dict(zip(smooth, some, strict=True))
                return self.computed(number, theirs, full, given, backward=True)

            with scope(again="remat"):
                _, pull = jax.vjp(again, theirs, [xs[n] for n in smooth], given)
            return pull(cotangents)

        def backward(kept: Tree, cotangents: list[Array]) -> Any:
            theirs, xs, given = kept
            with scope(**by):
                given, cotangents = ([self._hop(x, owner, there) for x in each] for each in (given, cotangents))
            of_theirs, some, of_given = self._on(there, pulled, theirs, xs, given, cotangents)
            with scope(**by):
                of_given = [self._hop(x, there, owner) for x in of_given]
            of_xs = dict(zip(smooth, some, strict=True))
            return None, of_theirs, [of_xs.get(n) for n in range(len(xs))], of_given

        run = jax.custom_vjp(lambda *args: forward(*args)[0])
        run.defvjp(forward, backward)
        return run(mine, theirs, xs, given)

    def computed(
        self, number: int, own: dict[Group, Array], xs: Tree, given: Sequence[Array], *, backward: bool = False
    ) -> list[Array]:
        """Return the results of a piece on the devices of its stage. They are made of its parameters, other inputs by
        number, and the values sent by earlier pieces."""
        program, (jaxpr, inputs) = self.program, self.pieces[number]
        run = program.running()
        mine = [self._unpacked(own, backward, n) if n in self.packed else xs[n] for n in inputs]
        parts = [program.part_of_stage(n, x) for n, x in zip(inputs, mine, strict=True)]
        sent = self.sent[number]
        parts += here_of(sent, (program.found[v] for v in sent), given)
        made, claim = run.run(jaxpr, parts, program.plan), program.claim_behind
        placed = [run.place(part, program.found[v], claim).x for v, part in zip(self.made[number], made, strict=True)]
        return [vary(x, frozenset({self.mesh_axis})) for x in placed]

    # -- parameters --

    @functools.cached_property
    def packed(self) -> dict[int, int]:
        """Return the parameters split over stages at rest, with the axis of each."""
        return {
            n: axis
            for n in self.stage_of
            for axis, names in enumerate(self.program.in_axes[n])
            if self.mesh_axis in names
        }

    def own(self, xs: Tree, *, backward: bool = False) -> dict[Group, Array]:
        """Send each stage its own parameters, given by number in the program, by an all-to-all for each group of
        arrays: `[stage here, part, number]`. With `backward`, send them to the stages of the backward."""
        where = dict(self.stage_of)
        if backward:
            apart = [n for n, there in enumerate(self.back) if there != self.owners[n]]
            where = {n: self.back[at] for at in apart for n in self.pieces[at].inputs if n in self.packed}
        rows: dict[Group, list[list[Array]]] = {}
        for n in (n for n in self.packed if n in where):
            group = str(xs[n].dtype), tuple(sorted(jax.typeof(xs[n]).mat.varying))
            row = rows.setdefault(group, [[] for _ in range(self.stages)])[where[n]]
            self.places[backward, n] = group, sum(x.size for x in row), xs[n].shape
            row.append(xs[n].reshape(-1))
        found: dict[Group, Array] = {}
        for (dtype, names), of_stages in rows.items():
            longest = max(sum(x.size for x in row) for row in of_stages)
            spare = lambda row: vary(jnp.zeros(longest - sum(x.size for x in row), dtype), frozenset(names))  # noqa: B023
            every = jnp.concatenate([x for row in of_stages for x in (*row, spare(row))]).reshape(-1, longest)
            with scope(**self.by):
                here = lax.all_to_all(every, self.mesh_axis, 0, 0)[None] if self.ways >= 2 else every[:, None]
            found[dtype, names] = here
        return found

    def _unpacked(self, own: dict[Group, Array], backward: bool, number: int) -> Array:
        """Return a parameter of this stage with its parts joined along the axis of stages."""
        group, first, shape = self.places[backward, number]
        axis = self.packed[number]
        parts = lax.slice_in_dim(own[group], first, first + math.prod(shape), axis=1).reshape(-1, *shape)
        return jnp.moveaxis(parts, 0, axis).reshape(*shape[:axis], -1, *shape[axis + 1 :])


def check_smooth(v: Any, about: str) -> None:
    """Refuse to send values without a gradient."""
    if not jnp.issubdtype(v.aval.dtype, jnp.inexact):
        raise JShardError(
            f"{about} sends {v.aval.str_short()} from stage to stage, and only what has a gradient can go",
            hint="compute it of the batch, or in the layer that uses it",
        )
