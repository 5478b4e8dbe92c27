"""A product that is made a slice at a time: the same numbers, and never the whole where only slices are read."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.jaxprs import equations
from jshard.layers.partition.lazy_product import after, evaluate, is_sliced, token_of, whole

X, Y = (np.random.default_rng(seed).integers(-9, 9, (2, 6, 8)).astype(np.float32) for seed in (0, 1))


def scattered(product, order, x, y, parts=2):
    """A loop's worth of parts of a product, turned and cast, and read where a device's number says."""

    @jax.jit
    def cut(made):
        sizes = [n // parts if axis == 0 else n for axis, n in enumerate(made.shape)]
        part = lambda number: lax.dynamic_slice_in_dim(made, number * sizes[0], sizes[0], 0)
        return sum(part(number) * (number + 1) for number in range(parts))

    return cut(lax.transpose(product(x, y), order).astype(jnp.bfloat16))


PRODUCTS = {
    "columns": (lambda x, y: jnp.einsum("bti,btj->ij", x, y), (0, 1)),
    "turned": (lambda x, y: jnp.einsum("bti,btj->ij", x, y), (1, 0)),
    "batch": (lambda x, y: jnp.einsum("bti,btj->bij", x, y), (0, 2, 1)),
    "turned to the middle": (lambda x, y: jnp.einsum("bti,btj->bij", x, y), (2, 0, 1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_slices_of_a_product_are_products_of_slices(name):
    program = jax.make_jaxpr(lambda x, y: scattered(*PRODUCTS[name], x, y))(X, Y)
    run = lambda x, y: whole(evaluate(program, [x, y], jnp.zeros(()))[0])
    np.testing.assert_array_equal(run(X, Y), scattered(*PRODUCTS[name], X, Y))
    flops = lambda f: [
        eqn.outvars[0].aval.size for eqn in equations(jax.make_jaxpr(f)(X, Y)) if "dot" in eqn.primitive.name
    ]
    (size,) = flops(lambda x, y: scattered(*PRODUCTS[name], x, y))
    assert flops(run) == [size // 2, size // 2]


def test_what_reads_all_of_a_product_is_given_all_of_it_once():
    product = lambda x, y: jnp.einsum("bti,btj->ij", x, y).T
    f = lambda x, y: (lambda made: made.sum() + made.max())(product(x, y))
    program = jax.make_jaxpr(f)(X, Y)
    run = lambda x, y: whole(evaluate(program, [x, y], jnp.zeros(()))[0])
    assert run(X, Y) == f(X, Y)
    counts = collections.Counter(eqn.primitive.name for eqn in equations(jax.make_jaxpr(run)(X, Y)))
    assert counts["dot_general"] == 1


def test_what_reads_nothing_but_slices_is_seen_through_calls():
    cut = jax.jit(lambda x: lax.dynamic_slice_in_dim(x, x.shape[0] // 2, 1, 0))
    sliced = lambda f: is_sliced(jax.make_jaxpr(f)(X[0], 1.0), 0)
    assert sliced(lambda x, y: cut(x.T.astype(jnp.bfloat16)))
    assert not sliced(lambda x, y: cut(x) + x.sum())
    assert not sliced(lambda x, y: (cut(x), x))
    assert not sliced(lambda x, y: cut(x * 2))
    assert not sliced(lambda x, y: jax.jit(lambda x: x + 1)(x))


def test_numbers_behind_something_are_the_same_numbers_whatever_that_is():
    behind = jax.jit(lambda x, numbers: after(token_of(x), numbers))
    some = np.array([-1.5, 0.0, np.inf, -np.inf, np.nan], np.float32)
    for value in (0.0, -1.5, np.inf, np.nan):
        x = np.full((2, 2), value, np.float32)
        number = behind(x, 3)
        assert number == 3 and number.dtype == jnp.int32
        np.testing.assert_array_equal(behind(x, some), some)
