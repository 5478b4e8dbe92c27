"""RoPE: the frequencies of each scaling, and what rotations keep."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jshard.errors import JShardError
from jshard.layers.attention import Rope, fields_of

SIZE, THETA, CONTEXT, FACTOR = 64, 500_000.0, 8192, 8.0
PLAIN = Rope(THETA).frequencies(SIZE)
ROUNDS = CONTEXT * PLAIN / (2 * math.pi)  # of each pair in the original context


def test_what_is_not_said_is_as_most_models_have_it():
    assert Rope() == Rope(10_000.0, "none", 1.0, 8192, 1.0, 4.0)


def test_without_a_scaling_frequencies_fall_from_one_to_the_base():
    np.testing.assert_allclose(PLAIN, [1 / THETA ** (2 * pair / SIZE) for pair in range(SIZE // 2)])


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(Rope(THETA, "linear", FACTOR).frequencies(SIZE), PLAIN / FACTOR)


def test_llama3_keeps_fast_pairs_and_divides_slow_ones():
    wanted = []
    for frequency, rounds in zip(PLAIN, ROUNDS, strict=True):
        smooth = (rounds - 1) / (4 - 1)
        between = (1 - smooth) * frequency / FACTOR + smooth * frequency
        wanted.append(frequency if rounds > 4 else frequency / FACTOR if rounds < 1 else between)
    assert any(1 < each < 4 for each in ROUNDS)
    np.testing.assert_allclose(Rope(THETA, "llama3", FACTOR).frequencies(SIZE), wanted)


@pytest.mark.parametrize("rope", [Rope(100.0), Rope(100.0, "llama3", 4.0, 16)], ids=["plain", "llama3"])
def test_products_of_rotated_heads_depend_on_distance_alone(rope):
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    at = [[jnp.full((1, 1), each) for each in pair] for pair in ((5, 3), (12, 10), (6, 3))]
    near, far, other = (float((rope.rotate(q, one) * rope.rotate(k, two)).sum()) for one, two in at)
    np.testing.assert_allclose(near, far, rtol=1e-5)
    assert abs(near - other) > 1e-3
    np.testing.assert_allclose(jnp.square(rope.rotate(q, at[0][0])).sum(), (q**2).sum(), rtol=1e-5)


def test_a_pair_turns_by_its_frequency_times_its_position():
    x = np.zeros((1, 2, 1, 8), np.float32)
    x[..., 1] = 1
    (_, turned) = np.asarray(Rope(100.0).rotate(x, jnp.asarray([[0, 3]])))[0, :, 0]
    angle = 3 * Rope(100.0).frequencies(8)[1]
    np.testing.assert_allclose(turned, [0, math.cos(angle), 0, 0, 0, math.sin(angle), 0, 0], atol=1e-6)


def test_a_field_that_is_not_given_is_told():
    @dataclasses.dataclass
    class Sized:
        size: int
        theta: float = 1.0

    assert fields_of(Sized, {"size": 1}, "it") == {"size": 1}
    with pytest.raises(JShardError) as error:
        fields_of(Sized, {"theta": 2.0}, "it")
    assert str(error.value) == "it has no size; give size too"


def test_a_scaling_that_there_is_not_is_told():
    with pytest.raises(JShardError) as error:
        Rope.of({"scaling": "llama"})
    assert str(error.value) == 'rope of a decoder has scaling "llama"; did you mean "llama3"?'
    with pytest.raises(JShardError) as error:
        Rope.of({"thetta": 1})
    assert str(error.value) == 'rope of a decoder has no "thetta"; did you mean "theta"?'
