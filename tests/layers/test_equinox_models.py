"""Models of Equinox given to jshard.shard."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard

eqx = pytest.importorskip("equinox")
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


class Net(eqx.Module):
    up: jax.Array
    down: Any

    def __init__(self):
        self.up = jax.random.normal(jax.random.key(0), (16, 32))
        self.down = eqx.nn.Linear(32, 8, key=jax.random.key(1))

    def __call__(self, x):
        return jax.vmap(self.down)(jnp.tanh(x @ self.up))


def loss(model, x):
    return jnp.square(model(x)).mean()


def assert_equal(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("types", ["explicit", "auto"])
def test_a_model_is_placed_and_its_call_is_partitioned(types):
    jshard.unload()
    plain = Net()
    expected, (value, gradient) = plain(X), eqx.filter_value_and_grad(loss)(plain, X)
    mesh = {"mesh": {"data": 2, "tensor": 4}, "axis_types": types}
    jshard.load(
        {"jshard": mesh, "up": {"column": "tensor", "match": ["up"]}, "rest": {"store": "data", "match": ["**"]}}
    )
    call = jshard.shard(lambda model, x: model(x))
    model = call.place(plain, X)
    assert isinstance(model, Net) and not isinstance(plain.up.sharding, jax.NamedSharding)
    assert [each.sharding.spec[:2] for each in (model.up, model.down.weight)] == [(None, "tensor"), ("data", None)]
    assert_equal(call(model, X), expected)
    found = eqx.filter_jit(eqx.filter_value_and_grad(jshard.shard(loss)))(model, X)
    assert_equal(found, (value, gradient))
    assert found[1].up.sharding.spec == jax.P(None, "tensor")
    assert [each.parameter for each in jshard.explain(call, model, X).claims] == ["up", "down/weight", "down/bias"]

    @jshard.jit
    def step(model, x):
        found, gradients = jshard.value_and_grad(loss)(model, x)
        return found, jax.tree.map(lambda w, g: w - g, model, gradients)

    told, after = step(model, X)
    assert_equal((told, after), (value, jax.tree.map(lambda w, g: w - g, plain, gradient)))
    assert type(after) is type(model) and after.up.sharding.spec == jax.P(None, "tensor")
    assert_equal(call(after, X), jax.tree.map(lambda w, g: w - g, plain, gradient)(X))
