"""What XLA for CPUs is given for the gradients of kernels, and that it is the same gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard.layouts.mesh  # noqa: F401  # from here on programs are changed before they are compiled
from jshard.layouts.before_compiling import change

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
W = np.arange(20, dtype=np.float32).reshape(4, 5)


def products(f, *args):
    """The products of the program of `f` as it is compiled, its transposes, and its results."""
    module = jax.jit(f).lower(*args).compiler_ir("stablehlo")
    change(module, "cpu")
    lines = str(module).splitlines()
    found = [[line.strip() for line in lines if word in line] for word in ("dot_general", "transpose")]
    return *found, jax.jit(f)(*args)


def test_the_gradient_of_a_kernel_is_one_product_and_no_transpose():
    dots, transposes, result = products(jax.grad(lambda w, x: (jnp.sin(x) @ w).sum()), W, X)
    assert len(dots) == 1 and "contracting_dims = [0, 1] x [0, 1]" in dots[0] and not transposes
    np.testing.assert_allclose(result, np.einsum("btk,btn->kn", np.sin(X), np.ones((2, 3, 5))), rtol=1e-6)


def test_a_product_with_batches_is_turned_too():
    dots, transposes, result = products(lambda q, k: jnp.einsum("btd,bsd->bts", q, k).mT, X, X)
    assert len(dots) == 1 and "batching_dims = [0] x [0], contracting_dims = [2] x [2]" in dots[0] and not transposes
    np.testing.assert_array_equal(result, np.einsum("btd,bsd->bst", X, X))


@pytest.mark.parametrize("q,k", [("bthd,bshd->bhts", "bhts,bshd->bthd"), ("btd,bsd->bts", "bts,bsd->btd")])
def test_gradients_of_products_with_batches_are_those_that_jax_writes(q, k):
    draw = np.random.default_rng(0)
    shape = (2, 3, 4, 5) if "h" in q else (2, 3, 5)
    args = [draw.normal(size=shape).astype(np.float32) for _ in range(3)]

    def value(q_, k_, v_):
        return (jnp.einsum(k, jnp.tanh(jnp.einsum(q, q_, k_)), v_) ** 2).sum()

    for got, wanted in zip(jax.jit(jax.grad(value, (0, 1, 2)))(*args), jax.grad(value, (0, 1, 2))(*args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_each_operand_keeps_its_precision():
    def turned(x, y):
        both = (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)
        return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=both).T

    dots, transposes, result = products(turned, X[0], X[1])
    assert len(dots) == 1 and "precision = [DEFAULT, HIGHEST]" in dots[0] and not transposes
    np.testing.assert_array_equal(result, X[1] @ X[0].T)


def test_a_product_that_something_else_uses_stays_as_it_is():
    def twice(x, w):
        product = x @ w
        return product.T, product.sum()

    dots, transposes, _ = products(twice, X[0], W)
    assert len(dots) == len(transposes) == 1


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 1, 0)])
def test_a_transpose_to_another_order_stays(order):
    dots, transposes, result = products(lambda x, w: jnp.transpose(x @ w, order), X, W)
    assert len(dots) == 1 and len(transposes) == 1
    np.testing.assert_array_equal(result, np.transpose(X @ W, order))


def test_a_transpose_of_what_is_no_product_of_matrices_stays():
    dots, transposes, _ = products(lambda x, y: ((x + y).T, (x * y).T), X[0], X[1])
    assert not dots and len(transposes) == 2


def test_other_dtypes_gain_nothing_and_stay():
    """XLA keeps a bfloat16 product's float32 sums where a cast is next to it, and not behind a transpose: other numbers."""
    dots, transposes, _ = products(
        lambda x, w: (x @ w).T.astype(jnp.float32), *(a.astype(jnp.bfloat16) for a in (X[0], W))
    )
    assert len(dots) == len(transposes) == 1
