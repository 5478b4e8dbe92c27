"""A function with a rule of its own is one equation, and plain JAX where nothing is split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jshard.layers.partition.by_hand import by_hand

X = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)


def both(x, y):
    return x @ y, jnp.sin(x)


def test_it_is_one_equation_and_under_vmap_plain_jax():
    call = by_hand(both, lambda run, eqn, parts: parts)
    assert [eqn.primitive.name for eqn in jax.make_jaxpr(call)(X[0], X[1].T).eqns] == ["by_hand"]
    for f in (jax.vmap, lambda f, **how: jax.jit(jax.vmap(f, **how))):
        found = f(call, in_axes=(0, None))(X, X[1].T)
        for one, other in zip(found, both(X, X[1].T), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
