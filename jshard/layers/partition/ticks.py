"""Run a pipeline by its schedule: one loop over the ticks of a table, inside a shard_map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jshard.layers.partition.halves import Place, traced
from jshard.layers.partition.part import vary
from jshard.layers.partition.residuals import Chunk, Kept
from jshard.programs.provenance import scope
from jshard.schedules import Table, sends
from jshard.schedules.steps import NONE, steps

Tree = Any


class Slot(NamedTuple):
    """What each tick of a table makes: the output of slot F or B, or the sums of weight gradients after it ("sums").
    `layers` says how many layers each stage has, where that was asked for; `kept` how many bytes of a microbatch a device keeps
    for the backward of a chunk beside its input, `left` how many B leaves for W."""

    made: str
    table: Table
    mesh_axis: str
    layers: str = ""
    kept: int = 0
    left: int = 0


# Marks that, so that verify can tell which operation of a table is wrong. It compiles to nothing.
slot_p = Primitive("pipeline_slot")
slot_p.multiple_results = True
slot_p.def_abstract_eval(lambda *xs, slot: xs)
mlir.register_lowering(slot_p, lambda _, *xs, slot: xs)


class Buffers(NamedTuple):
    """What a stage holds from one slot to another, each with an axis of places."""

    inputs: Tree
    gradients: Tree  # of outputs
    kept: Tree = None  # what F keeps for the backward
    left: Tree = None  # what B leaves for W
    outputs: Tree = None  # of the last chunk


class Model(NamedTuple):
    """A model in three parts, each a function of this device's arrays, which vary over the mesh axis of stages.

    `edges` are what all stages have, and `given` is one microbatch: `first(edges, given)` is what goes into the first chunk of
    layers, `chunk(own, edges, x, given, number)` runs one, the number of which says how many are before it, and returns arrays
    like x; `last(edges, x, given)` is the loss, or a vector of it and of numbers without a gradient, summed over devices where
    its rows are split, and what is left behind by the microbatch. Where `shares` is false a chunk has no gradient by `edges`.
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
    """Return the mean loss of all microbatches, its gradients by `parameters` and by `edges`, and what the last microbatch
    leaves behind, inside a shard_map.

    A leaf of `parameters` has the chunks of this stage along its first axis; `edges` are on all stages, and so are `inputs`,
    which have the microbatches along theirs. A stage keeps what its chunks' backwards need, of as many microbatches as the
    table says; or the inputs of its chunks, and computes a chunk again for its backward. What goes on to the next stage is one
    permute a tick and direction, in every tick, beside a slot that does not need it: F's beside slot B, B's beside the next
    tick's F. `by` says who asks for it. Gradients of what does not vary over `mesh_axis` are summed over it, once.
    """
    plan, stage = steps(table, recomputes=model.recomputes), lax.axis_index(mesh_axis)
    assert lax.axis_size(mesh_axis) == table.stages, (mesh_axis, table)
    chunks, separate = table.virtual_stages // table.stages, table.splits_weights
    assert all(leaf.shape[0] == chunks for leaf in jax.tree.leaves(parameters)), chunks
    staged = frozenset({mesh_axis})
    equal = jax.tree.map(lambda x: not staged & jax.typeof(x).mat.varying, edges)
    parameters, edges, inputs = jax.tree.map(lambda x: vary(x, staged), (parameters, edges, inputs))
    x = _types_between(model, _at(parameters, 0), edges, _at(inputs, 0), stage)
    varying = jax.tree.map(lambda x: jax.typeof(x).mat.varying, x)
    slots = sends(table)
    onwards = [(n, (n + 1) % table.stages) for n in range(table.stages - (chunks == 1))]
    backwards = [(there, here) for here, there in onwards]

    def sent(x: Tree, slot: str, pairs: list[tuple[int, int]]) -> Tree:
        """Pass on to a neighbour. It stands in no branch, where XLA would wait for it before it leaves, so that ticks in which
        no stage has something to send move zeros, or what nobody puts anywhere."""
        with scope(**by, times=str(sum(slots[slot])), each=str(max(slots[slot]))):
            return lax.ppermute(x, mesh_axis, pairs)

    def only(is_here: Array, due: str | int, here: Callable[[], Tree], elsewhere: Callable[[], Tree]) -> Tree:
        """Run `here` in the ticks and on the stages in which it is due: in a slot, or, for the batch or the loss, on the stage
        of this number."""
        if isinstance(due, str):
            times = str(chunks * table.microbatches)
            turns = len({t for key, t in table.when.items() if key.slot == due})
        else:
            turns = table.microbatches
            times = " ".join(str(turns if number == due else 0) for number in range(table.stages))
        with scope(times=times, turns=str(turns)):
            return lax.cond(is_here, here, elsewhere)

    def first(edges: Tree, given: Tree) -> Tree:
        return jax.tree.map(vary, model.first(edges, given), varying)

    run = lambda own, edges, given, number, x: model.chunk(own, edges, x, given, number)
    of_chunk = _at(parameters, 0), edges, _at(inputs, 0), stage, x
    program = Chunk(run, of_chunk, shares=model.shares, splits=separate, recomputes=model.recomputes)

    def called(now: dict[str, Array], slot: str) -> tuple[Tree, Tree, Tree, Array]:
        """Return what a slot works on, but for the input: parameters, edges, microbatch, number of the chunk."""
        number = now[f"{slot}_chunk"] * table.stages + stage
        return _at(parameters, now[f"{slot}_chunk"]), edges, _at(inputs, now[f"{slot}_microbatch"]), number

    def input_of(now: dict[str, Array], slot: str, given: Tree, held: Buffers) -> Tree:
        place = now[f"{slot}_input"]
        there = _at(held.inputs, place)
        return only(place == NONE, 0, lambda: first(edges, given), lambda: there)

    def forward(now: dict[str, Array], held: Buffers) -> tuple[Tree, Tree, Tree]:
        args = called(now, "F")
        x = input_of(now, "F", args[2], held)
        if model.recomputes:
            return run(*args, x), held.kept, held.outputs
        y, kept = program.forward((*args, x), _places(held.kept, now["F_kept"]))
        return y, kept, _put(held.outputs, now["F_output"], y)

    def kept_of(now: dict[str, Array], slot: str, args: tuple[Tree, ...], held: Buffers) -> tuple[Tree, Kept]:
        """The output of a chunk, and what is kept of it for this slot, or made again."""
        if model.recomputes:
            x = input_of(now, slot, args[2], held)
            with scope(again="remat"):
                return program.again("BW".index(slot), (*args, x))
        return None, _places(held.kept, now[f"{slot}_kept"])

    def backward(now: dict[str, Array], held: Buffers, sums: Any) -> Any:
        args = called(now, "B")
        y, kept = kept_of(now, "B", args, held)
        (total, behind), sums, of_edges = sums
        given = args[2]

        def of_loss() -> Any:
            out = y if model.recomputes else _at(held.outputs, now["B_output"])
            value, back, after = jax.vjp(lambda *x: model.last(x[0], x[1], given), edges, out, has_aux=True)
            by_edges, by_y = back(jnp.ones_like(value))
            is_last = now["B_microbatch"] == table.microbatches - 1
            after = jax.tree.map(lambda new, old: jnp.where(is_last, new, old), after, behind)
            return by_y, (total + value.astype(jnp.float32), after), _plus(of_edges, by_edges)

        def of_gradient() -> Any:
            return _at(held.gradients, now["B_gradient"]), (total, behind), of_edges

        by_y, total, of_edges = only(now["B_gradient"] == NONE, table.stages - 1, of_loss, of_gradient)
        left = _places(held.left, now["B_left"])
        (by_x, *by_parameters), left = program.backward(0, args, kept, by_y, left)
        if not separate:
            sums, of_edges = added(sums, of_edges, now["B_chunk"], *by_parameters)

        def of_first() -> Tree:
            return _plus(of_edges, jax.vjp(lambda edges: first(edges, given), edges)[1](by_x)[0])

        of_edges = only(now["B_input"] == NONE, 0, of_first, lambda: of_edges)
        return by_x, by_y, (total, sums, of_edges), left

    def weights(now: dict[str, Array], held: Buffers, sums: Any) -> Any:
        args = called(now, "W")
        _, kept = kept_of(now, "W", args, held)
        by_y, left = _at(held.gradients, now["W_gradient"]), _places(held.left, now["W_left"])
        (_, *by_parameters), _ = program.backward(1, args, kept, by_y, left)
        total, sums, of_edges = sums
        return total, *added(sums, of_edges, now["W_chunk"], *by_parameters)

    def added(sums: Tree, of_edges: Tree, chunk: Array, by_own: Tree, by_edges: Tree = None) -> tuple[Tree, Tree]:
        sums = jax.tree.map(lambda all_chunks, own: all_chunks.at[chunk].add(own), sums, by_own)
        return sums, of_edges if by_edges is None else _plus(of_edges, by_edges)

    stored = () if model.recomputes else (program.kept, program.left)
    each = [sum(x.nbytes for x in jax.tree.leaves(zeros)) for zeros in stored]

    def marked(made: str, x: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(x)
        with scope(**by):
            slot = Slot(made, table, mesh_axis, model.layers, *each)
            return jax.tree.unflatten(tree, slot_p.bind(*leaves, slot=slot))

    def tick(carry: Any, columns: dict[str, Array]) -> tuple[Any, None]:
        held, by_x, sums = carry
        now = {name: column[stage] for name, column in columns.items()}
        with scope(phase="backward"):
            comes_back = sent(by_x, "B", backwards)
        idle = _zeros(x), held.kept, held.outputs
        y, kept, outputs = only(now["F_microbatch"] != NONE, "F", lambda: forward(now, held), lambda: idle)
        held = held._replace(kept=kept, outputs=outputs)
        arrives = sent(marked("F", y), "F", onwards)
        with scope(phase="backward"):
            held = held._replace(gradients=_put(held.gradients, now["B_arrives"], comes_back))
            idle = _zeros(x), _zeros(x), sums, held.left
            by_x, by_y, sums, left = only(
                now["B_microbatch"] != NONE, "B", lambda: backward(now, held, sums), lambda: idle
            )
            held = held._replace(left=left)
            by_x = marked("B", by_x)
            if separate:
                held = held._replace(gradients=_put(held.gradients, now["B_loss"], by_y))
                sums = only(now["W_microbatch"] != NONE, "W", lambda: weights(now, held, sums), lambda: sums)
            sums = sums[0], marked("sums", sums[1]), sums[2]
        return (held._replace(inputs=_put(held.inputs, now["F_arrives"], arrives)), by_x, sums), None

    def buffer(places: int, zeros: Tree) -> Tree:
        return jax.tree.map(lambda x: vary(jnp.zeros((places, *x.shape), x.dtype), jax.typeof(x).mat.varying), zeros)

    total, behind = zeros_like_result(model.last, edges, x, _at(inputs, 0))
    behind = jax.tree.map(lambda x: vary(x, staged), behind)
    zero = (vary(jnp.zeros(total.shape), staged), behind), *_zeros((parameters, edges))
    columns = {name: jnp.array(column, jnp.int32) for name, column in plan.columns.items()}
    # one place more than is needed, for what comes where nothing is due
    held = Buffers(buffer(plan.inputs + 1, x), buffer(plan.gradients + 1, x))
    if not model.recomputes:
        kept, left = buffer(plan.kept, program.kept), buffer(plan.left, program.left)
        held = held._replace(kept=kept, left=left, outputs=buffer(plan.outputs + 1, x))
    (*_, ((total, behind), of_chunks, of_edges)), _ = lax.scan(tick, (held, _zeros(x), zero), columns)
    with scope(phase="backward"):
        of_edges = jax.tree.map(lambda x, equal: lax.psum(x, mesh_axis) if equal else x, of_edges, equal)
    of_chunks, of_edges = jax.tree.map(lambda x: x / table.microbatches, (of_chunks, of_edges))
    with scope(**by):
        total, behind = lax.psum((total, behind), mesh_axis)
        return total / table.microbatches, of_chunks, of_edges, behind


def _at(tree: Tree, number: Array | int) -> Tree:
    """One of those along the first axis; the last one where it is NONE, which nothing then uses."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


def _put(buffer: Tree, place: Array, x: Tree) -> Tree:
    """Put it there; where that is NONE, last."""
    return jax.tree.map(lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, place, 0), buffer, x)


def _places(buffers: Tree, number: Array) -> Tree:
    return jax.tree.map(lambda buffer: Place(buffer, number), buffers)


def _plus(sums: Tree, more: Tree) -> Tree:
    return jax.tree.map(jnp.add, sums, more)


def _zeros(tree: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, tree)


def _types_between(model: Model, own: Tree, edges: Tree, given: Tree, stage: Array) -> Tree:
    """What goes from stage to stage, as zeros of its shapes that vary over the mesh axes that it varies over."""
    x = zeros_like_result(model.first, edges, given)
    y = zeros_like_result(model.chunk, own, edges, x, given, stage)
    assert jax.tree.map(_type, x) == jax.tree.map(_type, y), (x, y)
    return jax.tree.map(lambda x, y: vary(x, jax.typeof(y).mat.varying), x, y)


def _type(x: Array) -> tuple[tuple[int, ...], str]:
    return x.shape, str(x.dtype)


def zeros_like_result(f: Callable[..., Tree], *args: Any) -> Tree:
    """Make zeros of the types that `f(*args)` has, inside a shard_map."""
    return traced(f, *args)[1]
