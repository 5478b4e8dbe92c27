"""A loop over layers spread over stages, run by the table of `jshard.pipeline`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.errors import JShardError, multiples
from jshard.layers.balance import Costs, balanced, in_ranges, spelled
from jshard.layers.partition import Program
from jshard.layers.partition.part import Here, Part, Stored, here_of, vary
from jshard.layers.partition.pieces import check_smooth
from jshard.layers.partition.plan import Names, key_of, names_of
from jshard.layers.partition.planner import whole
from jshard.layers.partition.run import SomeLayers
from jshard.layers.partition.stages import Counts, from_chunks, from_stages, to_chunks, to_stages
from jshard.layers.pipeline.cut import Cut
from jshard.layers.pipeline.scheduled import Scheduled
from jshard.layers.pipeline.ticks import Model, run_table
from jshard.layers.remat import CHUNK
from jshard.layouts.layout import Layout
from jshard.layouts.redistribution import Axes
from jshard.programs.flops import arithmetic_of
from jshard.programs.jaxprs import Piece, Tree, pruned
from jshard.programs.provenance import scope
from jshard.schedules.table import counted
from jshard.signals.signal import Signal


class Pipelined(Scheduled):
    """A program with a loop over layers, spread over stages.

    The part before the loop runs on the first stage, the part after it on the last. Parameters outside the loop are
    on all stages, and their gradients are summed over stages, once. Each stage makes the loop's other operands.
    """

    def __init__(self, program: Program, parameters: Sequence[int], variables: Sequence[int], batch: Sequence[int]):
        super().__init__(program, parameters, variables, batch)
        self.of_data = self._made_of_data()
        self.cut, says = Cut(program, self.stage, self.of_data), self.stage.signal
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
        """Return the cost of a microbatch for all devices, and the weight of a layer."""
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
        """Return the variables made from the data alone, without their old values: the last microbatch's stay, as
        without a pipeline."""
        jaxpr, data = self.program.jaxpr, {*self.parameters, *self.batch}
        every = range(len(jaxpr.outvars))
        needs = [pruned(jaxpr, [n == out for n in every]).inputs for out in every[1:]]
        made = [number for number, inputs in enumerate(needs) if not data.isdisjoint(inputs)]
        used = set(pruned(jaxpr, [True] + [number in made for number in range(len(needs))]).inputs)
        return [number for number in made if self.variables[number] not in used]

    def _body(self, marked: Sequence[Names], *xs: Array) -> tuple[Array, list[Array], list[Array]]:
        program, cut, mesh_axis, by = self.program, self.cut, self.stage.mesh_axis, self.stage.by
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
        of = OneStage(self, others)
        shares = any(n in edges for n in cut.each.inputs)
        model = Model(of.first, of.chunk, of.last, shares, self._recomputes(), self.layers_words)
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
        """Return the signals of parameters on stages."""
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
        """Return the axis of a parameter split over stages at rest; None if it is whole on each."""
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
        """Gather parameters split over stages at rest, once: a stage alone cannot. Return them and the scatter of
        their gradients."""
        claim, axis = self.program.inputs[number].claim, self._axis_of_stages(number)
        assert claim is not None and axis is not None
        with scope(claim=claim.signal.name):
            return jax.vjp(lambda x: self._gathered(number, x, axis), x)

    def _gathered(self, number: int, x: Array, axis: int) -> Array:
        part = self.program.part(number, x)
        assert isinstance(part, Stored)
        return part.gather(((axis, self.stage.mesh_axis, True),))


class OneStage:
    """The program of a stage: the input of the first layer, its own layers, and the part after the last."""

    def __init__(self, pipeline: Pipelined, others: dict[int, Array]):
        self.program, self.cut, self.counts, self.layers = (
            pipeline.program,
            pipeline.cut,
            pipeline.counts,
            pipeline.layers,
        )
        self.others, self.run = others, pipeline.program.running()
        self.of_data = [pipeline.variables[at] for at in pipeline.of_data]
        self.plan, lies = pipeline.program.of_one_stage()
        self.lie = {v: lies[v] for v in (*self.cut.carried, *self.cut.left)}

    def first(self, edges: Tree, given: Tree) -> list[Array]:
        """Return the input of the first layer, and room for the values left by all layers."""
        parts, mesh = self._made(self.cut.first, edges, given), self.program.mesh
        room = [jnp.zeros(Layout(mesh, *self.lie[v]).shard_shape(v.aval.shape), v.aval.dtype) for v in self.cut.left]
        return [self._place(part, self.lie[v]) for v, part in zip(self.cut.carried, parts, strict=True)] + room

    def chunk(self, own: Tree, edges: Tree, x: Any, given: Tree, number: Array) -> list[Array]:
        """Run the layers of a chunk, and write the values they leave into their room."""
        cut, counts, some_layers = self.cut, self.counts, None
        made = self._made(cut.each, edges, given)
        some, rest = made[: cut.consts], iter(made[cut.consts :])
        over = [self._some(next(rest), number) if n is None else self._layers_of(n, own[n]) for n in cut.over]
        count, loop = len(cut.carried), cut.of_length(self.layers)
        if not counts.are_equal:
            times = " ".join(map(str, counts.by_stage))
            some_layers = SomeLayers(loop, jnp.array(counts.layers)[number], times)
        run, operands = self.program.running(some_layers), [*some, *self._between(x)[:count], *over]
        parts = run.equation(loop, operands, self.plan[key_of(loop)])
        after = [self._place(part, self.lie[v]) for v, part in zip(cut.carried, parts, strict=False)]
        for v, room in zip(cut.left, x[count:], strict=True):
            part = parts[cut.loop.outvars.index(v)]
            left = self._place(Here((self.layers, *part.shape[1:]), part.axes, part.x), self.lie[v])
            after.append(self._written(room, left, number))
        return after

    def last(self, edges: Tree, x: Any, given: Tree) -> tuple[Array, list[Array]]:
        """Return the loss, and the variables made from the data."""
        value, *left = self._made(self.cut.last, edges, given, self._between(x))
        kept = [self._place(p, self.program.in_axes[n]) for n, p in zip(self.of_data, left, strict=True)]
        return self._place(value, whole(len(value.shape))), kept

    def _made(self, some: Piece, edges: Tree, given: Tree, more: Sequence[Part] = ()) -> list[Part]:
        known = {**self.others, **edges, **given}
        parts = [*(self.program.part_of_stage(n, known[n]) for n in some.inputs), *more]
        return self.run.run(some.jaxpr, parts, self.plan)

    def _place(self, part: Part, axes: Axes) -> Array:
        return self.run.place(part, axes, self.program.claim_behind).x

    def _between(self, xs: Sequence[Array]) -> list[Here]:
        return here_of(self.lie, self.lie.values(), xs)

    def _layers_of(self, number: int, x: Array) -> Here:
        """Return the layers of a chunk, as a parameter with all layers here."""
        part = self.program.part_of_stage(number, x)
        axes, rest = ((), *part.axes[1:]), ((), *part.lies[1:])
        layers = Here((self.layers, *part.shape[1:]), axes, x, signal=part.signal)
        return layers if rest == axes else layers.stored(rest)

    def _some(self, part: Part, number: Array) -> Here:
        """Slice a per-layer operand to a chunk."""
        axes = ((), *part.axes[1:])
        return Here((self.layers, *part.shape[1:]), axes, self._read(self._place(part, axes), number))

    def _read(self, x: Array, number: Array) -> Array:
        """Return a chunk's layers, padded to the longest chunk."""
        if self.counts.are_equal:
            return lax.dynamic_slice_in_dim(x, number * self.layers, self.layers)
        return x[jnp.minimum(jnp.array(self.counts.starts)[number] + jnp.arange(self.layers), len(x) - 1)]

    def _written(self, room: Array, x: Array, number: Array) -> Array:
        """Write a chunk's values into the room for all layers; later chunks overwrite the padding of a short chunk."""
        if self.counts.are_equal:
            return lax.dynamic_update_slice_in_dim(room, x, number * self.layers, 0)
        return room.at[jnp.array(self.counts.starts)[number] + jnp.arange(self.layers)].set(x, mode="drop")
