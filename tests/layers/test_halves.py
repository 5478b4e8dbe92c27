"""A backward program in two halves, held against the whole, with what it reads and leaves in places of buffers."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.jaxprs import equations
from jshard.layers.partition.halves import Halves, Place

LAYERS, WIDTH = 3, 4

near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)  # fused otherwise, sums round otherwise


def layer(x, weights):
    up, down = weights
    return x + jnp.tanh(x @ up) @ down


def looped(x, weights, reverse=False, wrapped=lambda layer: layer):
    return lax.scan(lambda x, own: (wrapped(layer)(x, own), None), x, weights, reverse=reverse)[0]


def counting(x, weights):
    """The turn's number goes around with x, and chooses."""

    def turn(carry, own):
        number, x = carry
        return (number + 1, lax.cond(number < 2, lambda: layer(x, own), lambda: x)), jnp.sum(x)

    (_, x), sums = lax.scan(turn, (0, x), weights)
    return x * sums.sum()


def shared(x, weights):
    """Each layer multiplies by the same kernel, whose gradient is summed in the loop."""
    same = jax.tree.map(lambda each: each[0], weights)
    return lax.scan(lambda x, _: (jax.jit(layer)(x, same), None), x, None, length=LAYERS)[0]


# the program, and how many products its halves have: three of two in a layer
PROGRAMS = {
    "loop": (looped, 4), "backwards": (lambda *xs: looped(*xs, reverse=True), 4), "shared": (shared, 4),
    "no loop": (lambda x, weights: layer(x, jax.tree.map(lambda each: each[1], weights)), 4),
    "jit": (lambda *xs: looped(*xs, wrapped=jax.jit), 4),
    "computed again": (lambda *xs: looped(*xs, wrapped=jax.checkpoint), 4 + 2 * 1),  # its first product, in both halves
    "branches": (counting, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_halves_are_the_whole_and_multiply_no_more_than_it(name):
    f, products = PROGRAMS[name]
    draw = np.random.default_rng(0)
    x, ct = draw.normal(size=(2, 5, WIDTH)).astype(np.float32)
    weights = tuple(draw.normal(size=(2, LAYERS, WIDTH, WIDTH)).astype(np.float32) * 0.3)
    _, pull = jax.vjp(f, x, weights)
    expected = jax.tree.leaves(pull(ct))
    residuals, tree = jax.tree.flatten(pull)
    program = jax.make_jaxpr(lambda residuals, ct: jax.tree.unflatten(tree, residuals)(ct))(residuals, ct)
    halves = Halves(program, (True, False, False), (False, True, True), (*(False for _ in residuals), True))
    (by_x, *nothing), left = halves.first([*residuals, ct])
    assert nothing == [None, None]
    near(by_x, expected[0])
    # the same, of inputs that lie in the second of three places, and with what is left written there
    there = lambda x: Place(jnp.zeros((3, *np.shape(x)), jnp.asarray(x).dtype).at[1].set(x), jnp.int32(1))
    empty = jax.tree.map(lambda x: Place(jnp.zeros((3, *x.shape), x.dtype), jnp.int32(1)), left)
    placed = [there(each) for each in residuals]
    (again, *_), buffers = halves.first([*placed, ct], empty)
    near(again, by_x)
    jax.tree.map(lambda buffer, x: near(buffer[1], x), buffers, left)
    for xs, given in (
        ([*residuals, ct], left),
        ([*placed, ct], jax.tree.map(lambda b: Place(b, jnp.int32(1)), buffers)),
    ):
        nothing, *by_weights = halves.second(xs, given)
        assert nothing is None
        jax.tree.map(near, by_weights, expected[1:])
    both = jax.make_jaxpr(lambda xs: halves.second(xs, halves.first(xs)[1]))([*residuals, ct])
    assert Counter(eqn.primitive.name for eqn in equations(both))["dot_general"] == products


def test_results_of_a_loop_are_written_where_they_lie():
    """By turn, unless something else reads them; a result of the last turn alone is made by that turn."""

    def f(x, weights):
        (last, _), (all_x, sums) = lax.scan(
            lambda carry, own: ((own[0] * 2, layer(carry[1], own)), (carry[1], jnp.sum(carry[1]))),
            (weights[0][0], x),
            weights,
        )
        return last, all_x, sums, sums.sum()

    draw = np.random.default_rng(0)
    x, weights = draw.normal(size=(5, WIDTH)), tuple(draw.normal(size=(2, LAYERS, WIDTH, WIDTH)))
    x, weights = jax.tree.map(lambda x: x.astype(np.float32), (x, weights))
    expected, program = f(x, weights), jax.make_jaxpr(f)(x, weights)
    xs, none = jax.tree.leaves((x, weights)), (False,) * 4
    every = Halves(program, (True,) * 4, none, (False,) * 3)
    places = {n: Place(jnp.zeros((2, *np.shape(expected[n]))), jnp.int32(1)) for n in (1, 2)}
    outs, _ = every.first(xs, results=places)
    for n, (found, wanted) in enumerate(zip(outs, expected, strict=True)):
        np.testing.assert_allclose(found[1] if n in places else found, wanted, rtol=1e-6)
        assert n not in places or not np.any(found[0])
    alone = Halves(program, (True, False, False, False), none, (False,) * 3)
    np.testing.assert_array_equal(alone.first(xs)[0][0], expected[0])
    made = jax.make_jaxpr(lambda xs: alone.first(xs)[0][0])(xs)
    assert not {"scan", "dot_general"} & {eqn.primitive.name for eqn in equations(made)}
