"""A product that is made a slice at a time: the same numbers, and never the whole where only slices are read."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.layers.partition.lazy_product import (
    after,
    evaluate_lazily,
    first_of,
    is_sliced,
    leaves_in_slices,
    product_scattered,
    product_scattered_first,
    token_of,
    whole,
    with_products,
)  # fmt: skip
from jshard.programs.jaxprs import equations

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
    run = lambda x, y: whole(evaluate_lazily(program, [x, y], jnp.zeros(()))[0])
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
    run = lambda x, y: whole(evaluate_lazily(program, [x, y], jnp.zeros(()))[0])
    assert run(X, Y) == f(X, Y)
    counts = collections.Counter(eqn.primitive.name for eqn in equations(jax.make_jaxpr(run)(X, Y)))
    assert counts["dot_general"] == 1


def test_what_is_no_product_is_made_at_once():
    f = lambda x, y: jnp.cos(x) @ jnp.sin(y).T + jnp.abs(x) @ jnp.tanh(y).T
    (made,) = evaluate_lazily(jax.make_jaxpr(f)(X[0], Y[0]), [X[0], Y[0]], jnp.zeros(()))
    np.testing.assert_allclose(whole(made), f(X[0], Y[0]), rtol=1e-5)


def test_what_reads_nothing_but_slices_is_seen_through_calls():
    cut = jax.jit(lambda x: lax.dynamic_slice_in_dim(x, x.shape[0] // 2, 1, 0))
    sliced = lambda f: is_sliced(jax.make_jaxpr(f)(X[0], 1.0), 0)
    assert sliced(lambda x, y: cut(x.T.astype(jnp.bfloat16)))
    assert not sliced(lambda x, y: cut(x) + x.sum())
    assert not sliced(lambda x, y: (cut(x), x))
    assert not sliced(lambda x, y: cut(x * 2))
    assert not sliced(lambda x, y: jax.jit(lambda x: x + 1)(x))
    cut_at = lambda at: lax.dynamic_slice(X[0, 0], (at,), (1,), allow_negative_indices=False)
    assert not is_sliced(jax.make_jaxpr(cut_at)(0), 0)


def test_numbers_behind_something_are_the_same_numbers_whatever_that_is():
    behind = jax.jit(lambda x, numbers: after(token_of(x), numbers))
    some = np.array([-1.5, 0.0, np.inf, -np.inf, np.nan], np.float32)
    for value in (0.0, -1.5, np.inf, np.nan):
        x = np.full((2, 2), value, np.float32)
        number = behind(x, 3)
        assert number == 3 and number.dtype == jnp.int32
        np.testing.assert_array_equal(behind(x, some), some)


def test_a_compiler_does_not_know_numbers_before_what_they_are_behind_is_there():
    numbers = np.array([0, np.iinfo(np.int32).max], np.int32)
    compiled = jax.jit(after).lower(np.float32(1), numbers).compile()
    assert "direction=NE" in compiled.as_text()
    np.testing.assert_array_equal(compiled(np.float32(1), numbers), numbers)


def test_kernels_that_are_multiplied_first_are_those_behind_no_other():
    def f(x, a, b, c, unread):
        y = jnp.sin(x @ a)
        return y @ b + x @ c

    jaxpr = jax.make_jaxpr(f)(*[np.eye(4, dtype=np.float32)] * 5).jaxpr
    _, a, b, c, unread = jaxpr.invars
    assert first_of(jaxpr, [a, b, c, unread]) == {a, c}
    assert first_of(jaxpr, [b]) == {b}


def test_products_by_some_variables_are_made_by_others():
    def f(x, w, u):
        return jnp.sin(x) @ w, u @ x, x @ x

    x, w, u = (X[0][:, :6] + at for at in range(3))
    program = jax.make_jaxpr(f)(x, w, u)
    of_w, of_u = program.jaxpr.invars[1:]
    asked = []

    def twice(product, x, kernel):
        asked.append(kernel)
        return 2 * product(x, kernel)

    found = with_products(program, [x, w, u], {of_w: twice, of_u: twice})
    for one, other in zip(found, (2 * (np.sin(x) @ w), 2 * (u @ x), x @ x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert [id(each) for each in asked] == [id(w), id(u)]


def gathered(shard):
    """Of a kernel of 8 rows some are here."""
    return lax.dynamic_update_slice(jnp.ones((8, 6)), shard, (2, 0))


def test_a_gradient_of_which_slices_are_read_leaves_in_slices():
    shard, full = np.ones((4, 6), np.float32), np.ones((8, 6), np.float32)
    assert leaves_in_slices(gathered, shard, full)
    assert not leaves_in_slices(lambda shard: jnp.concatenate([shard, 2 * shard]), shard, full)


SHARD = np.random.default_rng(2).integers(-9, 9, (4, 6)).astype(np.float32)


def scattered_at_once(x, shard):
    y, token = product_scattered(jnp.matmul, x, lax.stop_gradient(gathered(shard)), shard, jnp.zeros(()), gathered)
    return y + 0 * token


def scattered_first(x, shard):
    return product_scattered_first(jnp.matmul, x, lax.stop_gradient(gathered(shard)), shard, gathered)


@pytest.mark.parametrize("f", [scattered_at_once, scattered_first])
@pytest.mark.parametrize("of", [(0, 1), (0,), (1,)])
def test_a_product_whose_gradient_is_scattered_is_that_product(f, of):
    asked = lambda f: jax.value_and_grad(lambda x, shard: jnp.sum(f(x, shard) * Y[0, :, :6]), argnums=of)(X[0], SHARD)
    value, gradients = asked(f)
    expected, wanted = asked(lambda x, shard: x @ gathered(shard))
    assert value == expected == jnp.sum(f(X[0], SHARD) * Y[0, :, :6])
    for one, other in zip(gradients, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def behind(f, *of):
    """How many barriers a gradient has: what waits for another is a `min` with itself."""
    grad = jax.grad(lambda x, shard: jnp.sum(f(x, shard)), argnums=of)
    return sum(eqn.primitive.name == "min" for eqn in equations(jax.make_jaxpr(grad)(X[0], SHARD)))


def test_where_nobody_wants_the_gradient_of_x_nothing_waits():
    assert behind(scattered_first, 0, 1) == 3  # the slice, what is multiplied there, and the gradient of x
    assert behind(scattered_first, 1) == behind(scattered_at_once, 0, 1) == 1
