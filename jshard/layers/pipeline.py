"""Run a pipeline by its schedule: one loop over the ticks of a table, inside a shard_map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.jaxprs import bare
from jshard.layers.partition.part import vary
from jshard.provenance import scope
from jshard.schedules import Table
from jshard.schedules.steps import NONE, steps

Tree = Any


class Model(NamedTuple):
    """A model in three parts, each a function of this device's arrays: of an input to the first stage's, `first(edges, input)`;
    through one chunk of layers, `chunk(parameters, x)`, to an array like x; and the loss of one microbatch, summed over devices
    where its rows are split, `last(edges, y, target)`."""

    first: Callable[[Tree, Tree], Array]
    chunk: Callable[[Tree, Array], Array]
    last: Callable[[Tree, Array, Tree], Array]


def pipeline(
    table: Table, model: Model, parameters: Tree, edges: Tree, inputs: Tree, targets: Tree, *, mesh_axis: str
) -> tuple[Array, Tree, Tree]:
    """Return the mean loss of all microbatches, and its gradients by `parameters` and by `edges`, inside a shard_map.

    A leaf of `parameters` has the chunks of this stage along its first axis; `edges` are on all stages, and so are `inputs` and
    `targets`, which have the microbatches along theirs. A stage keeps the inputs of its chunks, as many as the table says, and
    computes a chunk again for its backward. What goes on to the next stage is one permute a tick and direction, in the ticks
    in which any stage has something to send; gradients are summed over the mesh axes that rows are split over, and those of
    `edges` over `mesh_axis`, once.
    """
    plan, stage = steps(table), lax.axis_index(mesh_axis)
    assert lax.axis_size(mesh_axis) == table.stages, (mesh_axis, table)
    chunks, separate = table.virtual_stages // table.stages, table.splits_weights
    assert all(leaf.shape[0] == chunks for leaf in jax.tree.leaves(parameters)), chunks
    over = frozenset().union(
        {mesh_axis}, *(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves((inputs, targets)))
    )
    own = jax.tree.map(lambda x: over - jax.typeof(x).mat.varying, (parameters, edges))
    parameters, edges, inputs, targets = jax.tree.map(lambda x: vary(x, over), (parameters, edges, inputs, targets))
    x = _type_between(model, _at(parameters, 0), edges, _at(inputs, 0))
    right = [(n, (n + 1) % table.stages) for n in range(table.stages - (chunks == 1))]
    left = [(there, here) for here, there in right]

    def sent(x: Array, pairs: list[tuple[int, int]], any_sends: Array) -> Array:
        """Pass on to a neighbour, in ticks in which any stage has something for one: all devices know."""
        return lax.cond(any_sends, lambda x: lax.ppermute(x, mesh_axis, pairs), lambda x: jnp.zeros_like(x), x)

    def read(x: Array, edges: Tree, now: dict[str, Array], slot: str) -> Array:
        """The input of a chunk: what came from the stage before, or of the first one, what the batch is made into."""
        number = now[f"{slot}_microbatch"]
        batch = now[f"{slot}_input"] == NONE
        return lax.cond(batch, lambda: vary(model.first(edges, _at(inputs, number)), x_varies), lambda: x)

    x_varies = jax.typeof(x).mat.varying

    def forward(now: dict[str, Array], kept: Array) -> Array:
        return model.chunk(_at(parameters, now["F_chunk"]), read(_at(kept, now["F_input"]), edges, now, "F"))

    def backward(now: dict[str, Array], kept: Array, gradients: Array, sums: Any) -> Any:
        own = _at(parameters, now["B_chunk"])

        def run(own: Tree, edges: Tree, x: Array) -> Array:
            return model.chunk(own, read(x, edges, now, "B"))

        def of_loss(y: Array) -> Any:
            target = _at(targets, now["B_microbatch"])
            value, (by_edges, by_y) = jax.value_and_grad(model.last, (0, 1))(edges, y, target)
            return value.astype(jnp.float32), by_edges, by_y

        def of_gradient(y: Array) -> Any:
            return (
                vary(jnp.zeros(()), frozenset({mesh_axis})),
                jax.tree.map(jnp.zeros_like, edges),
                _at(gradients, now["B_gradient"]),
            )

        by_x = _at(kept, now["B_input"])
        if separate:
            y, pull = jax.vjp(lambda x: run(own, edges, x), by_x)
        else:
            y, pull = jax.vjp(run, own, edges, by_x)
        value, by_edges, by_y = lax.cond(now["B_gradient"] == NONE, of_loss, of_gradient, y)
        by_own, by_first, by_x = (None, None, *pull(by_y)) if separate else pull(by_y)
        total, sums, sums_of_edges = sums
        sums_of_edges = jax.tree.map(jnp.add, sums_of_edges, by_edges)
        if not separate:
            sums, sums_of_edges = _added(sums, now["B_chunk"], by_own), jax.tree.map(jnp.add, sums_of_edges, by_first)
        return by_x, by_y, (total + value, sums, sums_of_edges)

    def weights(now: dict[str, Array], kept: Array, gradients: Array, sums: Any) -> Any:
        total, sums, sums_of_edges = sums
        x = _at(kept, now["W_input"])
        _, pull = jax.vjp(
            lambda own, edges: model.chunk(own, read(x, edges, now, "W")), _at(parameters, now["W_chunk"]), edges
        )
        by_own, by_first = pull(_at(gradients, now["W_gradient"]))
        return total, _added(sums, now["W_chunk"], by_own), jax.tree.map(jnp.add, sums_of_edges, by_first)

    def tick(carry: Any, columns: dict[str, Array]) -> tuple[Any, None]:
        kept, gradients, sums = carry
        now = {name: column[stage] for name, column in columns.items()}
        y = lax.cond(now["F_microbatch"] != NONE, lambda: forward(now, kept), lambda: jnp.zeros_like(x))
        arrives = sent(y, right, (columns["F_arrives"] != NONE).any())
        by_x, by_y, sums = lax.cond(
            now["B_microbatch"] != NONE,
            lambda: backward(now, kept, gradients, sums),
            lambda: (jnp.zeros_like(x), jnp.zeros_like(x), sums),
        )
        with scope(phase="backward"):
            comes_back = sent(by_x, left, (columns["B_arrives"] != NONE).any())
        if separate:
            gradients = _put(gradients, now["B_loss"], by_y)
            sums = lax.cond(now["W_microbatch"] != NONE, lambda: weights(now, kept, gradients, sums), lambda: sums)
        return (_put(kept, now["F_arrives"], arrives), _put(gradients, now["B_arrives"], comes_back), sums), None

    def buffer(places: int) -> Array:
        """One place more than is needed, for what arrives where nothing is due."""
        return vary(jnp.zeros((places + 1, *x.shape), x.dtype), x_varies)

    zero = vary(jnp.zeros(()), frozenset({mesh_axis})), *jax.tree.map(jnp.zeros_like, (parameters, edges))
    columns = {name: jnp.array(column, jnp.int32) for name, column in plan.columns.items()}
    (_, _, (total, *sums)), _ = lax.scan(tick, (buffer(plan.inputs), buffer(plan.gradients), zero), columns)
    with scope(phase="backward"):
        of_chunks, of_edges = jax.tree.map(
            lambda sum, names: (lax.psum(sum, tuple(sorted(names))) if names else sum) / table.microbatches,
            tuple(sums),
            own,
        )
    return lax.psum(total, mesh_axis) / table.microbatches, of_chunks, of_edges


def _at(tree: Tree, number: Array | int) -> Tree:
    """One of those along the first axis; the last one where there is none, which nothing then uses."""
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, jnp.where(number < 0, len(x) - 1, number), keepdims=False), tree
    )


def _put(buffer: Array, place: Array, x: Array) -> Array:
    return lax.dynamic_update_index_in_dim(buffer, x, jnp.where(place == NONE, len(buffer) - 1, place), 0)


def _added(sums: Tree, chunk: Array, gradients: Tree) -> Tree:
    return jax.tree.map(lambda all_chunks, own: all_chunks.at[chunk].add(own), sums, gradients)


def _type_between(model: Model, own: Tree, edges: Tree, given: Tree) -> Array:
    """What goes from stage to stage, as zeros of its shape that vary over the mesh axes that it varies over."""

    def traced(f: Callable[..., Array], *args: Any) -> Array:
        aval = bare(jax.make_jaxpr(f)(*args)).outvars[0].aval
        return vary(jnp.zeros(aval.shape, aval.dtype), aval.mat.varying)

    x = traced(model.first, edges, given)
    y = traced(model.chunk, own, x)
    assert (x.shape, x.dtype) == (y.shape, y.dtype), (x, y)
    return vary(x, jax.typeof(y).mat.varying)
