"""The value and gradients of a program whose layers are split over stages: it is cut at the loop over its layers, and run by
the table of `jshard.pipeline`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from jshard.errors import JShardError
from jshard.jaxprs import scanned
from jshard.layers.partition import Microbatches, Program
from jshard.layers.partition.engine import Partition
from jshard.layers.partition.part import Names, Part, names_of, vary
from jshard.layers.partition.stages import from_chunks, to_chunks
from jshard.layers.partition.ticks import Model, run_table
from jshard.provenance import scope, source_of
from jshard.schedules import KINDS, Table, generate, load
from jshard.signals.active_config import configuration, mesh_to_choose_for
from jshard.signals.claims import Stage
from jshard.signals.config import Pipeline


class Pipelined(Microbatches):
    """`run(xs)` of the inputs of a program, as that of `Microbatches`, which it equals.

    What comes before the loop over layers runs on the first stage, what comes behind it on the last. Parameters outside of the
    loop are on all stages, and their gradients are summed over stages, once. Other operands of the loop are made by each stage.
    """

    def __init__(self, program: Program, parameters: Sequence[int], variables: Sequence[int], batch: Sequence[int]):
        super().__init__(program, parameters, variables, batch)
        present = configuration()
        assert present is not None and present.pipeline is not None
        self.asked, stage = present.pipeline, program.stage
        if stage is None:
            says = next(signal for signal in present.signals.values() if signal.stage)
            raise JShardError(
                f"{says} says stage ({says.at('stage')}), and no parameter of the model is claimed by it, or is in a stack "
                f'called "{says.name}"',
                hint="give the signal the path of a jshard.stack in the model, as blocks",
            )
        self.cut = _Cut(program, stage, self.asked, {*parameters, *batch})
        stages, meant = (each.shape[stage.mesh_axis] for each in (program.mesh, mesh_to_choose_for()))
        self.table = table_of(self.asked, meant if stages == 1 else stages)
        if stages != self.table.stages:  # the one device that verify compares with has all chunks
            kind = "zero_bubble" if self.table.splits_weights else "1f1b"
            self.table = generate(kind, 1, self.table.microbatches, self.table.virtual_stages)
        self.layers, left = divmod(self.cut.loop.params["length"], self.table.virtual_stages)
        if left:
            every, count = self.cut.loop.params["length"], self.table.virtual_stages
            raise JShardError(
                f"jshard.pipeline ({self.asked.place}) has {self.table.stages} stages of {count // self.table.stages} chunks, "
                f"and {stage.signal} splits {every} layers among them",
                hint=f"use {every // count * count or count} or {-(-every // count) * count} layers",
            )

    def _body(self, marked: Sequence[Names], *xs: Array) -> tuple[Array, list[Array], list[Array]]:
        program, cut, stage = self.program, self.cut, self.program.stage
        assert stage is not None
        mesh_axis, by = stage.mesh_axis, {"claim": stage.signal.name, "key": "stage"}
        staged, chunks = frozenset({mesh_axis}), self.table.virtual_stages // self.table.stages
        parameters = {n: vary(xs[n], names | staged) for n, names in zip(self.parameters, marked, strict=True)}
        with scope(**by):
            own = {n: to_chunks(parameters[n], chunks, mesh_axis) for n in cut.staged}
        edges = {n: x for n, x in parameters.items() if n not in own}
        stored = {n: self._stored(n, x) for n, x in edges.items() if mesh_axis in names_of(program.in_axes[n])}
        edges |= {n: full for n, (full, _) in stored.items()}
        variables, states = self._states(xs)
        inputs = {n: xs[n] for n in self.batch} | states
        others = {n: vary(x, staged) for n, x in enumerate(xs) if n not in parameters and n not in inputs}

        def run(piece: _Piece, edges: Any, given: Any, more: Sequence[Part] = ()) -> tuple[Partition, list[Part]]:
            known, run = {**others, **edges, **given}, program.partition()
            return run, run.run(piece.jaxpr, [*(self._part(n, known[n]) for n in piece.inputs), *more])

        def between(xs: Sequence[Array]) -> list[Part]:
            return [Part(tuple(v.aval.shape), program.found[v], x) for v, x in zip(cut.carried, xs, strict=True)]

        def first(edges: Any, given: Any) -> list[Array]:
            how, parts = run(cut.first, edges, given)
            return [how.place(part, program.found[v]).x for v, part in zip(cut.carried, parts, strict=True)]

        def chunk(own: Any, edges: Any, x: Any, given: Any, number: Array) -> list[Array]:
            how, made = run(cut.each, edges, given)
            some, rest = made[: cut.consts], iter(made[cut.consts :])
            over = [self._layers_of(n, own[n]) if n in own else self._some(how, next(rest), number) for n in cut.over]
            parts = how.equation(cut.of_length(self.layers), [*some, *between(x), *over])
            return [how.place(part, program.found[v]).x for v, part in zip(cut.carried, parts, strict=False)]

        def last(edges: Any, x: Any, given: Any) -> Array:
            how, (value,) = run(cut.last, edges, given, between(x))
            return how.place(value, ()).x

        model = Model(first, chunk, last, shares=any(n in edges for n in cut.each.inputs))
        value, of_own, of_edges = run_table(self.table, model, own, edges, inputs, mesh_axis=mesh_axis, **by)
        with scope(**by, phase="backward"):
            gradients = of_edges | {n: from_chunks(x, mesh_axis) for n, x in of_own.items()}
            gradients |= {n: scattered(gradients[n])[0] for n, (_, scattered) in stored.items()}
        value = value.astype(program.jaxpr.outvars[0].aval.dtype)
        return value, [self._summed(n, gradients[n]) for n in self.parameters], variables

    def _states(self, xs: Sequence[Array]) -> tuple[list[Array], dict[int, Array]]:
        """The variables behind the last microbatch, and before each of them."""
        if not self.variables:
            return [], {}
        program, states = self.program, self.cut.states

        def turn(variables: list[Array], _: None) -> tuple[list[Array], list[Array]]:
            known, run = dict(enumerate(xs)) | dict(zip(self.variables, variables, strict=True)), program.partition()
            outs = run.run(states.jaxpr, [program.part(n, known[n]) for n in states.inputs])
            return [
                run.place(part, program.in_axes[n]).x for part, n in zip(outs, self.variables, strict=True)
            ], variables

        after, before = lax.scan(turn, [xs[n] for n in self.variables], None, length=self.table.microbatches)
        return after, dict(zip(self.variables, before, strict=True))

    def _stored(self, number: int, x: Array) -> tuple[Array, Any]:
        """Gather over stages what rests split over them, once: a stage by itself can't. And what scatters its gradient."""
        claim, axes, stage = self.program.inputs[number].claim, self.program.in_axes[number], self.program.stage
        assert claim is not None and stage is not None
        axis = next(axis for axis, names in enumerate(axes) if stage.mesh_axis in names)
        if axes[axis][-1] != stage.mesh_axis:
            says, names = claim.signal, [*(name for name in axes[axis] if name != stage.mesh_axis), stage.mesh_axis]
            raise JShardError(
                f'{says} names mesh axis "{stage.mesh_axis}", that of the stages, not last in store ({says.at("store")})',
                hint=f"write store: [{', '.join(names)}]",
            )
        with scope(claim=claim.signal.name):
            return jax.vjp(lambda x: self.program.part(number, x).gather(((axis, stage.mesh_axis, True),)), x)

    def _part(self, number: int, x: Array) -> Part:
        """An input as all stages have it."""
        part, stage = self.program.part(number, x), self.program.stage
        if part.rest is not None and stage is not None:
            rest = tuple(tuple(name for name in names if name != stage.mesh_axis) for names in part.rest)
            part.rest = None if rest == part.axes else rest
        return part

    def _layers_of(self, number: int, x: Array) -> Part:
        """The layers of one chunk, as a parameter whose layers are all here."""
        part = self.program.part(number, x)
        rest = None if part.rest is None else ((), *part.rest[1:])
        return Part((self.layers, *part.shape[1:]), ((), *part.axes[1:]), x, rest=rest, signal=part.signal)

    def _some(self, run: Partition, part: Part, number: Array) -> Part:
        """Of what each layer has its own of, that of the layers of one chunk."""
        part = run.place(part, ((), *part.axes[1:]))
        x = lax.dynamic_slice_in_dim(part.x, number * self.layers, self.layers)
        return Part((self.layers, *part.shape[1:]), part.axes, x)


class _Piece(NamedTuple):
    """Some of a program, and which of the program's inputs go into it."""

    jaxpr: Any
    inputs: list[int]


class _Cut:
    """A program of a loss, cut at the loop over its layers."""

    def __init__(self, program: Program, stage: Stage, asked: Pipeline, data: set[int]):
        jaxpr, self.program = program.jaxpr, program
        number_of = {v: n for n, v in enumerate(jaxpr.invars)}
        staged = {v for v, each in zip(jaxpr.invars, program.inputs, strict=True) if each.claim and each.claim.stage}
        using = [eqn for eqn in jaxpr.eqns if any(not isinstance(v, Literal) and v in staged for v in eqn.invars)]
        says = f"{stage.signal} says stage ({stage.signal.at('stage')})"
        for eqn in using[:2]:
            if eqn.primitive.name != "scan" or eqn.params["reverse"]:
                raise JShardError(
                    f"{says}, and its layers are used by {eqn.primitive.name} ({source_of(eqn)}), and not by the loop of a "
                    "jshard.stack alone",
                    hint="call the stack as the model does, with no jax.jit, jax.checkpoint or other use of its parameters",
                )
        if len(using) > 1:
            raise JShardError(
                f"{says}, and its layers run in {len(using)} loops ({source_of(using[0])}, {source_of(using[1])})",
                hint="call one stack once, whose globs tell no layers apart",
            )
        self.loop = using[0]
        self.consts, count = scanned(self.loop)
        operands = list(self.loop.invars)
        start, over = operands[self.consts : self.consts + count], operands[self.consts + count :]
        self.carried, left = self.loop.outvars[:count], set(self.loop.outvars[count:])
        self.staged = [number_of[v] for v in over if not isinstance(v, Literal) and v in staged]
        self.over = [number_of.get(v, -1) if v in staged else -1 for v in over]
        assert len(self.staged) == len(staged)
        before = jaxpr.eqns[: jaxpr.eqns.index(self.loop)]
        others = [eqn for eqn in jaxpr.eqns if eqn is not self.loop]
        self.first = _piece(jaxpr, before, start)
        self.each = _piece(jaxpr, before, [*operands[: self.consts], *(v for v in over if v not in staged)])
        self.last = _piece(jaxpr, others, jaxpr.outvars[:1], self.carried)
        if left & {v for eqn in self.last.jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}:
            raise JShardError(
                f"{says}, and the loss uses what its layers leave behind, as the losses of balance of a jshard.MoE",
                hint="remove jshard.pipeline, or use layers that hand on x alone",
            )
        live, used = partial_eval.dce_jaxpr(jaxpr, [False] + [True] * (len(jaxpr.outvars) - 1))
        self.states = _Piece(live, [n for n, is_used in enumerate(used) if is_used])
        if not data.isdisjoint(self.states.inputs):
            raise JShardError(
                f"jshard.pipeline ({asked.place}) has several microbatches on their way, and the model keeps variables that "
                "its data change, as running statistics",
                hint="use layers that keep none, as nnx.LayerNorm",
            )

    @functools.cache  # noqa: B019  # as long as the cut
    def of_length(self, layers: int) -> Any:
        """The loop over so many layers."""
        return self.loop.replace(params={**self.loop.params, "length": layers})


def _piece(jaxpr: Any, eqns: Sequence[Any], outs: Sequence[Any], more: Sequence[Any] = ()) -> _Piece:
    """What of a program computes `outs`, of its inputs and `more`."""
    wanted, kept = {v for v in outs if not isinstance(v, Literal)}, []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            kept.append(eqn)
            wanted |= {v for v in eqn.invars if not isinstance(v, Literal)}
    inputs = [n for n, v in enumerate(jaxpr.invars) if v in wanted]
    invars = [*(jaxpr.invars[n] for n in inputs), *more]
    names = jaxpr.debug_info.with_unknown_names()
    return _Piece(jaxpr.replace(eqns=kept[::-1], invars=invars, outvars=list(outs), debug_info=names), inputs)


def present_table() -> Table | None:
    """The table of the pipeline that the loaded configuration asks for."""
    present = configuration()
    if present is None or present.pipeline is None:
        return None
    return table_of(present.pipeline, mesh_to_choose_for().shape[present.pipeline.axis])


def table_of(asked: Pipeline, stages: int) -> Table:
    """Make, or read, the table of a pipeline on so many stages."""
    if asked.schedule in KINDS:
        return generate(asked.schedule, stages, asked.microbatches, asked.chunks)
    table = load(asked.schedule)
    chunks = table.virtual_stages // table.stages
    for what, has, says in (
        ("stages", table.stages, stages), ("microbatches", table.microbatches, asked.microbatches),
        ("chunks", chunks, asked.chunks or chunks),
    ):  # fmt: skip
        if has != says:
            raise JShardError(
                f"jshard.pipeline ({asked.place}) has {says} {what}, and its table {asked.schedule} has {has}",
                hint=f"write another table, or give the pipeline {has} {what}",
            )
    return table
