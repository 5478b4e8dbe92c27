"""What verify draws and computes with: arithmetic modulo a prime, and what a difference looks like."""

from __future__ import annotations

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.inspect.verify import interpreter
from jshard.inspect.verify.dataflow import last_bit, obstacles
from jshard.inspect.verify.first_divergence import compared
from jshard.inspect.verify.inputs import draw
from jshard.inspect.verify.interpreter import Evaluation
from jshard.inspect.verify.residues import PRIMES, centered, embedded, inverse, modulus_for, opaque
from jshard.programs.jaxprs import equations

P = PRIMES[0]


def evaluated(f, *args, **how):
    return Evaluation(**how)(jax.make_jaxpr(f)(*args), args)


def modulo(f, *args):
    """The first result on whole numbers; the program is one of floating-point numbers."""
    described = [jax.ShapeDtypeStruct(np.shape(each), np.float32) for each in args]
    return np.asarray(Evaluation(modulus=P)(jax.make_jaxpr(f)(*described), list(args))[0][0])


def numbers(*shape, seed=0):
    return draw("x", shape, P, seed)


# -- arithmetic modulo a prime --


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_branch_is_run_that_the_index_says(number):
    def f(n, x):
        return lax.switch(n, [lambda x: x @ x, lambda x: x + 1, lambda x: x.sum(0) * x], x)

    x = numbers(4, 4).astype(np.float32)
    (found,), _ = evaluated(f, np.int32(number), x)
    np.testing.assert_allclose(found, f(number, x), rtol=1e-6)


@pytest.mark.parametrize("prime", PRIMES)
def test_division_undoes_multiplication_modulo_every_prime(prime):
    assert all(prime % n for n in range(2, prime))
    x = np.arange(-(prime // 2), prime // 2 + 1, dtype=np.int32)
    one = centered(np.asarray(inverse(x, prime)).astype(np.int64) * x, prime)
    np.testing.assert_array_equal(one, x != 0)


@pytest.mark.parametrize(
    ("constant", "fraction"),
    [(0.0, 0), (1.0, 1), (-8.0, -8), (0.1, Fraction(1, 10)), (np.float32(1 / 3), Fraction(1, 3)), (1e-6, Fraction(1, 10**6)),
     (0.75, Fraction(3, 4)), (2.0**30, 2**30), (3.0 * 2.0**-9, Fraction(3, 512))],
)  # fmt: skip
def test_a_constant_is_the_fraction_that_it_is_rounded_from(constant, fraction):
    fraction = Fraction(fraction)
    found = int(embedded(constant, P))
    assert (found * fraction.denominator - fraction.numerator) % P == 0 and abs(found) <= P // 2


def test_an_array_of_constants_is_exact_and_infinity_the_end_of_all():
    x = np.array([0.0, 1.5, -3.25, 2.0**40, 1e-30, 2.0**51, 3 * 2.0**51, -np.inf, np.inf, np.nan, -3e38])
    found = embedded(x, P)
    for one, got in zip(x[:7], found[:7], strict=True):
        exact = Fraction(one)
        assert (int(got) * exact.denominator - exact.numerator) % P == 0
    assert found[7:].tolist() == [-(P // 2), P // 2, 0, -(P // 2)]


def test_every_number_is_finite_and_a_loop_without_a_stand_in_hands_on_what_goes_in():
    x = numbers(8)
    np.testing.assert_array_equal(modulo(lambda x: jnp.where(jnp.isfinite(x), x, 0), x), x)
    loop = lambda x, most, more: lax.while_loop(lambda c: c.sum() < most, lambda c: c + more, x)
    (eqn,) = (
        eqn for eqn in jax.make_jaxpr(loop)(*map(np.float32, ([1, 2], 9, 3))).eqns if eqn.primitive.name == "while"
    )
    assert (eqn.params["cond_nconsts"], eqn.params["body_nconsts"]) == (1, 1)
    assert opaque(eqn, ["most", "more", "carry"], P) == ["carry"]


def test_sums_products_and_quotients_keep_the_laws_of_arithmetic():
    """Written in two ways, as a program and its parts are, they are equal in every bit."""
    x, y, w = numbers(6, 8), numbers(6, 8, seed=1), numbers(8, 4, seed=2)
    np.testing.assert_array_equal(modulo(lambda x: x.mean(), x), modulo(lambda x: x.mean(0).mean(), x))
    np.testing.assert_array_equal(
        modulo(lambda x, w: x @ w / 3 - w[0], x, w),
        modulo(lambda x, w: x[:, :5] / 3 @ w[:5] + (x[:, 5:] @ w[5:] / 3 - w[0]), x, w),
    )
    np.testing.assert_array_equal(
        modulo(lambda x, y: (x / y + 1) * y, x, y), modulo(lambda x, y: x + y, x, np.where(y, y, 1)) * (y != 0)
    )
    np.testing.assert_array_equal(modulo(lambda x: x.var(0), x), modulo(lambda x: (x**2).mean(0) - x.mean(0) ** 2, x))
    np.testing.assert_array_equal(modulo(lambda x: x**-2, x), modulo(lambda x: 1 / lax.square(x), x))
    np.testing.assert_array_equal(modulo(lambda x: jnp.cumsum(x, 0)[-1], x), modulo(lambda x: x.sum(0), x))
    exact = centered(np.asarray(x, np.int64) @ w, P)
    np.testing.assert_array_equal(modulo(lambda x, w: x @ w, x, w), exact)


def test_lookups_scatters_and_convolutions_are_exact():
    x, kernel = numbers(2, 9, 3), numbers(4, 3, 5, seed=1)
    places = np.array([1, 1, 0, 7, 1])

    def convolved(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    def by_products(x, kernel):
        padded = jnp.pad(x, ((0, 0), (1, 2), (0, 0)))
        return sum(padded[:, n : n + 9] @ kernel[n] for n in range(4))

    np.testing.assert_array_equal(modulo(convolved, x, kernel), modulo(by_products, x, kernel))
    np.testing.assert_array_equal(
        modulo(jax.grad(lambda k, x: (convolved(x, k) ** 2).sum()), kernel, x),
        modulo(jax.grad(lambda k, x: (by_products(x, k) ** 2).sum()), kernel, x),
    )
    x = numbers(8, 4)
    one_hot = np.eye(8, dtype=np.float32)[places]
    np.testing.assert_array_equal(modulo(lambda x: x[places], x), modulo(lambda x: one_hot @ x, x))
    added = modulo(lambda x: jnp.zeros((8, 4)).at[places].add(x[:5]), x)
    np.testing.assert_array_equal(added, modulo(lambda x: one_hot.T @ x[:5], x))
    np.testing.assert_array_equal(
        modulo(lambda x: jnp.zeros(8).at[places].max(x[:5, 0]), x)[1], max(0, *x[[0, 1, 4], 0])
    )


def test_stand_ins_are_functions_of_their_argument_alone_and_each_its_own():
    x = numbers(500)
    seen = []
    for f in (jnp.exp, jnp.tanh, lax.rsqrt, jnp.log, jax.nn.sigmoid, jnp.sin, jnp.cos, jnp.floor, lambda x: x**0.3):
        y = modulo(f, x)
        np.testing.assert_array_equal(y, modulo(f, x[::-1])[::-1])
        assert np.abs(y).max() <= P // 2 and len(np.unique(y)) > 300
        assert not np.array_equal(centered(y[1:].astype(int) + y[:-1], P), modulo(f, centered(x[1:] + x[:-1], P)))
        seen.append(y.tobytes())
    assert len(set(seen)) == len(seen)


def test_the_modulus_is_the_largest_for_which_every_sum_stays_in_32_bits():
    def of(f, *shapes):
        described = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        return modulus_for(list(equations(jax.make_jaxpr(f)(*described))))

    assert of(jnp.matmul, (2, 2000), (2000, 2)) == 2039
    assert of(jnp.matmul, (2, 8000), (8000, 2)) == 1021
    assert of(jnp.sum, (2**20,)) == 2039
    assert of(jnp.sum, (2**22,)) == 1021
    assert of(lambda x, w: lax.scan(lambda c, w: (c @ w, None), x, w)[0], (4, 30000), (1, 30000, 30000)) == 509
    assert of(jnp.sum, (2**33,)) is None


def test_true_operations_without_stand_ins():
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)

    def f(x):
        return jnp.tanh(x @ x).mean() / 3 + lax.cond(x[0, 0] > 0, jnp.exp, jnp.sin, x).sum()

    (got,), _ = evaluated(f, x)
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
    (got,), _ = evaluated(f, x)
    assert got == f(x)
    trips = jax.make_jaxpr(lambda x: lax.while_loop(lambda y: y[0, 0] < 100, lambda y: 2 * y + 1, x))(x)
    assert Evaluation()(trips, [x])[0][0][0, 0] == 127
    (value, slope), _ = evaluated(jax.value_and_grad(f), x)
    np.testing.assert_array_equal(slope, jax.grad(f)(x))
    assert value == f(x)


# -- what can't be proven --


def test_an_obstacle_is_named_with_its_line():
    x = np.ones((4, 4), np.float32)
    for f, name in (
        (lambda x: jnp.fft.rfft(x).real, "fft"),
        (lambda x: lax.scan(lambda c, r: (c + jnp.cumprod(r), r), jnp.ones(4), x)[0], "cumprod"),
        (lambda x: lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ x, x), "while"),
    ):
        line = f.__code__.co_firstlineno
        (first, *_) = obstacles(jax.make_jaxpr(f)(x), "cpu").values()
        assert first == f"{name} at test_inputs.py:{line} has no exact stand-in"
    conv = jax.make_jaxpr(lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"))(x)
    assert not obstacles(conv, "cpu") and min(obstacles(conv, "gpu").values()).startswith("conv_general_dilated ")
    for f in (lambda x: lax.fori_loop(0, 3, lambda _, c: c @ x, x), lambda x: lax.sort(jnp.exp(x))):
        assert not obstacles(jax.make_jaxpr(f)(x), "cpu")


def test_the_last_bit_is_that_of_what_has_no_meaning_in_64_bits():
    x = np.ones((8, 8), np.float32)

    def bit(f):
        return last_bit(jax.make_jaxpr(f)(x))

    def called(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert bit(lambda x: jnp.fft.rfft(x.astype(jnp.bfloat16) @ x).real) == 0.0
    assert bit(called) == 2.0**-23
    assert bit(lambda x: lax.scan(lambda c, r: (c + called(r.astype(jnp.float16)), r), x[0], x)[0]) == 2.0**-10


def test_true_operations_in_64_bits_leave_no_rounding_but_what_is_narrowed_for_a_sum(monkeypatch):
    x = np.linspace(0.1, 1, 64).reshape(8, 8)

    def f(x):
        y = jax.nn.softmax((x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(jnp.float32) * 3)
        (total, _) = lax.scan(lambda c, r: (c + jnp.where(r > 0.1, r, 2 * r), None), jnp.zeros(8), y)
        return lax.cond(total.sum() > 0, lambda x: x / 3, lambda x: x, total)

    def narrowed(x):
        return jax.shard_map(
            lambda x: lax.psum(x.astype(jnp.bfloat16), "data"), in_specs=jax.P("data"), out_specs=jax.P()
        )(x)

    with jax.enable_x64(True):
        wide = Evaluation(wide=True)
        jaxpr = jax.make_jaxpr(f)(x.astype(np.float32))
        y = np.exp(3 * (x @ x))
        y = y / y.sum(1, keepdims=True)
        np.testing.assert_allclose(wide(jaxpr, [x])[0][0], np.where(y > 0.1, y, 2 * y).sum(0) / 3, rtol=1e-13)
        with jax.set_mesh(jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))):
            jaxpr = jax.make_jaxpr(narrowed)(x.astype(np.float32))
            for asked, far in ((frozenset(), True), (frozenset(["bfloat16"]), False)):
                monkeypatch.setattr(interpreter, "asked_dtypes", lambda path, asked=asked: asked)
                (total,), _ = jax.jit(functools.partial(wide, jaxpr))([jnp.asarray(x)])
                assert (np.abs(total - (x[:4] + x[4:])).max() > 1e-4) == far


# -- draws --


@pytest.mark.parametrize("shape", [(), (5,), (8, 3), (4, 6, 32), (0, 3)])
def test_draws_are_whole_numbers_by_name_and_seed_alone(shape):
    drawn = draw("model.kernel", shape, P, 0)
    assert drawn.shape == shape and drawn.dtype == np.int32
    assert np.abs(drawn).max(initial=0) <= P // 2
    np.testing.assert_array_equal(drawn, draw("model.kernel", shape, P, 0))
    if drawn.size > 90:
        assert not np.array_equal(drawn, draw("model.kernel", shape, P, 1))
        assert not np.array_equal(drawn, draw("model.bias", shape, P, 0))


# -- what a difference looks like --

MESH = {"data": 2, "tensor": 4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: 8 * x, '8 times too large, the size of mesh axis "data" x "tensor"'),
        (lambda x: x / 2, '2 times too small, the size of mesh axis "data"'),
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: 8 * x, '8 times too large, the size of mesh axis "data" x "tensor"'),
        (lambda x: x * pow(2, -1, P), '2 times too small, the size of mesh axis "data"'),
        (lambda x: x[::-1], "the right numbers in other places"),
        (lambda x: x + 1, "only low bits differ"),
        (lambda x: x**2, "values differ"),
    ],
)
def test_cause_of_a_difference_modulo_a_prime(change, words):
    x = np.asarray(numbers(4, 8), np.int64)
    assert words in compared(x, centered(change(x), P), MESH, 0.0, P).cause
    assert compared(x, x + P, MESH, 0.0, P).kind == "equal"
