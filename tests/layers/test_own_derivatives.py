"""Functions with a derivative of the model's own that use a parameter otherwise in it: at once, and over microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import jshard
from jshard.layers.gradients import accumulated

pytestmark = pytest.mark.usefixtures("nothing_loaded")
X = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)


def multiplied(w, x):
    return x @ w


def scaled(w, x):
    return x * w


def averaged(w, x):
    return jnp.full_like(x, jnp.mean(w * x))


def beside(w):
    """What the derivative makes of a parameter alone, beside the batch."""
    return jnp.tanh(w).sum() / 100


def by_vjp(f):
    """With a residual that the function does not have, of a parameter alone."""
    f = jax.custom_vjp(f)

    def backward(kept, of_y):
        (w, x), more = kept
        return tuple(each + more for each in jax.vjp(f.fun, w, x)[1](of_y))

    f.defvjp(lambda w, x: (f.fun(w, x), ((w, x), beside(w))), backward)
    return f


def by_jvp(f):
    f = jax.custom_jvp(f)

    @f.defjvp
    def _(primals, tangents):
        y, of_y = jax.jvp(f.fun, primals, tangents)
        return y, of_y + beside(primals[0]) * tangents[0].sum()

    return f


class Model(nnx.Module):
    def __init__(self, f, *, rngs):
        self.up, self.w, self.f = nnx.Linear(8, 8, rngs=rngs), nnx.Param(rngs.normal((8, 8))), f

    def __call__(self, x):
        return self.f(self.w[...], jnp.tanh(self.up(x)))


def loss(model, x):
    return (model(x) ** 2).mean()


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.quick("multiplied-by_jvp", "scaled-by_vjp")
@pytest.mark.parametrize("derivative", [by_vjp, by_jvp])
@pytest.mark.parametrize("f", [multiplied, scaled, averaged])
def test_gradients_by_a_derivative_of_the_models_own_are_those_of_one_device(f, derivative):
    own = derivative(f)
    both = nnx.jit(
        lambda model, x: (accumulated(loss)(model, x), jshard.value_and_grad(jshard.shard(loss))(model, x[0]))
    )
    jshard.unload()
    expected = both(Model(own, rngs=nnx.Rngs(0)), X)
    for words in ({"column": "tensor"}, {"store": "data"}):
        split = {"row": "data", **words, "match": ["**"]}
        jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "all": split})
        found = both(jshard.shard(Model(own, rngs=nnx.Rngs(0)), X[0]), X)
        assert_same(found, expected)


@pytest.mark.parametrize("f", [lambda x: x @ x.T, lambda x: jnp.roll(x, 1, 0)], ids=["product", "roll"])
def test_a_derivative_of_one_operand_that_is_gathered_is_too(f):
    own = jax.custom_jvp(f)
    own.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    model = lambda: Model(lambda w, x: own(x) * w, rngs=nnx.Rngs(0))
    expected = nnx.value_and_grad(loss)(model(), X[0])
    jshard.load({"jshard": {"mesh": {"data": 2}}, "all": {"row": "data", "match": ["**"]}})
    found = nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(jshard.shard(model()), X[0])
    assert_same(found, expected)


def test_forward_mode_goes_through_what_moves_nothing():
    smooth = lambda x: jax.nn.softplus(x) + jax.nn.relu(x)  # each has a rule for tangents
    expected = jax.jvp(smooth, (X[0],), (X[1],))
    jshard.load({"jshard": {"mesh": {"data": 2}}, "all": {"row": "data"}})
    where = NamedSharding(jshard.mesh(), jax.P("data"))
    found = jax.jit(lambda x, of_x: jax.jvp(jshard.shard(smooth), (x,), (of_x,)))(*jax.device_put((X[0], X[1]), where))
    assert_same(found, expected)


class Stack(nnx.Module):
    def __init__(self, f, *, rngs):
        self.blocks = jshard.stack(Model, 2, f, rngs=rngs)

    def __call__(self, x):
        return self.blocks(x)


@pytest.mark.seconds
def test_in_stages_they_are_too():
    own = by_vjp(multiplied)
    expected = nnx.jit(accumulated(loss))(Stack(own, rngs=nnx.Rngs(0)), X)
    asked = {"train": {"microbatches": 2}, "pipeline": {"axis": "stage", "schedule": "1f1b"}}
    split = {"stage": "equal", "row": "data", "match": ["**"]}
    jshard.load({"jshard": {"mesh": {"stage": 2, "data": 2}, **asked}, "all": split})
    found = nnx.jit(accumulated(loss))(jshard.shard(Stack(own, rngs=nnx.Rngs(0)), X[0]), X)
    assert_same(found, expected)
