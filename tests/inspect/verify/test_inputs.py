"""What verify draws and computes with: exact stand-ins and certificates of sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.inspect.verify.exact_surrogates import as_power_of_two, bits_needed, is_kept
from jshard.inspect.verify.first_divergence import compared
from jshard.inspect.verify.inputs import RANGES, InputRange, draw
from jshard.inspect.verify.interpreter import Evaluation
from jshard.inspect.verify.records import excess


def evaluated(f, *args, **how):
    return Evaluation(**how)(jax.make_jaxpr(f)(*args), args)


# -- stand-ins --


def test_power_of_two_of_a_constant_is_multiplicative():
    for a in range(1, 60):
        for b in range(1, 60):
            assert as_power_of_two(a * b) == as_power_of_two(a) * as_power_of_two(b)
            assert as_power_of_two(float(np.float32(a / b))) == as_power_of_two(a) / as_power_of_two(b)


@pytest.mark.parametrize(
    ("constant", "power"), [(0.0, 0.0), (1.0, 1.0), (-8.0, -8.0), (0.1, 0.125), (1e-3, 2.0**-9), (1 / 3, 0.25)]
)
def test_power_of_two_of_a_constant(constant, power):
    assert as_power_of_two(constant) == power


def test_stand_ins_are_functions_of_their_argument_alone():
    x = np.random.default_rng(0).integers(-9, 9, (50,)).astype(np.float32)
    for f in (jnp.exp, jnp.tanh, lax.rsqrt, jnp.log, jnp.square, jax.nn.sigmoid):
        (y,), _ = evaluated(f, x)
        (again,), _ = evaluated(f, x[::-1])
        np.testing.assert_array_equal(y, again[::-1])
        assert np.array_equal(y, np.round(y)) and np.abs(y).max() <= 4
        assert len(np.unique(np.asarray(y))) > 2
        (minus,), _ = evaluated(f, np.array([-0.0], np.float32))
        (plus,), _ = evaluated(f, np.array([0.0], np.float32))
        assert minus == plus


def test_division_stays_linear_and_a_mean_of_means_is_the_mean():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (whole,), _ = evaluated(lambda x: x.mean(), x)
    (twice,), _ = evaluated(lambda x: x.mean(0).mean(), x)
    assert whole == twice
    for y in (3.0, np.float32([7.0])):
        (one,), _ = evaluated(lambda x, y=y: (x / y).sum(), x)
        parts = [evaluated(lambda x, y=y: (x / y).sum(), row)[0][0] for row in x]
        assert one == sum(parts)


def test_true_operations_without_stand_ins():
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)

    def f(x):
        return jnp.tanh(x @ x).mean() / 3 + lax.cond(x[0, 0] > 0, jnp.exp, jnp.sin, x).sum()

    (got,), _ = evaluated(f, x, stand_ins=False)
    np.testing.assert_allclose(got, f(x), rtol=1e-6)


def test_evaluation_goes_into_everything_that_holds_a_jaxpr():
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

    def f(x):
        y, _ = lax.scan(lambda c, r: (c + r, c), jnp.zeros(4), x)
        y = lax.fori_loop(0, 3, lambda _, y: y + 1, y)
        y = jax.checkpoint(lambda y: doubled(y) * y)(y)
        y = jax.jit(lambda y: lax.cond(y[0] > 0, lambda: y, lambda: -y))(y)
        return jax.vmap(lambda a: lax.map(lambda b: 2 * b, a[None]))(y).sum()

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (got,), _ = evaluated(f, x, stand_ins=False)
    assert got == f(x)
    trips = jax.make_jaxpr(lambda x: lax.while_loop(lambda y: y[0, 0] < 100, lambda y: 2 * y + 1, x))(x)
    assert Evaluation(stand_ins=False)(trips, [x])[0][0][0, 0] == 127
    (value, slope), _ = evaluated(jax.value_and_grad(f), x, stand_ins=False)
    np.testing.assert_array_equal(slope, jax.grad(f)(x))
    assert value == f(x)


# -- certificates --


@pytest.mark.parametrize(
    ("x", "bits"), [([1, 1], 1), ([3, 5, 0], 3), ([2, 4, 8], np.log2(7)), ([0.5, 0.25], np.log2(3)), ([0, 0], -np.inf)]
)
def test_bits_that_a_sum_needs(x, bits):
    x = jnp.array(x, jnp.float32)
    (eqn,) = (jax.make_jaxpr(lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None))(x)).jaxpr.eqns
    np.testing.assert_allclose(bits_needed(eqn.primitive, [x], eqn.params), bits, rtol=1e-5)


def exact(f, *args):
    _, notes = evaluated(f, *args, certify=True)
    return all(float(np.max(excess(note))) <= 0 for note in notes)


def test_certificate_follows_the_dtype_of_the_sum():
    x = np.full((8, 8), 31, np.float32)
    assert exact(lambda x: (x @ x).sum(), x)
    assert not exact(lambda x: (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).sum(), x)
    assert exact(lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16), np.eye(8, dtype=np.float32))
    assert not exact(lambda x: x.astype(jnp.bfloat16), x + 1 / 64)
    assert not exact(lambda x: x.sum(), x + np.float32(1e-3))
    assert not exact(lambda x: lax.scan(lambda c, r: (c + r @ r, r), jnp.float32(0), x)[0], x + np.float32(1e-3))


def test_certificate_refuses_what_has_no_stand_in():
    x = np.ones((4, 4), np.float32)
    for f in (lambda x: jnp.fft.fft(x).real, lambda x: jnp.cumprod(x, 0), jnp.linalg.cholesky):
        assert not exact(f, x)
    assert not exact(lambda x: lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ x, x), x)


def test_narrower_dtype_keeps_what_it_can_hold():
    assert is_kept(jnp.arange(257.0), jnp.bfloat16)
    assert not is_kept(jnp.float32(257), jnp.bfloat16)
    assert is_kept(jnp.float32(2049 - 1), jnp.float16)


# -- draws --


@pytest.mark.parametrize("input_range", RANGES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (8, 3), (4, 6, 32), (0, 3)])
def test_draws_are_whole_numbers_by_name_and_seed_alone(input_range, shape):
    numbers = draw("model.kernel", shape, input_range, 0)
    assert numbers.shape == shape and numbers.dtype.kind == "i"
    assert np.abs(numbers).max(initial=0) <= input_range.size
    np.testing.assert_array_equal(numbers, draw("model.kernel", shape, input_range, 0))
    if numbers.size > 90 and input_range.size > 1:
        assert not np.array_equal(numbers, draw("model.kernel", shape, input_range, 1))
        assert not np.array_equal(numbers, draw("model.bias", shape, input_range, 0))


def test_single_draws_have_one_number_in_each_row_or_column():
    for shape in ((6, 24), (24, 6), (7, 7)):
        filled = draw("w", shape, InputRange(1, "single"), 0) != 0
        assert (filled.sum(int(np.argmin(shape))) == 1).all()
        assert filled.any(0).all() and filled.any(1).all()


# -- what a difference looks like --

MESH = {"data": 2, "tensor": 4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: 8 * x, '8 times too large, which is the size of mesh axis "data" x "tensor"'),
        (lambda x: x / 2, '2 times too small, which is the size of mesh axis "data"'),
        (lambda x: x[::-1], "the right numbers in other places"),
        (lambda x: np.roll(x, 2, 1), "the right numbers in other places"),
        (lambda x: np.concatenate([x[:, :2]] * 4, 1), "another device's part"),
        (lambda x: x + 1, "only low bits differ"),
        (lambda x: x**2, "values differ"),
        (lambda x: x * np.nan, "some numbers are not finite"),
    ],
)
def test_cause_of_a_difference(change, words):
    x = np.random.default_rng(0).integers(-500, 500, (4, 8)).astype(np.float64)
    assert words in compared(x, change(x), MESH, 0.0).cause
    assert compared(x, x.copy(), MESH, 0.0).kind == "equal"


def test_cause_within_a_tolerance_is_none():
    x = np.ones((3, 3))
    assert compared(x, x * (1 + 1e-7), MESH, 1e-5).kind == "equal"
    assert compared(x, x * (1 + 1e-3), MESH, 1e-5).kind == "differs"
