"""Layers that take kernels by YAML equal the plain ones, in value and gradient; the ledger shows which and how much."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard import kernels
from jshard.algorithms import ALGORITHMS
from jshard.errors import JShardError
from jshard.inspect.plan import explain
from jshard.signals.active_config import configuration

pytestmark = pytest.mark.usefixtures("nothing_loaded")

MESH = {"d": 2, "t": 2}
# name: the signal, its kernels, rank of x, and what the forward's ledger says
CASES = {
    "one_shot": ({"row": "d", "reduction": "t"}, {"all_reduce": "one_shot"}, 2, ["all_reduce one_shot"]),
    "remat": ({"reduction": "t", "remat": True}, {"all_reduce": "one_shot"}, 2, ["all_reduce one_shot"]),
    "ring": ({"reduction": "t", "column": "d"}, {"all_reduce": "ring"}, 2, ["all_reduce ring"]),
    "torus": (
        {"reduction": ["d", "t"]}, {"all_reduce": "torus"}, 2,
        ["reduce_scatter ring", "all_reduce ring", "all_gather ring"],
    ),
    "scatter": ({"reduction": "t", "output": "scatter"}, {"reduce_scatter": "ring"}, 2, ["reduce_scatter ring"]),
    "gather": ({"column": "t", "output": "gather"}, {"all_gather": "ring"}, 2, ["all_gather ring"]),
    "store": ({"row": "d", "store": "d"}, {"all_gather": "ring"}, 2, ["all_gather ring", "all_gather ring"]),
    "pallas": ({"row": "d", "column": "t"}, {"matmul": "pallas"}, 3, []),
}  # fmt: skip


def program(signal, rank):
    """Value and gradients of a layer under `signal`, on small integers."""
    jshard.load({"jshard": {"mesh": MESH}, "layer": signal})
    with jshard.signal("layer"):
        layer = jshard.Linear(8, 4, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    state = jax.tree.map(
        lambda p: jax.device_put(np.arange(p.size, dtype=np.float32).reshape(p.shape) % 5 - 2, p.sharding), state
    )
    x = np.arange(8 * 8 * (4 if rank == 3 else 1), dtype=np.float32).reshape((8, 4, 8) if rank == 3 else (8, 8)) % 3 - 1

    def forward(state, x):
        with jshard.signal("layer"):
            return nnx.merge(graph, state)(x)

    def run(state, x):
        y, pull = jax.vjp(forward, state, x)
        return y, *pull(jnp.sign(y) + y)

    return forward, run, state, x


@pytest.mark.quick("one_shot")
@pytest.mark.parametrize("name", CASES)
def test_layer_by_kernels_equals_the_plain_one_in_value_and_gradient(interpreted, name):
    signal, kernel, rank, moved = CASES[name]
    _, run, state, x = program(signal, rank)
    plain = jax.tree.map(np.asarray, jax.jit(run)(state, x))
    forward, run, state, x = program({**signal, "kernel": kernel}, rank)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, jax.jit(run)(state, x)), plain)
    lines = explain(forward, state, x, backward=False)
    assert [f"{line.collective} {line.via.split()[1].rstrip(',')}" for line in lines if "kernel" in line.via] == moved


def test_kernel_for_all_places_yields_to_that_of_one():
    jshard.load({
        "jshard": {"mesh": MESH, "kernel": {"all_reduce": "ring", "matmul": "auto"}},
        "a": {"reduction": "t"},
        "b": {"reduction": "t", "kernel": {"all_reduce": "one_shot"}},
    })  # fmt: skip
    signals = configuration().signals
    assert signals["a"].kernel == (("all_reduce", "ring"), ("matmul", "auto"))
    assert signals["b"].kernel == (("all_reduce", "one_shot"), ("matmul", "auto"))


def test_auto_is_the_plain_layer_on_a_cpu_to_the_last_word():
    texts = []
    for kernel in ({}, {"kernel": dict.fromkeys(ALGORITHMS, "auto")}):
        _, run, state, x = program({"reduction": "t", "sequence": "t", **kernel}, 3)
        texts.append(jax.jit(run).lower(state, x).as_text())
    assert texts[0] == texts[1]


def test_named_kernel_that_can_not_run_here_is_told_by_its_line(tmp_path):
    path = tmp_path / "mlp.yaml"
    path.write_text("jshard: {mesh: {d: 2, t: 2}}\nlayer:\n  reduction: t\n  kernel:\n    all_reduce: ring\n")
    jshard.load(path)
    with jshard.signal("layer"), pytest.raises(JShardError) as error:
        jshard.matmul(np.ones((4, 8), np.float32), np.ones((8, 4), np.float32))
    assert str(error.value) == (
        f'signal "layer" ({path}:5) takes all_reduce by ring, a kernel for TPUs, and this is cpu; write all_reduce: auto'
    )
    assert kernels.choose("all_reduce", shape=(4, 4), dtype="float32", group=2, chip="cpu").algorithm == "xla"


HINDERED = {
    "matmul": ({"row": "d"}, {"precision": "highest"}, "knows no precision= and no dot_general= of its own"),
    "all_gather_matmul": (
        {"column": "t", "sequence": "t", "dtype": {"reduce": "float32"}}, {},
        "does not sum gradients in another dtype, as dtype: {reduce: ...} asks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", HINDERED)
def test_named_kernel_that_a_product_can_not_take_is_told(interpreted, op):
    signal, arguments, why = HINDERED[op]
    word = {"matmul": "pallas"}.get(op, "permute")
    jshard.load({"jshard": {"mesh": MESH}, "layer": {**signal, "kernel": {op: word}}})
    with jshard.signal("layer"):
        layer = jshard.Linear(8, 4, rngs=nnx.Rngs(0), **arguments)
        with pytest.raises(JShardError) as error:
            layer(np.ones((4, 4, 8), np.float32))
    assert str(error.value) == f'signal "layer" (<dict>) takes {op} by {word}, which {why}; write {op}: auto'


def reduced(kind, kernel):
    """A reduction under a signal, with its gradient, and what to call it with."""
    jshard.load({"jshard": {"mesh": MESH}, "layer": {"row": "d", "column": "t", "kernel": kernel}})
    x = jshard.place(np.arange(32.0, dtype=np.float32).reshape(8, 4) % 5, jshard.Layout(jshard.mesh(), "d", "t"))

    def run(x):
        with jshard.signal("layer"):
            return jax.value_and_grad(lambda x: (kind(x, 0) * jnp.arange(4.0)).sum())(x)

    return run, x


@pytest.mark.parametrize("kind", [jshard.sum, pytest.param(jshard.mean, marks=pytest.mark.slow)])
def test_reduction_takes_the_kernel_of_its_signal(interpreted, kind):
    plain = jax.tree.map(np.asarray, jax.jit(reduced(kind, {})[0])(reduced(kind, {})[1]))
    run, x = reduced(kind, {"all_reduce": "one_shot", "matmul": "auto"})
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, jax.jit(run)(x)), plain)
    lines = [(line.signal, line.mesh_axes, line.via) for line in explain(run, x) if "kernel" in line.via]
    assert lines == [("layer", ("d",), "kernel one_shot, as it declares")]


def test_reduction_inside_a_shard_map_takes_the_kernel_of_its_signal(interpreted):
    run, x = reduced(jshard.sum, {"all_reduce": "one_shot"})
    del run

    def body(x):
        with jshard.signal("layer"):
            return jshard.sum(x)

    program = jax.jit(jax.shard_map(body, mesh=jshard.mesh(), in_specs=jax.P("d", "t"), out_specs=jax.P()))
    assert float(program(x)) == float(np.asarray(x).sum())
    assert [line.via for line in explain(program, x, backward=False)] == ["kernel one_shot, as it declares"]


def test_reduction_tells_a_kernel_that_it_can_not_take():
    run, x = reduced(jshard.max, {"all_reduce": "ring"})
    with pytest.raises(JShardError) as error:
        run(x)
    assert str(error.value) == (
        'signal "layer" (<dict>) takes all_reduce by ring, which adds, and jshard.max does not; write all_reduce: auto'
    )
    run, x = reduced(jshard.sum, {"all_reduce": "ring"})
    with pytest.raises(JShardError) as error:
        run(x)
    assert str(error.value) == (
        'signal "layer" (<dict>) takes all_reduce by ring, a kernel for TPUs, and this is cpu; write all_reduce: auto'
    )


def test_check_says_which_kernels_a_signal_takes():
    jshard.load(
        {
            "jshard": {"mesh": MESH, "kernel": {"matmul": "auto"}},
            "layer": {"reduction": "t", "kernel": {"all_reduce": "ring"}},
        }
    )
    assert configuration().meaning()[-1] == (
        "<dict>", "layer: reduction over t; y is summed by an all-reduce; kernels: all_reduce ring, matmul auto"
    )  # fmt: skip


def test_product_that_chooses_its_strategy_takes_the_kernels_of_its_signal():
    jshard.load({"jshard": {"mesh": MESH}, "layer": {"kernel": {"matmul": "pallas"}}})
    x = np.ones((8, 8), np.float32)
    with jshard.signal("layer"), pytest.raises(JShardError) as error:
        jshard.matmul(x, x)
    assert str(error.value) == (
        'signal "layer" (<dict>) takes matmul by pallas, a kernel for TPUs, h100, h200, b200, and this is cpu; '
        "write matmul: auto"
    )
    with kernels.interpret(), jshard.signal("layer"):
        assert "pallas_call" in str(jax.make_jaxpr(jshard.matmul)(x, x))
