"""A sum in the order of devices is what XLA's own is inside one process, to the same bit, in value and in gradients."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard
from jshard import kernels
from jshard.errors import JShardError
from jshard.inspect.ledger.ledger import read
from jshard.kernels import deterministic_sum as in_order
from jshard.programs.jaxprs import equations
from jshard.signals.active_config import unload
from tests.support import cases


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("mesh", "axes", "shape", "dtype"),
    [
        ({"t": 8}, ("t",), (40,), "float32"),
        ({"d": 2, "t": 4}, ("t",), (33, 7), "float32"),
        ({"d": 2, "t": 4}, ("t", "d"), (), "float32"),
        ({"t": 3}, ("t",), (300_000,), "float32"),
        ({"t": 4}, ("t",), (257, 130), "bfloat16"),
    ],
)
def test_sum_in_order_is_the_psum_of_one_process_bitwise(monkeypatch, mesh, axes, shape, dtype):
    monkeypatch.setattr(in_order, "ONE_STEP_BYTES", 1 << 20)  # the largest goes in two turns
    built = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Explicit,) * len(mesh))
    numbers = np.random.default_rng(0).normal(size=(*mesh.values(), *shape)).astype(np.float32)
    x = jax.device_put(jnp.asarray(numbers, dtype), jax.NamedSharding(built, P(*mesh)))

    def summed(algorithm):
        def f(x):
            total = kernels.all_reduce(x.reshape(shape), axes, algorithm=algorithm)
            assert not jax.typeof(total).mat.varying & {*axes}
            return total.reshape((1,) * len(mesh) + shape)

        kept = P(*(None if name in axes else name for name in mesh))
        return jax.jit(jax.shard_map(f, mesh=built, in_specs=P(*mesh), out_specs=kept))

    found, expected = summed("in_order")(x), summed("xla")(x)
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    n, size = int(np.prod([mesh[name] for name in axes])), x.dtype.itemsize * int(np.prod(shape))
    lines = [(line.collective, line.wire) for line in read(jax.make_jaxpr(summed("in_order"))(x)).lines]
    if n * size > 1 << 20:
        part = (n - 1) * size // n
        assert lines == [("all_to_all", part), ("all_gather", part)]
    else:
        assert lines == [("all_to_all", (n - 1) * size)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("mesh", "axes"), [({"t": 8}, ("t",)), ({"d": 2, "t": 4}, ("d", "t")), ({"t": 2}, ("t",))])
def test_scatter_in_order_and_the_gradient_of_a_gather_are_those_of_one_process_bitwise(mesh, axes, dtype):
    built = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Explicit,) * len(mesh))
    numbers = np.random.default_rng(0).normal(size=(8 * 16, 6, 5)).astype(np.float32)
    x = jax.device_put(jnp.asarray(numbers, dtype), jax.NamedSharding(built, P(axes)))

    def moved(algorithm):
        def f(x):
            part = kernels.reduce_scatter(x, axes, axis=0, algorithm=algorithm)
            full, vjp = jax.vjp(lambda x: kernels.all_gather(x, axes, axis=1, algorithm=algorithm), x)
            (gradient,) = vjp(full * jax.lax.pcast(jnp.asarray(1.5, dtype), axes, to="varying"))
            (back,) = jax.vjp(lambda x: kernels.reduce_scatter(x, axes, axis=0, algorithm=algorithm), x)[1](part)
            return part, full, gradient, back

        return jax.jit(jax.shard_map(f, mesh=built, in_specs=P(axes), out_specs=P(axes)))

    for found, expected in zip(moved("in_order")(x), moved("xla")(x), strict=True):
        assert found.shape == expected.shape and np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    lines = read(jax.make_jaxpr(moved("in_order"))(x)).lines
    # in one process, and on TPUs, a gather is XLA's, which hides it as it does no all-to-all
    assert {line.collective for line in lines} == {"all_to_all", "all_gather"}
    wires = [sum(line.wire for line in read(jax.make_jaxpr(moved(each))(x)).lines) for each in ("in_order", "xla")]
    assert wires[0] == wires[1]


class Model(nnx.Module):
    def __init__(self, rngs):
        with jshard.signal("first"):
            self.first = jshard.Linear(16, 16, rngs=rngs)
        with jshard.signal("up"):
            self.up = jshard.Linear(16, 32, rngs=rngs)
        with jshard.signal("down"):
            self.down = jshard.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(self.first(x))))


def learned(algorithm):
    """The loss, the gradients, and of each collective its signal, kind and bytes of payload."""
    jshard.load({
        "jshard": {"mesh": {"data": 2, "tensor": 4}, "kernel": {"all_reduce": algorithm}},
        "first": {"row": ["data", "tensor"]}, "up": {"row": "data", "column": "tensor"},
        "down": {"row": "data", "reduction": "tensor"}, "rows": {"row": "data"},
    })  # fmt: skip
    graph, state = nnx.split(Model(nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)

    def loss(state, x):
        y = nnx.merge(graph, state)(x)
        with jshard.signal("rows"):
            return jshard.mean(y**2)

    rows = jshard.signal.tensor(x, name="rows")
    value, gradients = jax.jit(jax.value_and_grad(loss))(state, rows)
    lines = [(each.signal, each.collective, each.payload) for each in jshard.explain(loss, state, rows).lines]
    unload()
    return [np.asarray(leaf).tobytes() for leaf in (value, *jax.tree.leaves(gradients))], lines


def test_layers_that_sum_in_order_learn_bitwise_the_same_and_sum_small_gradients_together():
    (expected, plain), (found, lines) = learned("xla"), learned("in_order")
    assert found == expected
    assert [each[1] for each in plain].count("all_reduce") == 9
    moved = [each for each in lines if each[1] == "all_to_all"]
    assert moved == [("down", "all_to_all", 4 * 512), ("up", "all_to_all", 4 * 1024), ("first", "all_to_all", 8 * 1088)]
    assert [each[1] for each in lines].count("all_reduce") == 5  # over two devices, any order is the same


def test_product_whose_gradients_are_summed_wide_and_in_order_is_of_its_operands_dtype():
    jshard.load({
        "jshard": {"mesh": {"data": 4}, "kernel": {"all_reduce": "in_order"}},
        "first": {"row": "data", "dtype": {"reduce": "float32"}},
    })  # fmt: skip
    with jshard.signal("first"):
        layer = jshard.Linear(16, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    program = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, jnp.ones((8, 16), jnp.bfloat16))
    unload()
    products = [eqn for eqn in equations(program) if eqn.primitive.name == "dot_general"]
    assert [{str(operand.aval.dtype) for operand in eqn.invars} for eqn in products] == [{"bfloat16"}]


def test_sums_between_processes_are_taken_in_order(monkeypatch):
    for room in ("select_algorithm", "gather_scatter"):
        monkeypatch.setattr(sys.modules[f"jshard.kernels.{room}"], "between_processes", lambda: True)

    def resolved(op):
        return [kernels.choose(op, shape=(8,), dtype="float32", group=n, chip="cpu").algorithm for n in (2, 3)]

    assert resolved("all_reduce") == ["xla", "in_order"]
    assert resolved("reduce_scatter") == resolved("all_gather") == ["in_order", "in_order"]
    _, lines = learned("auto")
    assert [each[1] for each in lines].count("all_to_all") == 3
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **STORED}):
        lines = jshard.explain(
            learn_stored, jshard.MLP(16, 32, 8, rngs=nnx.Rngs(0)), np.ones((8, 16), np.float32)
        ).lines
        # a gather, too, is one all-to-all of copies: gloo takes less of the processor for it
        assert {line.collective for line in lines if line.cause.key == "store"} == {"all_to_all"}
        assert "reduce_scatter" not in {line.collective for line in lines}


STORED = {
    "up": {"row": "data", "column": "tensor", "store": "data", "sequence": "tensor"},
    "down": {"row": "data", "reduction": "tensor", "store": "data", "sequence": "tensor"},
}


def learn_stored(model, x):
    return jshard.mean(model(x) ** 2)


def test_sum_in_order_takes_no_max():
    mesh = jax.make_mesh((4,), ("t",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(np.ones(8, np.float32), jax.NamedSharding(mesh, P("t")))
    f = jax.shard_map(
        lambda x: kernels.all_reduce(x, "t", op="max", algorithm="in_order"), mesh=mesh, in_specs=P("t"), out_specs=P()
    )
    with pytest.raises(JShardError) as error:
        f(x)
    assert (
        str(error.value) == 'all_reduce can\'t run by "in_order": a kernel adds, and takes no max; use algorithm="auto"'
    )
