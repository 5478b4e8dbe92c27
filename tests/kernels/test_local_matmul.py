"""matmul by its kernel against plain XLA, in value and gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard import kernels


def integers(*shape, dtype="float32", by=7):
    return (np.arange(int(np.prod(shape))) * by % 5 - 2).reshape(shape).astype(jnp.dtype(dtype))


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
