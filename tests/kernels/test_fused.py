"""matmul, all_gather_matmul and matmul_reduce_scatter by their kernels against plain XLA, in value and gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.errors import JShardError
from jshard.kernels.kernel_traffic import declared


def integers(*shape, dtype="float32", by=7):
    return (np.arange(int(np.prod(shape))) * by % 5 - 2).reshape(shape).astype(jnp.dtype(dtype))


# -- matmul --


@pytest.mark.parametrize(
    ("m", "k", "n", "dtype"),
    [
        (8, 128, 128, "float32"),
        (37, 200, 72, "float32"),
        (1, 1, 1, "float32"),
        (5, 7, 3, "bfloat16"),
        (9, 40, 130, "int8"),
        (600, 20, 10, "float32"),
    ],
)
def test_matmul_of_any_shape_is_exact(interpreted, m, k, n, dtype):
    x, w = integers(m, k, dtype=dtype), integers(k, n, dtype=dtype, by=3)
    out = jnp.int32 if dtype == "int8" else None
    y = kernels.matmul(x, w, algorithm="pallas", out_dtype=out)
    assert y.dtype == (jnp.int32 if dtype == "int8" else x.dtype)
    np.testing.assert_array_equal(y, (x.astype(np.float64) @ w.astype(np.float64)).astype(y.dtype))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(None, "float32"), ("relu", "bfloat16"), ("gelu", "float32"), ("silu", "bfloat16"), ("tanh", "float32")],
)
def test_matmul_has_bias_and_activation_in_its_epilogue_with_gradients(interpreted, activation, dtype):
    jax.config.update("jax_disable_most_optimizations", False)  # a tanh that is not optimized differs in its last bits
    x, w, b = integers(2, 5, 7, dtype=dtype), integers(7, 3, dtype=dtype, by=3), integers(3, dtype=dtype) / 4

    def run(algorithm):
        def f(x, w, b):
            return kernels.matmul(x, w, bias=b, activation=activation, algorithm=algorithm)

        y, pull = jax.vjp(f, *map(jnp.asarray, (x, w, b)))
        return y, *pull(jnp.ones_like(y) * 2)

    for ours, theirs in zip(jax.jit(lambda: run("pallas"))(), jax.jit(lambda: run("xla"))(), strict=True):
        assert ours.dtype == theirs.dtype
        close = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=close, atol=close)


def test_matmul_that_is_not_asked_for_a_kernel_is_the_plain_product():
    x, w = integers(4, 6), integers(6, 2)
    plain = jax.jit(lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ())))).lower(x, w).as_text()
    ours = jax.jit(lambda x, w: kernels.matmul(x, w)).lower(x, w).as_text()
    assert ours.splitlines()[1:] == plain.splitlines()[1:]


# -- the fused two --

FUSED = {"all_gather_matmul": kernels.all_gather_matmul, "matmul_reduce_scatter": kernels.matmul_reduce_scatter}
# mesh, mesh axes, one device's x, w, axis, dtype
CASES = [
    ({"t": 2}, "t", (6, 7), (7, 3), 0, "float32"),
    ({"t": 3}, "t", (3, 130), (130, 5), 0, "float32"),
    ({"d": 2, "t": 4}, "t", (2, 4, 9), (9, 20), 1, "float32"),
    ({"t": 4}, "t", (40, 16), (16, 300), 0, "bfloat16"),
    ({"d": 2, "t": 2}, ("t", "d"), (4, 8), (8, 8), 0, "float32"),
    ({"t": 8}, "t", (8, 16), (16, 140), 0, "float32"),
]


@pytest.mark.seconds
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("case", CASES)
def test_fused_gives_what_xla_gives_in_value_and_gradient(mesh, interpreted, monkeypatch, name, case):
    sizes, axes, shape, kernel, axis, dtype = case
    monkeypatch.setattr("jshard.kernels.tpu.fused.columns", lambda *_: 128)  # several tiles of columns, at small sizes
    here, op, names = mesh(**sizes), FUSED[name], tuple(sizes)
    x = jax.device_put(integers(here.size, *shape, dtype=dtype), jax.NamedSharding(here, P(names)))
    w = jax.device_put(integers(here.size, *kernel, dtype=dtype, by=3), jax.NamedSharding(here, P(names)))

    def run(algorithm):
        def body(x, w):
            y, pull = jax.vjp(lambda x, w: op(x[0], w[0], axes, axis=axis, algorithm=algorithm), x, w)
            return y[None], *pull((jnp.abs(y) % 3 + lax.axis_index(names)).astype(y.dtype) - 1)

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P(names), out_specs=P(names)))(x, w)

    for ours, theirs in zip(run("fused"), run("xla"), strict=True):
        assert ours.dtype == theirs.dtype
        if dtype == "float32":
            np.testing.assert_array_equal(ours, theirs)
        else:
            np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=2e-2, atol=1)


def pallas_calls(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "pallas_call":
            yield declared(eqn.params)
        else:
            for value in eqn.params.values():
                if hasattr(getattr(value, "jaxpr", value), "eqns"):
                    yield from pallas_calls(value)


def test_gradient_of_each_is_the_other(mesh):
    here = mesh(t=4)
    split = jax.ShapeDtypeStruct((16, 4), np.float32, sharding=jax.NamedSharding(here, P("t")))
    for name, dual in (("all_gather_matmul", "matmul_reduce_scatter"), ("matmul_reduce_scatter", "all_gather_matmul")):

        def loss(x, w, name=name):
            return FUSED[name](x, w, "t", algorithm="fused").sum()

        body = jax.shard_map(jax.grad(loss, (0, 1)), mesh=here, in_specs=P("t"), out_specs=P("t"))
        with kernels.interpret():
            jaxpr = jax.make_jaxpr(body)(split, split)
        assert [entry["op"] for entry in pallas_calls(jaxpr)] == [name, dual]


@pytest.mark.seconds
def test_batch_of_vmap_is_one_kernel_and_several_kernels_are_refused(mesh, interpreted):
    here = mesh(t=2)
    place = jax.NamedSharding(here, P("t"))
    x, w = jax.device_put(integers(2, 3, 4, 5), place), jax.device_put(integers(2, 5, 6, by=3), place)

    def run(name, algorithm, in_axes=(0, None)):
        def body(x, w):
            w = w[0] if in_axes[1] is None else jnp.stack([w[0]] * 3)
            return jax.vmap(lambda x, w: FUSED[name](x, w, "t", algorithm=algorithm), in_axes=in_axes)(x[0], w)[None]

        return jax.jit(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P("t")))(x, w)

    for name in FUSED:
        np.testing.assert_array_equal(run(name, "fused"), run(name, "xla"))
        with pytest.raises(JShardError) as error:
            run(name, "fused", (0, 0))
        assert str(error.value) == f'{name} by "fused" is under a jax.vmap over w, and takes one w; use algorithm="xla"'
