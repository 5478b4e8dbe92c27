"""What reads the inputs of a program, through casts, calls and loops of one turn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.layers.partition.readers import OTHER, readers

X, W = np.ones((4, 8), np.float32), np.ones((8, 8), np.float32)


def loop(turns):
    return lambda x, w: lax.scan(lambda carry, each: (carry, each @ w), None, jnp.stack([x] * turns))[1]


@pytest.mark.parametrize(
    ("f", "found"),
    [
        (lambda x, w: x @ w, ["dot_general"]),
        (lambda x, w: x @ w.astype(jnp.bfloat16), ["dot_general"]),
        (lambda x, w: jax.jit(jnp.matmul)(x, w), ["dot_general"]),
        (lambda x, w: x @ w @ w, ["dot_general", "dot_general"]),
        (lambda x, w: x @ (w + 1), [OTHER]),
        (lambda x, w: (x @ w, w), ["dot_general", OTHER]),
        (lambda x, w: w[jnp.arange(3)], ["gather"]),
        (lambda x, w: x.at[w.astype(int)].get(mode="clip", wrap_negative_indices=False), [OTHER]),
        (lambda x, w: jax.jit(lambda x, w: w[jnp.arange(3)] + (x @ w)[:3])(x, w), ["gather", "dot_general"]),
        (loop(1), ["dot_general"]),
        (loop(2), [OTHER]),
        (lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, None, length=0)[0], [OTHER]),
        (lambda x, w: lax.scan(lambda w, _: (w + 1, w @ w), w, None, length=1)[1], [OTHER]),
        (lambda x, w: lax.scan(lambda x, w: (x @ w, None), x, w[None])[0], [OTHER]),
        (lambda x, w: x, []),
    ],
)  # fmt: skip
def test_what_reads_an_input(f, found):
    assert readers(jax.make_jaxpr(f)(X, W))[1] == found


def test_without_a_look_through_casts_and_calls_they_read_it_themselves():
    def f(x, once, twice, added, given, cast, called):
        x = x @ once @ twice @ twice @ (added + 1) @ given @ cast.astype(jnp.bfloat16)
        return jax.jit(jnp.matmul)(x, called), given

    jaxpr = jax.make_jaxpr(f)(X, *[W] * 6).jaxpr
    read = dict(zip(jaxpr.invars, readers(jaxpr, through=()), strict=True))
    assert {v for v in jaxpr.invars[1:] if read[v] == ["dot_general"]} == {jaxpr.invars[1]}


def test_the_places_of_a_lookup_are_not_what_is_looked_up():
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    f = lambda x, at: lax.gather(x, at, numbers, (1, 8), mode="promise_in_bounds")
    assert readers(jax.make_jaxpr(f)(X, np.zeros((3, 1), np.int32))) == [["gather"], [OTHER]]
