"""Gathers and scatters by permutes, alone and around a product, against XLA's own: value, gradient and bytes, on any device."""

from __future__ import annotations

import collections
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jshard
from jshard import kernels
from jshard.inspect.plan import explain
from jshard.programs.jaxprs import equations

pytestmark = pytest.mark.usefixtures("nothing_loaded")

OPS = {
    "all_gather": lambda x, w, axes, axis, how: kernels.all_gather(x, axes, axis=axis, algorithm=how),
    "reduce_scatter": lambda x, w, axes, axis, how: kernels.reduce_scatter(x, axes, axis=axis, algorithm=how),
    "all_gather_matmul": lambda x, w, axes, axis, how: kernels.all_gather_matmul(x, w, axes, axis=axis, algorithm=how),
    "matmul_reduce_scatter": lambda x, w, axes, axis, how: kernels.matmul_reduce_scatter(
        x, w, axes, axis=axis, algorithm=how
    ),
}
# mesh, mesh axes, array axis, dtype
CASES = [
    ({"t": 2}, "t", 0, "float32"),
    ({"t": 3}, "t", 1, "bfloat16"),
    ({"d": 2, "t": 4}, "t", 0, "float32"),
    ({"d": 2, "t": 3}, ("d", "t"), 1, "float32"),
    ({"t": 8}, "t", 0, "float32"),
]


def integers(*shape, dtype="float32", by=7):
    return (np.arange(int(np.prod(shape))) * by % 5 - 2).reshape(shape).astype(jnp.dtype(dtype))


def split(here, x):
    return jax.device_put(x, jax.NamedSharding(here, P(tuple(here.axis_names))))


@pytest.mark.quick("all_gather-2-t", "matmul_reduce_scatter-2-t")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'x'.join(map(str, case[0].values()))}-{case[1]}")
@pytest.mark.parametrize("name", OPS)
def test_it_gives_what_xla_gives_in_value_and_gradient_and_sends_as_much(mesh, name, case):
    sizes, axes, axis, dtype = case
    here, names = mesh(**sizes), tuple(sizes)
    n = int(np.prod([sizes[each] for each in axes]))
    rows = [3, 2, 4]
    if "reduce_scatter" in name:
        rows[axis] *= n
    x = split(here, integers(here.size, *rows, dtype=dtype))
    w = split(here, integers(here.size, 4, 5, dtype=dtype, by=3))

    def program(how):
        def body(x, w):
            y, pull = jax.vjp(lambda x, w: OPS[name](x[0], w[0], axes, axis, how), x, w)
            return y[None], *pull((jnp.abs(y) % 3 + lax.axis_index(names)).astype(y.dtype) - 1)

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P(names), out_specs=P(names)))

    for ours, theirs in zip(program("permute")(x, w), program("xla")(x, w), strict=True):
        assert ours.dtype == theirs.dtype and ours.sharding == theirs.sharding
        np.testing.assert_array_equal(ours, theirs)
    asked = {how: explain(program(how), x, w) for how in ("permute", "xla")}
    assert {line.collective for line in asked["permute"].lines} == {"permute"}
    assert asked["permute"].total == asked["xla"].total


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("sizes", "chip", "permutes"),
    [({"t": 8}, None, 7), ({"t": 8}, "v5e", 1 + 3), ({"t": 8}, "v5p", 3), ({"d": 2, "t": 4}, "v5e", 3)],
)
def test_all_of_a_slice_of_tpus_is_gone_round_along_each_axis_of_its_torus(mesh, sizes, chip, permutes):
    """8 of v5e are 2 x 4, of v5p 2 x 2 x 2; 4 of 8 are a ring."""
    here = mesh(**sizes)
    x = split(here, integers(here.size, 8, 3))

    def program(how):
        def body(x):
            part = kernels.reduce_scatter(x[0], "t", algorithm=how)
            return kernels.all_gather(part * part, "t", algorithm=how)[None], part

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P((*sizes,)), out_specs=P((*sizes,))))

    with contextlib.nullcontext() if chip is None else kernels.interpret(chip=chip):
        for ours, theirs in zip(program("permute")(x), program("xla")(x), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        asked = explain(program("permute"), x)
        assert sum(line.count for line in asked.lines) == 2 * 2 * permutes  # and their gradients
        assert asked.total == explain(program("xla"), x).total


@pytest.mark.parametrize(
    ("sizes", "chip", "groups"),
    [
        ({"t": 8}, None, [8]), ({"t": 8}, "v5e", [4, 2]), ({"t": 8}, "v5p", [2, 2, 2]), ({"d": 2, "t": 4}, "v5e", [4]),
        ({"d": {"size": 2, "over": "dcn"}, "t": 4}, "v5e", [2, 2]),
    ],
)  # fmt: skip
def test_by_torus_xla_gathers_along_each_axis_of_a_slice(sizes, chip, groups):
    jshard.load({"jshard": {"mesh": sizes}})
    here = jshard.mesh()
    x = split(here, integers(here.size, 3, 5))

    def program(how):
        def body(x):
            y, pull = jax.vjp(lambda x: kernels.all_gather(x, "t", axis=1, algorithm=how), x)
            return y, *pull(y * (1 + lax.axis_index("t")))

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P((*sizes,)), out_specs=P((*sizes,))))

    with contextlib.nullcontext() if chip is None else kernels.interpret(chip=chip):
        for ours, theirs in zip(program("torus")(x), program("xla")(x), strict=True):
            assert ours.sharding == theirs.sharding
            np.testing.assert_array_equal(ours, theirs)
        asked = explain(program("torus"), x)
        assert asked.total == explain(program("xla"), x).total
        traced = equations(jax.make_jaxpr(program("torus"))(x))
    found = [eqn.params for eqn in traced if eqn.primitive.name == "all_gather"]
    assert [each["axis_size"] for each in found] == groups
    assert sum(line.count for line in asked.lines if line.collective == "all_gather") == len(groups)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", OPS)
def test_half_of_the_hops_go_each_way(mesh, name, n):
    """All one way round the values and bytes would be the same, and the time twice as long."""
    here = mesh(t=n)
    body = lambda x, w: OPS[name](x, w, "t", 0, "permute")
    jaxpr = jax.make_jaxpr(jax.shard_map(body, mesh=here, in_specs=P(), out_specs=P("t"), check_vma=False))
    perms = [eqn.params["perm"] for eqn in equations(jaxpr(integers(n, 4), integers(4, 5))) if "perm" in eqn.params]
    shifts = collections.Counter((target - source) % n for ((source, target), *_) in perms)
    assert shifts == collections.Counter([1] * (n // 2) + [n - 1] * ((n - 1) // 2))


def test_what_says_invariant_is(mesh):
    here = mesh(t=4)

    def body(x):
        y, pull = jax.vjp(lambda x: kernels.all_gather(x, "t", result="invariant", algorithm="permute"), x)
        return y, pull(y * 2)[0]

    x = split(here, integers(4, 5))
    y, pulled = jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=(P(), P("t"))))(x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(pulled, 2 * np.asarray(x))


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_int8_is_multiplied_as_xla_does_into_int32(mesh, name):
    here = mesh(t=2)
    x = split(here, integers(8, 8, dtype="int8"))

    def run(how, dtype):
        def body(x):
            more = {"out_dtype": jnp.int32} if how == "permute" else {}
            return getattr(kernels, name)(x.astype(dtype), x.T.astype(dtype), "t", algorithm=how, **more)

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P("t")))(x)

    ours = run("permute", "int8")
    assert ours.dtype == jnp.int32
    np.testing.assert_array_equal(ours, run("xla", "int32"))


def test_a_mesh_that_is_partly_the_partitioners_is_no_hindrance(mesh):
    here, w = mesh(t=2, d=2, axis_types="auto"), integers(4, 4, by=3)
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):

        def run(how, name=name):
            body = lambda x: getattr(kernels, name)(x, w, "t", algorithm=how)
            return jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P("t"), axis_names={"t"}))(
                integers(8, 4)
            )

        np.testing.assert_array_equal(run("permute"), run("xla"))


def test_a_batch_of_weights_is_multiplied(mesh):
    here, w = mesh(t=2), integers(3, 4, 5, by=3)
    x = split(here, integers(2, 6, 4))

    def run(how):
        def body(x, w):
            return jax.vmap(lambda w: kernels.all_gather_matmul(x[0], w, "t", algorithm=how))(w)[None]

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=(P("t"), P()), out_specs=P("t")))(x, w)

    np.testing.assert_array_equal(run("permute"), run("xla"))


def test_sums_are_rounded_where_they_pass(mesh):
    """1 + 2**-8 + 2**-8 in bfloat16: one's own and what comes from the right first, then what comes from the left."""
    here, small = mesh(t=3), 2.0**-8
    x = split(here, np.array([[1, 1, small], [small, small, 1], [small, small, small]], jnp.bfloat16).reshape(9))

    def run(how):
        body = lambda x: kernels.reduce_scatter(x, "t", algorithm=how)
        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P("t")))(x)

    assert run("in_order").tolist() == [1 + 2 * small] * 3
    assert run("permute").tolist() == [1, 1 + 2 * small, 1 + 2 * small]

    def product(x):
        return kernels.matmul_reduce_scatter(x[:, None], jnp.ones((1, 1), x.dtype), "t", axis=0, algorithm="permute")

    wide = jax.jit(jax.shard_map(product, mesh=here, in_specs=P("t"), out_specs=P("t")))(x)
    assert wide[:, 0].tolist() == [1 + 2 * small] * 3  # one's own part is rounded with the sum


LAYERS = {
    "sequence, column": ({"column": "t", "sequence": "t"}, ["all_gather_matmul"]),
    "sequence, reduction": ({"reduction": "t", "sequence": "t", "row": "d"}, ["matmul_reduce_scatter"]),
    "store": ({"row": "d", "store": "d"}, ["all_gather", "reduce_scatter"]),
    "output": ({"reduction": "t", "output": "scatter"}, ["reduce_scatter"]),
}


@pytest.mark.quick("output")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_it_by_yaml(name):
    signal, ops = LAYERS[name]
    x = integers(8, 4, 8)

    def made(kernel):
        jshard.load({"jshard": {"mesh": {"d": 2, "t": 4}}, "layer": signal | {"kernel": dict.fromkeys(ops, kernel)}})
        with jshard.signal("layer"):
            graph, state = nnx.split(jshard.Linear(8, 16, rngs=nnx.Rngs(0)))

        def forward(state, x):
            with jshard.signal("layer"):
                return nnx.merge(graph, state)(x)

        def run(state, x):
            y, pull = jax.vjp(forward, state, x)
            return y, *pull(jnp.sign(y) + jnp.round(y))

        whole = lambda p: jax.device_put(integers(*p.shape), p.sharding)
        state = jax.tree.map(whole, state)
        return jax.jit(run)(state, x), explain(run, state, x)

    (ours, asked), (theirs, plain) = made("permute"), made("xla")
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    jax.tree.map(lambda a, b: (a.sharding == b.sharding) or pytest.fail(f"{a.sharding}, {b.sharding}"), ours, theirs)
    moved = {line.collective for line in plain.lines} - {line.collective for line in asked.lines}
    assert asked.total == plain.total and moved and "permute" in {line.collective for line in asked.lines}
    assert {line.cause.signal for line in asked.lines} == {"layer"}
