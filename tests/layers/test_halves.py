"""A backward program in two halves, held against the whole, with what it reads and leaves in places of buffers."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.layers.partition.halves import Halves, Place
from jshard.programs.jaxprs import equations

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


@pytest.mark.quick("no loop")
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
    # what is computed again is so by its name, in which JAX writes "checkpoint" only when it lowers one
    stacks = {str(eqn.source_info.name_stack) for eqn in equations(both)}
    assert any("checkpoint" in each for each in stacks) == (name == "computed again")
    assert all("rematted_computation" not in each or "checkpoint/rematted_computation" in each for each in stacks)


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


def backward(w, number, ct, xs):
    """What is made again is one sum. A turn counts, and the gradient of its kernel, which nobody waits for, needs the number."""
    w = w + w

    def turn(carry, x):
        number, ct = carry
        return (number + 1, ct @ w), number * jnp.einsum("bi,bo->io", x, ct)

    (_, ct), by_kernels = lax.scan(turn, (number, ct), xs)
    return ct, by_kernels, jnp.sum(w)


def test_what_a_turn_carries_behind_something_else_is_computed_once():
    draw = np.random.default_rng(0)
    w, ct, xs = (draw.normal(size=size).astype(np.float32) for size in ((4, 4), (5, 4), (LAYERS, 5, 4)))
    given = [w, np.float32(2), ct, xs]
    program, expected = jax.make_jaxpr(backward)(*given), backward(*given)
    made = (False, False, True, False)
    halves = Halves(program, (True, False, False), (False, True, True), made)
    assert halves.reads == ((True, False, True, False), (True, True, False, True))
    (first, *_), left = halves.first(given)
    near(first, expected[0])
    jax.tree.map(near, halves.second(given, left), [None, *expected[1:]])
    both = jax.make_jaxpr(lambda xs: halves.second(xs, halves.first(xs)[1]))(given)
    assert Counter(eqn.primitive.name for eqn in equations(both))["dot_general"] == 2
    other = Halves(
        program, (False, True, False), (True, False, False), made
    )  # what the first carries, the second hands on
    (_, by_kernels, _), left = other.first(given)
    near(by_kernels, expected[1])
    near(other.second(given, left)[0], expected[0])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_number_that_the_last_turn_alone_makes_is_made_by_it(reverse):
    def f(scale, xs):
        return lax.scan(lambda _, x: (jnp.sum(x * scale), None), jnp.zeros(()), xs, reverse=reverse)[0]

    xs, scale = np.arange(12.0, dtype=np.float32).reshape(3, 4), np.arange(4.0, dtype=np.float32)
    program = jax.make_jaxpr(f)(scale, xs)
    alone = Halves(program, (True,), (False,), (False, False))
    np.testing.assert_allclose(alone.first([scale, xs])[0][0], f(scale, xs))
    made = jax.make_jaxpr(lambda xs: alone.first(xs)[0][0])([scale, xs])
    assert "scan" not in {eqn.primitive.name for eqn in equations(made)}


def test_what_each_turn_makes_is_written_by_turn_and_what_the_last_leaves_behind_it():
    def f(xs):
        return lax.scan(lambda carry, x: (carry + x, carry * x), jnp.zeros(4), xs)

    xs = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    program, expected = jax.make_jaxpr(f)(xs), f(xs)
    every = Halves(program, (True, True), (False, False), (False,))
    places = {n: Place(jnp.zeros((2, *x.shape)), jnp.int32(1)) for n, x in enumerate(expected)}
    outs, _ = every.first([xs], results=places)
    for found, wanted in zip(outs, expected, strict=True):
        np.testing.assert_allclose(found[1], wanted)
    made = jax.make_jaxpr(lambda xs: every.first([xs], results=places)[0])(xs)
    (loop,) = (eqn for eqn in equations(made) if eqn.primitive.name == "scan")
    assert [v.aval.shape for v in loop.outvars] == [(4,), (2, 3, 4)]


@pytest.mark.parametrize("half", [0, 1])
def test_what_one_half_alone_needs_is_run_by_it_as_it_is(half):
    """All turns of a loop; and a call, or branches, as one equation."""

    def f(x, weights):
        one = jax.tree.map(lambda each: each[0], weights)
        chosen = lax.cond(jnp.sum(x) > 0, lambda: layer(x, one), lambda: x)
        twice = lax.scan(lambda x, own: (looped(x, weights), None), x, weights)[0]
        return twice, jax.jit(layer)(x, one) + chosen, x * 2

    draw = np.random.default_rng(0)
    x, weights = draw.normal(size=(5, WIDTH)), tuple(draw.normal(size=(2, LAYERS, WIDTH, WIDTH)))
    x, weights = jax.tree.map(lambda x: x.astype(np.float32), (x, weights))
    here, there = (True, True, False), (False, False, True)
    halves = Halves(jax.make_jaxpr(f)(x, weights), *((here, there) if not half else (there, here)), (False,) * 3)
    xs = jax.tree.leaves((x, weights))

    def run(xs):
        first, left = halves.first(xs)
        return (first, halves.second(xs, left))[half][:2]

    jax.tree.map(near, run(xs), list(f(x, weights)[:2]))
    names = Counter(eqn.primitive.name for eqn in equations(jax.make_jaxpr(run)(xs)))
    assert (names["jit"] + names["pjit"], names["cond"], names["scan"]) == (1, 1, 2)


@pytest.mark.parametrize("chosen_by", ["cotangent", "input"])
def test_branches_are_halved_whatever_chooses(chosen_by):
    def f(x, ct):
        one = lambda x, ct: (jnp.sin(x) * ct, jnp.cos(x) @ ct)
        return lax.cond((ct if chosen_by == "cotangent" else x)[0, 0] > 0, one, lambda x, ct: (ct, x @ ct), x, ct)

    given = np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH)).astype(np.float32)
    halve_and_compare(f, given, -given)


@pytest.mark.parametrize("chosen_by", ["cotangent", "input"])
def test_each_of_three_branches_is_halved(chosen_by):
    def f(x, ct):
        branches = [
            lambda x, ct: (jnp.sin(x) * ct, jnp.cos(x) @ ct), lambda x, ct: (ct, x @ ct), lambda x, ct: (ct.T, jnp.exp(x) * ct)
        ]  # fmt: skip
        number = (ct if chosen_by == "cotangent" else x)[0, 0].astype(int)
        return lax.switch(number, branches, x, ct)

    draw = np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH)).astype(np.float32)
    halve_and_compare(f, *(draw - draw[:, :1, :1] + n for n in (2, 0, 1)))


def halve_and_compare(f, *all_given):
    for x, ct in all_given:
        halves = Halves(jax.make_jaxpr(f)(x, ct), (True, False), (False, True), (False, True))
        (first, _), left = halves.first([x, ct])
        near(first, f(x, ct)[0])
        near(halves.second([x, ct], left)[1], f(x, ct)[1])
