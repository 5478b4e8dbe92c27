"""What is read from a jaxpr whatever it computes; the collectives of whole programs are in test_ledger.py."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard.inspect.ledger.jaxpr_walk import Around, _collective, has_transposed, scopes_in, walk
from jshard.provenance import scope

X = np.ones(3, np.float32)


def under_a_name(x):
    with jax.named_scope("transpose"):
        return jnp.sin(x)


@pytest.mark.parametrize(
    ("f", "found"),
    [
        (jnp.sin, False),
        (under_a_name, False),
        (jax.vmap(jnp.sin), False),
        (lambda x: jax.jvp(jnp.sin, (x,), (x,)), False),
        (jax.grad(lambda x: jnp.sin(x).sum()), True),
        (jax.jit(jax.grad(lambda x: jnp.sin(x).sum())), True),
    ],
    ids=["plain", "a name", "vmap", "jvp", "grad", "grad in jit"],
)
def test_a_backward_pass_is_seen(f, found):
    assert has_transposed(jax.make_jaxpr(f)(X).jaxpr) is found


def test_scopes_are_found_in_calls_in_calls():
    def f(x):
        with scope(signal="a"):
            return jax.jit(inner)(x)

    def inner(x):
        with scope(signal="b"):
            return jnp.sin(x)

    assert scopes_in(jax.make_jaxpr(f)(X)) >= {("a",), ("a", "b")}


def test_operations_of_any_name_hold_no_collectives():
    assert list(walk(jax.make_jaxpr(lambda x: x ^ x)(X > 0).jaxpr)) == []


def test_a_sum_over_axes_of_an_array_is_no_collective():
    x = types.SimpleNamespace(aval=jax.core.ShapedArray((3,), X.dtype))
    eqn = types.SimpleNamespace(primitive=jax.lax.psum_p, params={"axes": (0,)}, invars=[x], outvars=[x])
    assert list(_collective(eqn, Around())) == []
