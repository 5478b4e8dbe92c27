"""Pipelines run by their tables, held against the model on one device, in loss and gradients."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jshard.layers.pipeline.ticks import Model, run_table
from jshard.programs.jaxprs import equations
from jshard.schedules import KINDS, generate, read

WIDTH, HIDDEN, WORDS, ROWS, MICROBATCHES = 8, 16, 11, 4, 6


def model(tensor: str | None = None, data: str | None = None, *, recomputes: bool = False) -> Model:
    """Words looked up, layers, and logits by the same table."""

    def chunk(parameters, edges, x, given, number):
        h = jax.nn.relu(x @ parameters["up"])
        y = h @ parameters["down"]
        return x + parameters["scale"] * (lax.psum(y, tensor) if tensor else y)

    def last(edges, y, given):
        targets, logits = given[1], y @ edges["words"].T
        loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1))
        return (lax.pmean(loss, data) if data else loss), ()

    return Model(lambda edges, given: edges["words"][given[0]], chunk, last, False, recomputes)


def arrays(virtual_stages: int):
    draw = np.random.default_rng(0)
    parameters = {
        "up": draw.normal(size=(virtual_stages, WIDTH, HIDDEN)) * 0.3,
        "down": draw.normal(size=(virtual_stages, HIDDEN, WIDTH)) * 0.3,
        "scale": 1 + draw.normal(size=(virtual_stages, WIDTH)) * 0.1,
    }
    edges = {"words": draw.normal(size=(WORDS, WIDTH))}
    batch = draw.integers(0, WORDS, (2, MICROBATCHES, ROWS))
    return *jax.tree.map(lambda x: np.asarray(x, np.float32), (parameters, edges)), batch


@functools.cache
def on_one_device(virtual_stages: int):
    parameters, edges, (inputs, targets) = arrays(virtual_stages)
    first, chunk, last, *_ = model()

    def loss(parameters, edges):
        def of_one(words, target):
            given = words, target
            x, _ = lax.scan(lambda x, own: (chunk(own, edges, x, given, 0), None), first(edges, given), parameters)
            return last(edges, x, given)[0]

        return jnp.mean(jax.vmap(of_one)(inputs, targets))

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, (0, 1)))(parameters, edges))


def program(table, sizes: dict[str, int], *, recomputes: bool = False):
    """The table's step as a jitted function, and arrays for it, placed."""
    chunks = table.virtual_stages // table.stages
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Explicit,) * len(sizes))
    tensor, data = (name if name in sizes else None for name in ("tensor", "data"))
    parameters, edges, (inputs, targets) = arrays(table.virtual_stages)
    parameters = jax.tree.map(lambda x: x.reshape(chunks, table.stages, *x.shape[1:]), parameters)
    at_rest = {"up": P(None, "stage", None, tensor), "down": P(None, "stage", tensor), "scale": P(None, "stage")}
    specs = at_rest, {"words": P()}, P(None, data), P(None, data)

    def body(parameters, edges, inputs, targets):
        own = jax.tree.map(lambda x: x[:, 0], parameters)
        parts = model(tensor, data, recomputes=recomputes)
        loss, own, edges, _ = run_table(table, parts, own, edges, (inputs, targets), mesh_axis="stage")
        return loss, jax.tree.map(lambda x: x[:, None], own), edges

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), at_rest, {"words": P()})))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    given = jax.tree.map(put, (parameters, edges, inputs, targets), specs, is_leaf=lambda x: isinstance(x, np.ndarray))
    return f, given


def check(table, sizes, *, recomputes=False):
    f, given = program(table, sizes, recomputes=recomputes)
    loss, by_parameters, by_edges = f(*given)
    for path, x in by_parameters.items():
        assert x.sharding.is_equivalent_to(given[0][path].sharding, x.ndim), path
    by_parameters = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), by_parameters)
    want, gradients = on_one_device(table.virtual_stages)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    # as exactly as the largest number allows: eight chunks' gradients reach 13, and processors round each their own way
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * max(1, np.abs(b).max()))
    jax.tree.map(near, (by_parameters, by_edges), gradients)
    return f, given


@pytest.mark.quick("4-zero_bubble")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [{"stage": 2, "tensor": 2, "data": 2}, {"stage": 4, "tensor": 2}], ids=["2", "4"])
def test_pipeline_computes_what_one_device_does(kind, sizes):
    check(generate(kind, sizes["stage"], MICROBATCHES), sizes)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_pipeline_that_computes_its_chunks_again_computes_what_one_device_does(kind):
    check(generate(kind, 2, MICROBATCHES), {"stage": 2, "tensor": 2, "data": 2}, recomputes=True)


MINE = """
F0  F1 .    F2   F3   .    B0  F4B1 F5 W0 B2 B3W1 W2 W3 B4 B5 W4 W5
.   F0 F1B0 .    F2B1 F3B2 W1  B3W0 F4 W2 F5B4 B5 W3 W4 W5
"""


@pytest.mark.seconds
@pytest.mark.parametrize("chunks", [2, 3])
def test_pipeline_runs_a_table_of_mine_and_any_number_of_chunks(chunks):
    check(read(MINE, "mine.txt"), {"stage": 2, "tensor": 2})
    check(generate("zero_bubble", 2, MICROBATCHES, chunks), {"stage": 2})
    check(generate("1f1b", 1, MICROBATCHES, chunks), {"stage": 1, "tensor": 2})


# one place more than is needed lies in what arrives where nothing is due: inputs, gradients, and outputs of the last chunk
PLACES = {
    ("gpipe", True): [7, 2], ("1f1b", True): [6, 2], ("interleaved", True): [10, 2], ("zero_bubble", True): [7, 5],
    ("gpipe", False): [2, 2, 6, 6, 6, 6, 7], ("1f1b", False): [2, 2, 6, 6, 6, 6, 2],
    ("interleaved", False): [2, 2, 10, 10, 10, 10, 2], ("zero_bubble", False): [2, 5, 6, 6, 6, 6, 4, 4, 2],
}  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize(("kind", "recomputes"), PLACES, ids=str)
def test_pipeline_asks_for_a_permute_a_direction_and_keeps_what_the_table_says(kind, recomputes):
    """And multiplies once for each product of a model and its gradient; unless it computes its chunks again."""
    table = generate(kind, 4, MICROBATCHES)
    f, given = program(table, {"stage": 4, "tensor": 2}, recomputes=recomputes)
    found = list(equations(jax.make_jaxpr(f)(*given)))
    count = Counter(eqn.primitive.name for eqn in found)
    assert (count["ppermute"], count["scan"]) == (2, 1)
    (loop,) = (eqn for eqn in found if eqn.primitive.name == "scan")
    buffers = [v.aval.shape[0] for v in loop.outvars if v.aval.shape[1:2] == (ROWS,)]
    # the first chunk of the first stage reads the batch; gradients wait for the next tick at least
    assert buffers == PLACES[kind, recomputes]
    # beside them what B sends, the loss, and the sums of four gradients: no parameter lies there
    assert len(loop.outvars) == len(buffers) + 1 + 1 + 4
    head, of_chunk = 3, 3 * 2
    again = (
        {"zero_bubble": 2 + 2 + 1}.get(kind, 2) if recomputes else 0
    )  # W finds the gradient between its products too
    assert count["dot_general"] == head + of_chunk + again
