"""Layers with a numbered stage: a program cut where values go from one stage to another, run by a table."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.errors import JShardError
from jshard.layers.partition import Program
from jshard.layers.partition.part import vary
from jshard.layers.partition.pieces import Group, Pieces, check_smooth
from jshard.layers.partition.plan import Names, names_of
from jshard.layers.pipeline.scheduled import Scheduled
from jshard.layers.pipeline.ticks import Model, run_table
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import Tree
from jshard.programs.provenance import scope


class PipelinedPieces(Scheduled):
    """A program with numbered stages: it goes through them in order, once each."""

    def __init__(self, program: Program, parameters: Sequence[int], variables: Sequence[int], batch: Sequence[int]):
        super().__init__(program, parameters, variables, batch)
        self.pieces, says, number = Pieces(program), self.stage.signal, self.stage.number
        owners, stages = self.pieces.owners, self.pieces.stages
        about = f"jshard.pipeline ({self.asked.place})"
        if owners != list(range(stages)):
            went = ", ".join(map(str, owners))
            raise JShardError(
                f"{about} goes from stage 0 to stage {stages - 1}, and the model goes through stages {went}",
                hint="give what uses a parameter the stage of it, and later layers the same stage or a later one",
            )
        if self.table.virtual_stages != stages:
            raise JShardError(
                f"{about} has {self.table.virtual_stages // self.table.stages} chunks of layers a stage, and {says} is on "
                f"stage {number} ({says.at('stage')})",
                hint="write chunks: 1, or build equal layers with jshard.stack",
            )
        loss = program.jaxpr.outvars[0]
        crossing = [*self.pieces.sent[1:], [loss]]
        if self.pieces.outs.get(loss) != stages - 1 or loss in crossing[-2]:
            raise JShardError(
                f"{about} ends on stage {stages - 1}, and the loss does not depend on its parameters",
                hint="give the last layers the last stage",
            )
        for v in (v for between in crossing for v in between):
            check_smooth(v, about)
        if self.pieces.back != owners:
            apart = next(c.signal for c in self.pieces.claims.values() if c.signal.backward)
            raise JShardError(
                f"{about} runs a backward where its forward ran, and {apart} names another ({apart.at('backward')})",
                hint="remove backward, or jshard.pipeline",
            )
        self.crossing = [[(v, self._group(v), self._shape(v)) for v in between] for between in crossing]
        longest = collections.Counter[Group]()
        for between in self.crossing:
            sizes = collections.Counter[Group]()
            for _, group, shape in between:
                sizes[group] += math.prod(shape)
            longest |= {group: max(size, 1) for group, size in sizes.items()}
        self.longest = dict(sorted(longest.items()))

    def _group(self, v: Any) -> Group:
        names = names_of(self.program.found[v]) | {self.pieces.mesh_axis}
        return str(v.aval.dtype), tuple(sorted(names))

    def _shape(self, v: Any) -> tuple[int, ...]:
        return Layout(self.program.mesh, *self.program.found[v]).shard_shape(v.aval.shape)

    def _packed(self, between: int, xs: Sequence[Array]) -> dict[Group, Array]:
        """Pack a stage's values for the next stage, as a row for each group of arrays: all stages send equally much."""
        rows: dict[Group, list[Array]] = {group: [] for group in self.longest}
        for (_, group, _), x in zip(self.crossing[between], xs, strict=True):
            rows[group].append(x.reshape(-1))
        spare = {group: size - sum(x.size for x in rows[group]) for group, size in self.longest.items()}
        return {
            (dtype, names): vary(jnp.concatenate([*row, jnp.zeros(spare[dtype, names], dtype)]), frozenset(names))
            for (dtype, names), row in rows.items()
        }

    def _unpacked(self, between: int, rows: dict[Group, Array]) -> list[Array]:
        first, found = collections.Counter[Group](), []
        for _, group, shape in self.crossing[between]:
            found.append(rows[group][first[group] : first[group] + math.prod(shape)].reshape(shape))
            first[group] += math.prod(shape)
        return found

    def _body(self, marked: Sequence[Names], *xs: Array) -> tuple[Array, list[Array], list[Array]]:
        pieces, staged = self.pieces, frozenset({self.pieces.mesh_axis})
        parameters = {n: vary(xs[n], names | staged) for n, names in zip(self.parameters, marked, strict=True)}
        packed = {n: parameters[n] for n in pieces.packed}
        own, scattered = jax.vjp(pieces.own, packed)
        edges = {n: x for n, x in parameters.items() if n not in packed}
        variables, states = self._states(xs)
        inputs = {n: xs[n] for n in self.batch} | states
        others = {n: vary(x, staged) for n, x in enumerate(xs) if n not in parameters and n not in inputs}

        def first(edges: Tree, given: Tree) -> dict[Group, Array]:
            return {group: vary(jnp.zeros(size, group[0]), frozenset(group[1])) for group, size in self.longest.items()}

        def chunk(own: Tree, edges: Tree, x: Any, given: Tree, number: Array) -> dict[Group, Array]:
            def run(at: int, own: Tree, edges: Tree, x: Any, given: Tree) -> dict[Group, Array]:
                sent = self._unpacked(at - 1, x) if at else []
                made = dict(
                    zip(pieces.made[at], pieces.computed(at, own, {**others, **edges, **given}, sent), strict=True)
                )
                passed = {v: y for (v, *_), y in zip(self.crossing[at - 1] if at else [], sent, strict=True)} | made
                return self._packed(at, [passed[v] for v, *_ in self.crossing[at]])

            return lax.switch(number, [functools.partial(run, at) for at in range(pieces.stages)], own, edges, x, given)

        def last(edges: Tree, x: Any, given: Tree) -> tuple[Array, tuple[()]]:
            return self._unpacked(pieces.stages - 1, x)[0], ()

        # all stages run all pieces' branches: what each of them keeps would have its place on every device
        shares = any(n in edges for each in pieces.pieces for n in each.inputs)
        model = Model(first, chunk, last, shares, recomputes=True)
        value, of_own, of_edges, _ = run_table(
            self.table, model, own, edges, inputs, mesh_axis=pieces.mesh_axis, **self.stage.by
        )
        with scope(phase="backward"):
            gradients = of_edges | scattered(of_own)[0]
        value = value.astype(self.program.jaxpr.outvars[0].aval.dtype)
        return value, [self._summed(n, gradients[n]) for n in self.parameters], variables
