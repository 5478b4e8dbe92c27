"""Run a pipeline by its schedule: one loop over the ticks of a table, inside a shard_map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jshard.layers.partition.halves import Place, zeros_like_result
from jshard.layers.partition.part import vary
from jshard.layers.pipeline.residuals import Chunk, Kept
from jshard.programs.jaxprs import Tree
from jshard.programs.provenance import scope
from jshard.schedules import Table, sends
from jshard.schedules.steps import NONE, steps


class Slot(NamedTuple):
    """The table of a loop over ticks. `layers` is the number of layers of each stage, if asked for. `kept` is the
    bytes of a microbatch that a device keeps for the backward of a chunk, besides its input; `left` the bytes that B
    leaves for W."""

    table: Table
    mesh_axis: str
    layers: str = ""
    kept: int = 0
    left: int = 0


# Marks the outputs of slot F, for the ledger and the figures of a run. It compiles to nothing.
slot_p = Primitive("pipeline_slot")
slot_p.multiple_results = True
slot_p.def_abstract_eval(lambda *xs, slot: xs)
mlir.register_lowering(slot_p, lambda _, *xs, slot: xs)


class Buffers(NamedTuple):
    """The values a stage holds between slots, each with an axis of places."""

    inputs: Tree
    gradients: Tree  # of outputs
    kept: Tree = None  # what F keeps for the backward
    left: Tree = None  # what B leaves for W
    outputs: Tree = None  # of the last chunk


class Model(NamedTuple):
    """A model in three parts, each a function of this device's arrays, varying over the mesh axis of stages.

    `edges` are on all stages, and `given` is one microbatch. `first(edges, given)` is the input of the first chunk.
    `chunk(own, edges, x, given, number)` runs a chunk and returns arrays like x; the number counts the chunks before
    it. `last(edges, x, given)` returns the loss, or a vector of the loss and numbers without a gradient, summed over
    devices where its rows are split, and the values left by the microbatch. If `shares` is false a chunk has no
    gradient by `edges`.
    """

    first: Callable[[Tree, Tree], Tree]
    chunk: Callable[[Tree, Tree, Tree, Tree, Array], Tree]
    last: Callable[[Tree, Tree, Tree], tuple[Array, Tree]]
    shares: bool
    recomputes: bool  # each chunk for its backward, of which its input alone is kept
    layers: str = ""  # of each stage, in words


def run_table(
    table: Table, model: Model, parameters: Tree, edges: Tree, inputs: Tree, *, mesh_axis: str, **by: str
) -> tuple[Array, Tree, Tree, Tree]:
    """Return the mean loss of all microbatches, its gradients by `parameters` and `edges`, and the last microbatch's
    values left.

    Call it inside a shard_map. A leaf of `parameters` has the chunks of this stage along its first axis. `edges` are
    on all stages, as are `inputs`, with the microbatches along their first axis. A stage keeps the residuals of its
    chunks for as many microbatches as the table says, or the inputs of its chunks, and computes a chunk again for its
    backward. `by` is the cause of sends. Gradients of values that do not vary over `mesh_axis` are summed over it,
    once.
    """
    chunks = table.virtual_stages // table.stages
    assert lax.axis_size(mesh_axis) == table.stages, (mesh_axis, table)
    assert all(leaf.shape[0] == chunks for leaf in jax.tree.leaves(parameters)), chunks
    staged = frozenset({mesh_axis})
    equal = jax.tree.map(lambda x: not staged & jax.typeof(x).mat.varying, edges)
    parameters, edges, inputs = jax.tree.map(lambda x: vary(x, staged), (parameters, edges, inputs))
    (total, behind), of_chunks, of_edges = _Ticks(table, model, parameters, edges, inputs, mesh_axis, by).run()
    with scope(phase="backward"):
        of_edges = jax.tree.map(lambda x, equal: lax.psum(x, mesh_axis) if equal else x, of_edges, equal)
    of_chunks, of_edges = jax.tree.map(lambda x: x / table.microbatches, (of_chunks, of_edges))
    with scope(**by):
        total, behind = lax.psum((total, behind), mesh_axis)
        return total / table.microbatches, of_chunks, of_edges, behind


class _Ticks:
    """The ticks of a stage: its column of the table, with two permutes in every tick.

        tick t    sends back: B of t - 1  |  slot F  |  sends on: F of t  |  slot B  |  slot W
                  ------------------------------------------------------------------------------
        stage 0   <----- gradient of y ---   x -> y    ------- y ----->     (x, y') -> x'    own'
        stage 1   <----- gradient of y ---   x -> y    ------- y ----->     (x, y') -> x'    own'

    The send of slot F runs beside slot B, which does not need it; the send of slot B beside the next tick's F. The
    first stage reads the batch in its slots F; the last stage computes the loss and its gradient in its slots B.
    """

    def __init__(
        self,
        table: Table,
        model: Model,
        parameters: Tree,
        edges: Tree,
        inputs: Tree,
        mesh_axis: str,
        by: dict[str, str],
    ):
        self.table, self.model, self.mesh_axis, self.by = table, model, mesh_axis, by
        self.parameters, self.edges, self.inputs = parameters, edges, inputs
        self.stage, self.sends = lax.axis_index(mesh_axis), sends(table)
        self.chunks = table.virtual_stages // table.stages
        of_one = _at(parameters, 0), edges, _at(inputs, 0)
        how = {"shares": model.shares, "splits": table.splits_weights, "recomputes": (recomputes := model.recomputes)}
        x, self.x = None, zeros_like_result(model.first, *of_one[1:])  # what goes from stage to stage, as zeros
        while x is None or _varying(x) != _varying(self.x):  # over all mesh axes that a chunk makes it vary over
            x, self.program = self.x, Chunk(self._chunk, (*of_one, self.stage, self.x), **how)
            assert jax.tree.map(_type, x) == jax.tree.map(_type, self.program.y), (x, self.program.y)
            self.x = jax.tree.map(vary, x, _varying(self.program.y))
        stored = () if recomputes else (self.program.kept, self.program.left)
        self.bytes = [sum(x.nbytes for x in jax.tree.leaves(zeros)) for zeros in stored]

    def run(self) -> tuple[Tree, Tree, Tree]:
        """Return the sum of losses with the last microbatch's values left, and the sums of gradients."""
        plan, program, x = steps(self.table, recomputes=self.model.recomputes), self.program, self.x
        total, behind = zeros_like_result(self.model.last, self.edges, x, _at(self.inputs, 0))
        staged = frozenset({self.mesh_axis})
        behind = jax.tree.map(lambda x: vary(x, staged), behind)
        zero = (vary(jnp.zeros(total.shape), staged), behind), *_zeros((self.parameters, self.edges))
        columns = {name: jnp.array(column, jnp.int32) for name, column in plan.columns.items()}
        # one place more than is needed, for what comes where nothing is due
        held = Buffers(_buffer(plan.inputs + 1, x), _buffer(plan.gradients + 1, x))
        if not self.model.recomputes:
            kept, left = _buffer(plan.kept, program.kept), _buffer(plan.left, program.left)
            held = held._replace(kept=kept, left=left, outputs=_buffer(plan.outputs + 1, x))
        (*_, sums), _ = lax.scan(self._tick, (held, _zeros(x), zero), columns)
        return sums

    def _tick(self, carry: Tree, columns: dict[str, Array]) -> tuple[Any, None]:
        held, by_x, sums = carry
        now = {name: column[self.stage] for name, column in columns.items()}
        with scope(phase="backward"):
            comes_back = self._sent(by_x, "B")
        idle = _zeros(self.x), held.kept, held.outputs
        is_due = now["F_microbatch"] != NONE
        y, kept, outputs = self._only(is_due, "F", lambda: self._forward(now, held), lambda: idle)
        held = held._replace(kept=kept, outputs=outputs)
        arrives = self._sent(self._marked(y), "F")
        with scope(phase="backward"):
            held = held._replace(gradients=_put(held.gradients, now["B_arrives"], comes_back))
            by_x, sums, held = self._backward_slots(now, held, sums)
        return (held._replace(inputs=_put(held.inputs, now["F_arrives"], arrives)), by_x, sums), None

    def _backward_slots(self, now: dict[str, Array], held: Buffers, sums: Tree) -> tuple[Tree, Any, Buffers]:
        idle = _zeros(self.x), _zeros(self.x), sums, held.left
        is_due = now["B_microbatch"] != NONE
        by_x, by_y, sums, left = self._only(is_due, "B", lambda: self._backward(now, held, sums), lambda: idle)
        held = held._replace(left=left)
        if self.table.splits_weights:
            held = held._replace(gradients=_put(held.gradients, now["B_loss"], by_y))
            before = sums
            is_due = now["W_microbatch"] != NONE
            sums = self._only(is_due, "W", lambda: self._weights(now, held, before), lambda: before)
        return by_x, sums, held

    # -- slots --

    def _forward(self, now: dict[str, Array], held: Buffers) -> tuple[Tree, Tree, Tree]:
        args = self._called(now, "F")
        x = self._input(now, "F", args[2], held)
        if self.model.recomputes:
            return self._chunk(*args, x), held.kept, held.outputs
        y, kept = self.program.forward((*args, x), _places(held.kept, now["F_kept"]))
        return y, kept, _put(held.outputs, now["F_output"], y)

    def _backward(self, now: dict[str, Array], held: Buffers, sums: Tree) -> Any:
        args = self._called(now, "B")
        y, kept = self._kept(now, "B", args, held)
        (total, behind), sums, of_edges = sums
        given = args[2]

        def of_loss() -> Any:
            out = y if self.model.recomputes else _at(held.outputs, now["B_output"])
            value, back, after = jax.vjp(lambda *x: self.model.last(x[0], x[1], given), self.edges, out, has_aux=True)
            by_edges, by_y = back(jnp.ones_like(value))
            is_last = now["B_microbatch"] == self.table.microbatches - 1
            after = jax.tree.map(lambda new, old: jnp.where(is_last, new, old), after, behind)
            return by_y, (total + value.astype(jnp.float32), after), _plus(of_edges, by_edges)

        def of_gradient() -> Any:
            return _at(held.gradients, now["B_gradient"]), (total, behind), of_edges

        by_y, total, of_edges = self._only(now["B_gradient"] == NONE, self.table.stages - 1, of_loss, of_gradient)
        left = _places(held.left, now["B_left"])
        (by_x, *by_parameters), left = self.program.backward(0, args, kept, by_y, left)
        if not self.table.splits_weights:
            sums, of_edges = _added(sums, of_edges, now["B_chunk"], *by_parameters)

        def of_first() -> Tree:
            return _plus(of_edges, jax.vjp(lambda edges: self._first(edges, given), self.edges)[1](by_x)[0])

        of_edges = self._only(now["B_input"] == NONE, 0, of_first, lambda: of_edges)
        return by_x, by_y, (total, sums, of_edges), left

    def _weights(self, now: dict[str, Array], held: Buffers, sums: Tree) -> Any:
        args = self._called(now, "W")
        _, kept = self._kept(now, "W", args, held)
        by_y, left = _at(held.gradients, now["W_gradient"]), _places(held.left, now["W_left"])
        (_, *by_parameters), _ = self.program.backward(1, args, kept, by_y, left)
        total, sums, of_edges = sums
        return total, *_added(sums, of_edges, now["W_chunk"], *by_parameters)

    # -- what slots have in common --

    def _called(self, now: dict[str, Array], slot: str) -> tuple[Tree, Tree, Tree, Array]:
        """Return a slot's operands, except its input: parameters, edges, microbatch, number of the chunk."""
        number = now[f"{slot}_chunk"] * self.table.stages + self.stage
        own, given = _at(self.parameters, now[f"{slot}_chunk"]), _at(self.inputs, now[f"{slot}_microbatch"])
        return own, self.edges, given, number

    def _chunk(self, own: Tree, edges: Tree, given: Tree, number: Array, x: Tree) -> Tree:
        return self.model.chunk(own, edges, x, given, number)

    def _first(self, edges: Tree, given: Tree) -> Tree:
        return jax.tree.map(vary, self.model.first(edges, given), _varying(self.x))

    def _input(self, now: dict[str, Array], slot: str, given: Tree, held: Buffers) -> Tree:
        place = now[f"{slot}_input"]
        there = _at(held.inputs, place)
        return self._only(place == NONE, 0, lambda: self._first(self.edges, given), lambda: there)

    def _kept(self, now: dict[str, Array], slot: str, args: tuple[Tree, ...], held: Buffers) -> tuple[Tree, Kept]:
        """Return the output of a chunk, and its residuals for this slot, kept or computed again."""
        if self.model.recomputes:
            x = self._input(now, slot, args[2], held)
            with scope(again="remat"):
                return self.program.again("BW".index(slot), (*args, x))
        return None, _places(held.kept, now[f"{slot}_kept"])

    def _sent(self, x: Tree, slot: str) -> Tree:
        """Pass on to a neighbour. It stands in no branch, where XLA would wait for it before it leaves, so that ticks in which
        no stage has something to send move zeros, or what nobody puts anywhere."""
        stages, each = self.table.stages, self.sends[slot]
        onwards = [(n, (n + 1) % stages) for n in range(stages - (self.chunks == 1))]
        pairs = onwards if slot == "F" else [(there, here) for here, there in onwards]
        with scope(**self.by, times=str(sum(each)), each=str(max(each))):
            return lax.ppermute(x, self.mesh_axis, pairs)

    def _only(self, is_here: Array, due: str | int, here: Callable[[], Tree], elsewhere: Callable[[], Tree]) -> Tree:
        """Run `here` in its ticks and on its stages only: in a slot, or, for the batch or the loss, on the stage of
        this number."""
        if isinstance(due, str):
            times = str(self.chunks * self.table.microbatches)
            turns = len({t for key, t in self.table.when.items() if key.slot == due})
        else:
            turns = self.table.microbatches
            times = " ".join(str(turns if number == due else 0) for number in range(self.table.stages))
        with scope(times=times, turns=str(turns)):
            return lax.cond(is_here, here, elsewhere)

    def _marked(self, x: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(x)
        with scope(**self.by):
            slot = Slot(self.table, self.mesh_axis, self.model.layers, *self.bytes)
            return jax.tree.unflatten(tree, slot_p.bind(*leaves, slot=slot))


def _added(sums: Tree, of_edges: Tree, chunk: Array, by_own: Tree, by_edges: Tree = None) -> tuple[Tree, Tree]:
    sums = jax.tree.map(lambda all_chunks, own: all_chunks.at[chunk].add(own), sums, by_own)
    return sums, of_edges if by_edges is None else _plus(of_edges, by_edges)


def _buffer(places: int, zeros: Tree) -> Tree:
    return jax.tree.map(lambda x: vary(jnp.zeros((places, *x.shape), x.dtype), jax.typeof(x).mat.varying), zeros)


def _at(tree: Tree, number: Array | int) -> Tree:
    """Return the entry at an index of the first axis; for NONE the last, unused by any slot."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


def _put(buffer: Tree, place: Array, x: Tree) -> Tree:
    """Write at an index of the first axis; for NONE at the last."""
    return jax.tree.map(lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, place, 0), buffer, x)


def _places(buffers: Tree, number: Array) -> Tree:
    return jax.tree.map(lambda buffer: Place(buffer, number), buffers)


def _plus(sums: Tree, more: Tree) -> Tree:
    return jax.tree.map(jnp.add, sums, more)


def _zeros(tree: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, tree)


def _varying(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.typeof(x).mat.varying, tree)


def _type(x: Array) -> tuple[tuple[int, ...], str]:
    return x.shape, str(x.dtype)
