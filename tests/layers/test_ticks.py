"""A small model run by tables of all kinds: what comes of it, and what is told of each branch and permute of a tick."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jshard.layers.pipeline.ticks import Model, Slot, run_table, slot_p
from jshard.programs.jaxprs import equations
from jshard.programs.provenance import said
from jshard.schedules import generate, read

WIDTH, ROWS, MICROBATCHES = 3, 2, 4
BACK = "F0 F1 F2 F3 B0 . B3 B2 B1\n. F0B0 F1 F2 F3 B3 B2 B1 ."  # the last microbatch comes back before others
# between two outputs and their backwards the last stage runs a chunk that is not the last
LATE = "F0 F1 F0.1 F1.1 F2 F3 F2.1 F3.1 B0.1 B1.1 . . B2.1 B3.1 B0 B1 B2 B3\n. F0 F1 F0.1 F1.1 F2 F3 B0.1 B1.1 F2.1 F3.1 B2.1 B3.1 B0 B1 B2 B3"
TABLES = {
    "mine": read(BACK, "mine.txt"),
    "late": read(LATE, "late.txt"),
    "gpipe": generate("gpipe", 2, MICROBATCHES),
    "interleaved": generate("interleaved", 2, MICROBATCHES),
    "zero_bubble": generate("zero_bubble", 3, MICROBATCHES),
    "zero_bubble, 2 chunks": generate("zero_bubble", 2, MICROBATCHES, 2),
}


def model(shares=False, recomputes=False, loops=False):
    """All that a part is given counts in it, and with `loops` a parameter goes through a loop that nothing else does. Where it shares, weight gradients of zeros, by which they divide, are no numbers."""

    def chunk(own, edges, x, given, number):
        if loops:
            own = {**own, "scale": jax.lax.scan(lambda w, _: (jnp.sin(w), None), own["scale"], None, length=2)[0]}
        y = jnp.tanh(x * own["scale"] + 0.1 * number) * (own["last"] * (1 + number)) + 0.1 * given["x"]
        return (y + 0.1 * own["scale"] / jnp.cosh(x)) * edges["all"] if shares else y

    def last(edges, x, given):
        return ((x - given["x"]) ** 2 * edges["last"]).mean(), {"seen": given["x"][0] + edges["last"]}

    return Model(lambda edges, given: given["x"] * edges["first"], chunk, last, shares, recomputes, "two each")


def arrays(table):
    draw = lambda *shape: 1 + np.random.default_rng(0).normal(size=shape).astype(np.float32) / 2
    parameters = {"scale": draw(table.virtual_stages, WIDTH), "last": draw(table.virtual_stages, WIDTH) * 2}
    edges = {"first": draw(WIDTH), "all": draw(WIDTH) + 1, "last": draw(WIDTH) - 1}
    return parameters, edges, {"x": draw(MICROBATCHES, ROWS, WIDTH)}


def of_one_device(table, parts, parameters, edges, inputs):
    def loss(parameters, edges):
        total = 0.0
        for number in range(MICROBATCHES):
            given = jax.tree.map(lambda x: x[number], inputs)  # noqa: B023
            x = parts.first(edges, given)
            for at in range(table.virtual_stages):
                x = parts.chunk(jax.tree.map(lambda x: x[at], parameters), edges, x, given, at)  # noqa: B023
            value, behind = parts.last(edges, x, given)
            total += value
        return total / MICROBATCHES, behind

    (value, behind), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, edges)
    return value, *gradients, behind


def run(table, parts, **by):
    """The step of a table, and its arrays as they lie on the stages."""
    mesh = jax.make_mesh((table.stages,), ("stage",))
    parameters, edges, inputs = arrays(table)
    specs = P(None, "stage"), P(), P()

    def body(parameters, edges, inputs):
        own = jax.tree.map(lambda x: x[:, 0], parameters)
        loss, own, edges, behind = run_table(table, parts, own, edges, inputs, mesh_axis="stage", **by)
        return loss, jax.tree.map(lambda x: x[:, None], own), edges, behind

    step = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), P(None, "stage"), P(), P()))
    parameters = jax.tree.map(lambda x: x.reshape(-1, table.stages, WIDTH), parameters)
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    return step, [put(tree, spec) for tree, spec in zip((parameters, edges, inputs), specs, strict=True)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("table, how", [
    ("gpipe", {}), ("gpipe", {"recomputes": True, "shares": True}), ("interleaved", {"shares": True}),
    ("zero_bubble", {}), ("zero_bubble", {"loops": True}), ("late", {}), ("mine", {"recomputes": True}), ("zero_bubble", {"shares": True}), ("zero_bubble, 2 chunks", {}),
], ids=str)  # fmt: skip
def test_a_table_computes_what_one_device_does(table, how):
    table, parts = TABLES[table], model(**how)
    step, given = run(table, parts)
    value, of_chunks, of_edges, behind = jax.jit(step)(*given)
    of_chunks = jax.tree.map(lambda x: np.asarray(x).reshape(-1, WIDTH), of_chunks)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(near, (value, of_chunks, of_edges, behind), of_one_device(table, parts, *arrays(table)))


def equations_of(table, parts):
    step, given = run(table, parts, claim="layers")
    return [*equations(jax.make_jaxpr(step)(*given))]


# in their order: a branch by how often each stage goes into it, and in how many ticks; a permute by how often, and by a stage
TOLD = {  # B, F, the first of a microbatch, F's; B, its loss, the gradient of the first; W
    ("gpipe", False): "backward 4 by 4, 4 of 5, 4 0 of 4, 4 by 4, backward 4 of 5, 0 4 of 4, 4 0 of 4",
    ("interleaved", False): "backward 12 by 8, 8 of 9, 4 0 of 4, 12 by 8, backward 8 of 9, 0 4 of 4, 4 0 of 4",
    ("zero_bubble", True): "backward 8 by 4, 4 of 6, 4 0 0 of 4, 8 by 4, backward 4 of 6, 4 0 0 of 4, 0 0 4 of 4, 4 0 0 of 4, "
    "backward 4 of 4, 4 0 0 of 4",
}  # fmt: skip


@pytest.mark.parametrize(("table", "recomputes"), TOLD, ids=str)
def test_it_is_told_how_often_a_stage_goes_into_a_branch_and_sends(table, recomputes):
    found = []
    for eqn in equations_of(TABLES[table], model(recomputes=recomputes)):
        stack, name = eqn.source_info.name_stack.stack, eqn.primitive.name
        if name in ("cond", "ppermute"):
            claim, phase, times, turns, each = map(
                functools.partial(said, stack), ("claim", "phase", "times", "turns", "each")
            )
            assert claim == ("layers" if name == "ppermute" else "")
            found.append(f"{phase} {times} {'of ' if turns else 'by ' if each else ''}{turns or each}".strip())
    assert found == [each.strip() for each in TOLD[table, recomputes].split(",")]


@pytest.mark.parametrize(("table", "pairs"), [("zero_bubble", [(0, 1), (1, 2)]), ("interleaved", [(0, 1), (1, 0)])])
def test_chunks_go_around_all_stages_and_one_of_each_from_the_first_to_the_last(table, pairs):
    found = [eqn.params["perm"] for eqn in equations_of(TABLES[table], model()) if eqn.primitive.name == "ppermute"]
    assert sorted(map(sorted, found)) == sorted([sorted((there, here) for here, there in pairs), pairs])


@pytest.mark.parametrize(("table", "recomputes", "kept", "left"), [
    ("gpipe", False, 72, 0), ("zero_bubble", True, 0, 0), ("zero_bubble", False, 72, 24),
])  # fmt: skip
def test_the_table_of_a_loop_over_ticks_is_marked(table, recomputes, kept, left):
    """With what a stage keeps of a microbatch, in bytes: x, a tanh, what that is multiplied by; and the gradient of it for W."""
    slots = [eqn.params for eqn in equations_of(TABLES[table], model(recomputes=recomputes)) if eqn.primitive is slot_p]
    assert [each["slot"] for each in slots] == [Slot(TABLES[table], "stage", "two each", kept, left)]
