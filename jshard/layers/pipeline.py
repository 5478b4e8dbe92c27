"""The value and gradients of a program whose layers are on stages, run by the table of `jshard.pipeline`: it is cut at the loop
over its layers, or where its values go from one stage to another."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import partial_eval

from jshard.errors import JShardError, multiples
from jshard.layers.balance import Costs, balanced, in_ranges, spelled
from jshard.layers.partition import Microbatches, Program
from jshard.layers.partition.part import Part, vary
from jshard.layers.partition.pieces import Group, Piece, check_smooth, piece
from jshard.layers.partition.plan import Names, key_of, names_of
from jshard.layers.partition.planner import whole
from jshard.layers.partition.run import Run, SomeLayers
from jshard.layers.partition.stages import Counts, from_chunks, from_stages, to_chunks, to_stages
from jshard.layers.partition.ticks import Model, run_table
from jshard.layers.remat import CHUNK
from jshard.layouts.layout import Layout
from jshard.layouts.redistribution import Axes
from jshard.programs.flops import arithmetic_of
from jshard.programs.jaxprs import is_in, read_by, scanned, variables
from jshard.programs.provenance import scope, source_of
from jshard.schedules import KINDS, Table, generate, load
from jshard.schedules.table import counted
from jshard.signals.active_config import configuration, mesh_to_choose_for
from jshard.signals.claims import Stage
from jshard.signals.config import Pipeline
from jshard.signals.signal import Signal


class Scheduled(Microbatches):
    """`run(xs)` of the inputs of a program, as that of `Microbatches`, which it equals, by the table of `jshard.pipeline`."""

    of_data: Sequence[int] = ()  # the variables, by their place among them, that a call makes of its data

    def __init__(self, program: Program, parameters: Sequence[int], variables: Sequence[int], batch: Sequence[int]):
        super().__init__(program, parameters, variables, batch)
        present = configuration()
        assert present is not None and present.pipeline is not None
        self.asked = present.pipeline
        if program.stage is None:
            says = next(signal for signal in present.signals.values() if signal.stage)
            raise JShardError(
                f"{says} says stage ({says.at('stage')}), and no parameter of the model is claimed by it",
                hint=f'write match: ["{says.name}/**"], with the path of a jshard.stack in the model',
            )
        self.stage, stages = program.stage, program.mesh.shape[program.stage.mesh_axis]
        self.table = self.meant = table_of(self.asked)
        if stages != self.table.stages:  # the one device that verify compares with has all chunks
            kind = "zero_bubble" if self.table.splits_weights else "1f1b"
            self.table = generate(kind, 1, self.table.microbatches, self.table.virtual_stages)

    def _needs(self, outs: Sequence[bool]) -> tuple[Any, list[int]]:
        """The program of some of the results, and the numbers of the inputs that go into it."""
        live, used = partial_eval.dce_jaxpr(self.program.jaxpr, list(outs))
        return live, [n for n, is_used in enumerate(used) if is_used]

    @functools.cached_property
    def states(self) -> Piece:
        """What a call changes of the model's variables, without its data."""
        live, inputs = self._needs([False] + [number not in self.of_data for number in range(len(self.variables))])
        if not {*self.parameters, *self.batch}.isdisjoint(inputs):
            raise JShardError(
                f"jshard.pipeline ({self.asked.place}) has several microbatches on their way, and the model keeps variables "
                "that its data change, as running statistics",
                hint="use layers that keep none, as nnx.LayerNorm",
            )
        return Piece(live, inputs)

    def _states(self, xs: Sequence[Array]) -> tuple[list[Array], dict[int, Array]]:
        """The variables behind the last microbatch, and before each of them."""
        program, states = self.program, self.states
        numbers = [n for at, n in enumerate(self.variables) if at not in self.of_data]
        if not numbers:
            return [], {}

        def turn(variables: list[Array], _: None) -> tuple[list[Array], list[Array]]:
            known, run = dict(enumerate(xs)) | dict(zip(numbers, variables, strict=True)), program.running()
            outs = run.planned(states.jaxpr, [program.part(n, known[n]) for n in states.inputs], None)
            return [
                run.place(part, program.in_axes[n], None).x for part, n in zip(outs, numbers, strict=True)
            ], variables

        after, before = lax.scan(turn, [xs[n] for n in numbers], None, length=self.table.microbatches)
        return after, dict(zip(numbers, before, strict=True))


class Pipelined(Scheduled):
    """A program with one loop over layers, which each stage has some of.

    What comes before the loop runs on the first stage, what comes behind it on the last. Parameters outside of the loop are on
    all stages, and their gradients are summed over stages, once. Other operands of the loop are made by each stage.
    """

    def __init__(self, program: Program, parameters: Sequence[int], variables: Sequence[int], batch: Sequence[int]):
        super().__init__(program, parameters, variables, batch)
        self.of_data = self._made_of_data()
        self.cut, says = _Cut(program, self.stage, self.of_data), self.stage.signal
        for v in self.cut.left:
            check_smooth(v, f"jshard.pipeline ({self.asked.place})")
        every, counts, self.layers_words = self.cut.loop.params["length"], (), ""
        match says.stage:
            case "equal":
                counts = self._equal(every)
            case "balance":
                counts, self.layers_words = balanced(says, self.costs, self.meant)
            case ranges:
                counts = in_ranges(ranges, every, says, self.meant, self.asked.place)
                self.layers_words = f"{says.name}: {spelled(counts, self.meant)}, as written"
        self.counts = Counts(counts, self.table.stages)
        self.layers = self.counts.longest
        if not self.counts.are_equal:
            self._check_no_prefetch()
        whole = sum(self._axis_of_stages(n) is None for n in self.cut.staged)
        if whole and self.layers_words:
            of = f"{whole} of {counted(len(self.cut.staged), 'parameter')}"
            self.layers_words += f"; {of} rest whole on every stage, as no axis divides by {self.table.stages} more"

    def _equal(self, every: int) -> tuple[int, ...]:
        count = self.table.virtual_stages
        if every % count:
            raise JShardError(
                f"jshard.pipeline ({self.asked.place}) has {self.table.stages} stages of {count // self.table.stages} chunks, "
                f"and {self.stage.signal} splits {every} layers among them",
                hint=f"use {multiples(every, count)} layers, or write stage: balance",
            )
        return (every // count,) * count

    @property
    def costs(self) -> Costs:
        """What one microbatch costs all devices, and what a layer weighs."""
        cut, types = self.cut, self.program.types
        first, layer, last = (
            arithmetic_of(each).total for each in (cut.first.jaxpr, cut.loop.params["jaxpr"], cut.last.jaxpr)
        )
        bytes_each = sum(math.prod(types[n].shape[1:]) * types[n].dtype.itemsize for n in cut.staged)
        return Costs(cut.loop.params["length"], first, layer, last, bytes_each)

    def _check_no_prefetch(self) -> None:
        for says in self._signals:
            if says.store_prefetch:
                raise JShardError(
                    f"{says} says store.prefetch ({says.at('store.prefetch')}), and {self.stage.signal} has stages of unequal "
                    f"layers ({self.stage.signal.at('stage')})",
                    hint="remove prefetch, or write stage: equal",
                )

    def _made_of_data(self) -> list[int]:
        """The variables that a call makes of its data, and of nothing that it left before: those of the last microbatch stay,
        as without a pipeline."""
        jaxpr, data = self.program.jaxpr, {*self.parameters, *self.batch}
        needs = [self._needs([n == out for n in range(len(jaxpr.outvars))])[1] for out in range(1, len(jaxpr.outvars))]
        made = [number for number, inputs in enumerate(needs) if not data.isdisjoint(inputs)]
        used = set(self._needs([True] + [number in made for number in range(len(needs))])[1])
        return [number for number in made if self.variables[number] not in used]

    def _body(self, marked: Sequence[Names], *xs: Array) -> tuple[Array, list[Array], list[Array]]:
        program, cut, mesh_axis, by = self.program, self.cut, self.stage.mesh_axis, self.stage.by
        plan, lies = program.of_one_stage()
        staged, chunks = frozenset({mesh_axis}), self.table.virtual_stages // self.table.stages
        parameters = {n: vary(xs[n], names | staged) for n, names in zip(self.parameters, marked, strict=True)}
        with scope(**by):
            own = {n: self._own(n, parameters[n], chunks) for n in cut.staged}
        edges = {n: x for n, x in parameters.items() if n not in own}
        stored = {n: self._stored(n, x) for n, x in edges.items() if mesh_axis in names_of(program.in_axes[n])}
        edges |= {n: full for n, (full, _) in stored.items()}
        variables, states = self._states(xs)
        inputs = {n: xs[n] for n in self.batch} | states
        others = {n: vary(x, staged) for n, x in enumerate(xs) if n not in parameters and n not in inputs}

        how, claim = program.running(), program.claim_behind

        def run(some: Piece, edges: Any, given: Any, more: Sequence[Part] = ()) -> list[Part]:
            known = {**others, **edges, **given}
            parts = [*(program.part_of_stage(n, known[n]) for n in some.inputs), *more]
            return how.run(some.jaxpr, parts, plan)

        def place(part: Part, axes: Axes) -> Array:
            return how.place(part, axes, claim).x

        lie = {v: lies[v] for v in (*cut.carried, *cut.left)}

        def between(xs: Sequence[Array]) -> list[Part]:
            return [Part(tuple(v.aval.shape), axes, x) for (v, axes), x in zip(lie.items(), xs, strict=True)]

        def first(edges: Any, given: Any) -> list[Array]:
            """What goes into the first layer, and room for what all of them leave behind."""
            parts = run(cut.first, edges, given)
            room = [jnp.zeros(Layout(program.mesh, *lie[v]).shard_shape(v.aval.shape), v.aval.dtype) for v in cut.left]
            return [place(part, lie[v]) for v, part in zip(cut.carried, parts, strict=True)] + room

        def chunk(own: Any, edges: Any, x: Any, given: Any, number: Array) -> list[Array]:
            made = run(cut.each, edges, given)
            some, rest = made[: cut.consts], iter(made[cut.consts :])
            over = [self._some(how, next(rest), number) if n is None else self._layers_of(n, own[n]) for n in cut.over]
            count = len(cut.carried)
            loop, counts, some_layers = cut.of_length(self.layers), self.counts, None
            if not counts.are_equal:
                times = " ".join(map(str, counts.by_stage))
                some_layers = SomeLayers(loop, jnp.array(counts.layers)[number], times)
            parts = program.running(some_layers).equation(loop, [*some, *between(x)[:count], *over], plan[key_of(loop)])
            after = [place(part, lie[v]) for v, part in zip(cut.carried, parts, strict=False)]
            for v, room in zip(cut.left, x[count:], strict=True):
                part = parts[cut.loop.outvars.index(v)]
                left = place(Part((self.layers, *part.shape[1:]), part.axes, part.x), lie[v])
                after.append(self._written(room, left, number))
            return after

        def last(edges: Any, x: Any, given: Any) -> tuple[Array, list[Array]]:
            value, *left = run(cut.last, edges, given, between(x))
            numbers = [self.variables[at] for at in self.of_data]
            kept = [place(p, program.in_axes[n]) for n, p in zip(numbers, left, strict=True)]
            return place(value, whole(len(value.shape))), kept

        shares = any(n in edges for n in cut.each.inputs)
        model = Model(first, chunk, last, shares, self._recomputes(), self.layers_words)
        value, of_own, of_edges, left = run_table(self.table, model, own, edges, inputs, mesh_axis=mesh_axis, **by)
        for at, x in zip(self.of_data, left, strict=True):
            variables.insert(at, x)
        with scope(**by, phase="backward"):
            gradients = of_edges | {n: self._at_rest(n, x) for n, x in of_own.items()}
            gradients |= {n: scattered(gradients[n])[0] for n, (_, scattered) in stored.items()}
        value = value.astype(program.jaxpr.outvars[0].aval.dtype)
        return value, [self._summed(n, gradients[n]) for n in self.parameters], variables

    @property
    def _signals(self) -> list[Signal]:
        """Those of the parameters that are on stages."""
        claims = (self.program.inputs[n].claim for n in self.cut.staged)
        return [claim.signal for claim in claims if claim is not None]

    def _recomputes(self) -> bool:
        return any(each.remat == CHUNK for each in self._signals)

    def _own(self, number: int, x: Array, chunks: int) -> Array:
        """The layers of this stage, of a parameter as it rests."""
        if self.stage.is_equal:
            return to_chunks(x, chunks, self.stage.mesh_axis)
        return to_stages(x, self._axis_of_stages(number), self.counts, self.stage.mesh_axis)

    def _at_rest(self, number: int, gradient: Array) -> Array:
        """The gradient of this stage's layers, as the parameter rests."""
        if self.stage.is_equal:
            return from_chunks(gradient, self.stage.mesh_axis)
        return from_stages(gradient, self._axis_of_stages(number), self.counts, self.stage.mesh_axis)

    def _axis_of_stages(self, number: int) -> int | None:
        """The axis along which a parameter rests split over stages; None where it is whole on each."""
        claim, axes, stage = self.program.inputs[number].claim, self.program.in_axes[number], self.stage
        assert claim is not None
        axis = next((axis for axis, names in enumerate(axes) if stage.mesh_axis in names), None)
        if axis is not None and axes[axis][-1] != stage.mesh_axis:
            says, names = claim.signal, [*(name for name in axes[axis] if name != stage.mesh_axis), stage.mesh_axis]
            raise JShardError(
                f'{says} names mesh axis "{stage.mesh_axis}", that of the stages, not last in store ({says.at("store")})',
                hint=f"write store: [{', '.join(names)}]",
            )
        return axis

    def _stored(self, number: int, x: Array) -> tuple[Array, Any]:
        """Gather over stages what rests split over them, once: a stage by itself can't. And what scatters its gradient."""
        claim, axis = self.program.inputs[number].claim, self._axis_of_stages(number)
        assert claim is not None and axis is not None
        with scope(claim=claim.signal.name):
            return jax.vjp(lambda x: self.program.part(number, x).gather(((axis, self.stage.mesh_axis, True),)), x)

    def _layers_of(self, number: int, x: Array) -> Part:
        """The layers of one chunk, as a parameter whose layers are all here."""
        part = self.program.part_of_stage(number, x)
        axes, rest = ((), *part.axes[1:]), None if part.rest is None else ((), *part.rest[1:])
        return Part((self.layers, *part.shape[1:]), axes, x, rest=None if rest == axes else rest, signal=part.signal)

    def _some(self, run: Run, part: Part, number: Array) -> Part:
        """Of what each layer has its own of, that of the layers of one chunk."""
        part = run.place(part, ((), *part.axes[1:]), self.program.claim_behind)
        x = self._read(part.x, number)
        return Part((self.layers, *part.shape[1:]), part.axes, x)

    def _read(self, x: Array, number: Array) -> Array:
        """The layers of a chunk, and of a shorter one any more."""
        if self.counts.are_equal:
            return lax.dynamic_slice_in_dim(x, number * self.layers, self.layers)
        return x[jnp.minimum(jnp.array(self.counts.starts)[number] + jnp.arange(self.layers), len(x) - 1)]

    def _written(self, room: Array, x: Array, number: Array) -> Array:
        """Room for what all layers leave, with that of one chunk; what a shorter one has too many of, later ones write over."""
        if self.counts.are_equal:
            return lax.dynamic_update_slice_in_dim(room, x, number * self.layers, 0)
        return room.at[jnp.array(self.counts.starts)[number] + jnp.arange(self.layers)].set(x, mode="drop")


class PipelinedPieces(Scheduled):
    """A program whose signals number the stage of each layer: it goes through them in order, each stage once."""

    def __init__(self, program: Program, parameters: Sequence[int], variables: Sequence[int], batch: Sequence[int]):
        super().__init__(program, parameters, variables, batch)
        assert program.pieces is not None
        self.pieces, says, number = program.pieces, self.stage.signal, self.stage.number
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
        """What one stage sends to the next, as one row of each group of arrays: all stages send as much."""
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

        def first(edges: Any, given: Any) -> dict[Group, Array]:
            return {group: vary(jnp.zeros(size, group[0]), frozenset(group[1])) for group, size in self.longest.items()}

        def chunk(own: Any, edges: Any, x: Any, given: Any, number: Array) -> dict[Group, Array]:
            def run(at: int, own: Any, edges: Any, x: Any, given: Any) -> dict[Group, Array]:
                sent = self._unpacked(at - 1, x) if at else []
                made = dict(
                    zip(pieces.made[at], pieces.computed(at, own, {**others, **edges, **given}, sent), strict=True)
                )
                passed = {v: y for (v, *_), y in zip(self.crossing[at - 1] if at else [], sent, strict=True)} | made
                return self._packed(at, [passed[v] for v, *_ in self.crossing[at]])

            return lax.switch(number, [functools.partial(run, at) for at in range(pieces.stages)], own, edges, x, given)

        def last(edges: Any, x: Any, given: Any) -> tuple[Array, tuple[()]]:
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


class _Cut:
    """A program of a loss, cut at the loop over its layers."""

    def __init__(self, program: Program, stage: Stage, of_data: Sequence[int]):
        jaxpr, self.program = program.jaxpr, program
        number_of = {v: n for n, v in enumerate(jaxpr.invars)}
        staged = {v for v, each in zip(jaxpr.invars, program.inputs, strict=True) if each.claim and each.claim.stage}
        using = [eqn for eqn in jaxpr.eqns if any(is_in(v, staged) for v in eqn.invars)]
        says = f"{stage.signal} says stage ({stage.signal.at('stage')})"
        for eqn in using:
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
        self.carried = self.loop.outvars[:count]
        self.staged = [number_of[v] for v in over if is_in(v, staged)]
        self.over = [number_of[v] if v in staged else None for v in over]
        assert len(self.staged) == len(staged)
        before = jaxpr.eqns[: jaxpr.eqns.index(self.loop)]
        others = [eqn for eqn in jaxpr.eqns if eqn is not self.loop]
        self.first = piece(jaxpr, before, start)
        self.each = piece(jaxpr, before, [*operands[: self.consts], *(v for v in over if v not in staged)])
        outs = [jaxpr.outvars[0], *(jaxpr.outvars[1 + at] for at in of_data)]
        after = piece(jaxpr, others, outs).jaxpr
        used = read_by(after.eqns).union(variables(after.outvars))
        self.left = [v for v in self.loop.outvars[count:] if v in used]  # by each layer, and used behind the loop
        self.last = piece(jaxpr, others, outs, [*self.carried, *self.left])

    @functools.cache  # noqa: B019  # as long as the cut
    def of_length(self, layers: int) -> Any:
        """The loop over so many layers."""
        return self.loop.replace(params={**self.loop.params, "length": layers})


def present_table() -> Table | None:
    """The table of the pipeline that the loaded configuration asks for."""
    present = configuration()
    return None if present is None or present.pipeline is None else table_of(present.pipeline)


def table_of(asked: Pipeline) -> Table:
    """Make, or read, the table of a pipeline; on one device that stands for a mesh, that of the mesh."""
    stages = mesh_to_choose_for().shape[asked.axis]
    if asked.schedule in KINDS:
        return generate(asked.schedule, stages, asked.microbatches, asked.chunks)
    table = load(asked.schedule)
    chunks = table.virtual_stages // table.stages
    for what, has, says in (
        ("stage", table.stages, stages), ("microbatch", table.microbatches, asked.microbatches),
        ("chunk", chunks, asked.chunks or chunks),
    ):  # fmt: skip
        if has != says:
            raise JShardError(
                f"jshard.pipeline ({asked.place}) has {counted(says, what)}, and its table {asked.schedule} has {has}",
                hint=f"write another table, or give the pipeline {counted(has, what)}",
            )
    return table
