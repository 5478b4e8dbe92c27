"""Gradients over microbatches: a mean of values and of gradients, and what the model keeps goes from one to the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.layers.gradients import accumulated
from jshard.layers.partition.microbatches import Microbatches
from jshard.signals.scope import unplaced

pytestmark = pytest.mark.usefixtures("nothing_loaded")

X = np.arange(24, dtype=np.float32).reshape(3, 4, 2) / 8
MEAN = np.mean((X @ np.array([1.0, -2.0])) ** 2)  # the loss of a new model
MESHES = {
    "explicit": {"jshard": {"mesh": {"data": 2}}, "rest": {"row": "data", "match": ["**"]}},
    "auto": {"jshard": {"mesh": {"data": 2}, "axis_types": "auto"}, "rest": {"row": "data", "match": ["**"]}},
}


class Counted(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array([1.0, -2.0]))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return x @ self.w[...]


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("mesh", [None, *MESHES])
def test_values_and_gradients_are_means_and_variables_go_from_one_to_the_next(mesh):
    model = Counted()
    expected = jax.grad(lambda w: jnp.mean((X.reshape(12, 2) @ w) ** 2))(model.w[...])
    if mesh:
        jshard.load(MESHES[mesh])
        model = jshard.shard(model)
    value, gradients = nnx.jit(accumulated(loss))(model, X)
    np.testing.assert_allclose(value, MEAN, rtol=1e-6)
    assert jax.tree.structure(gradients) == jax.tree.structure(nnx.state(model, nnx.Param))
    np.testing.assert_allclose(gradients["w"][...], expected, rtol=1e-6)
    assert model.calls[...] == 3


def test_variables_of_one_device_are_taken_to_all():
    jshard.load(MESHES["explicit"])
    model = jshard.shard(Counted())
    model.calls.set_value(jax.device_put(model.calls[...], jax.devices()[0]))
    value, _ = accumulated(loss)(model, X)
    np.testing.assert_allclose(value, MEAN, rtol=1e-6)
    assert model.calls[...] == 3


@pytest.mark.parametrize("mesh", [None, "explicit"])
def test_one_microbatch_is_the_batch(mesh):
    model = Counted()
    if mesh:
        jshard.load(MESHES[mesh])
        model = jshard.shard(model)
    value, _ = accumulated(loss)(model, X[:1])
    np.testing.assert_allclose(value, np.mean((X[0] @ np.array([1.0, -2.0])) ** 2), rtol=1e-6)


def test_on_an_explicit_mesh_a_gradient_is_summed_once_and_each_value_in_its_turn():
    jshard.load(MESHES["explicit"])
    ledger = jshard.explain(accumulated(loss), jshard.shard(Counted()), X)
    assert sorted((line.collective, line.count, line.payload) for line in ledger) == [
        ("all_reduce", 1, 8), ("all_reduce", 3, 4),
    ]  # fmt: skip


def test_a_parameter_that_is_not_marked_has_the_same_gradient_summed_in_each_turn(monkeypatch):
    jshard.load(MESHES["explicit"])
    model, found = jshard.shard(Counted()), []
    for marks in (Microbatches.marked.func, lambda self: [frozenset() for _ in self.parameters]):
        monkeypatch.setattr(Microbatches, "marked", property(marks))
        own = lambda model, x: loss(model, x)
        sums = [line.count for line in jshard.explain(accumulated(own), model, X) if line.phase == "backward"]
        found.append((sums, *map(np.asarray, jax.tree.leaves(nnx.jit(accumulated(own))(model, X)))))
    (sums, value, gradient), (each, *same) = found
    assert (sums, each) == ([1], [3])
    np.testing.assert_allclose((value, *gradient), (same[0], *same[1]), rtol=1e-6)


def test_what_is_traced_as_for_one_device_and_what_has_no_mesh_is_one_loop():
    jshard.load(MESHES["explicit"])
    with unplaced(True):
        assert "psum" not in str(jax.make_jaxpr(lambda x: accumulated(loss)(jshard.shard(Counted()), x)[0])(X))
    jshard.load({"jshard": {}})
    value, _ = accumulated(loss)(Counted(), X)
    np.testing.assert_allclose(value, MEAN, rtol=1e-6)


SUMMED = {  # what the claim says, of a bfloat16 parameter, and how its gradient is summed
    "as it is": ({}, ("all_reduce", 1, 4, "bfloat16")),
    "in a wider dtype": ({"dtype": {"compute": "bfloat16", "reduce": "float32"}}, ("all_reduce", 1, 8, "float32")),
    "by permutes": ({"kernel": {"all_reduce": "permute"}}, ("permute", 6, 2, "bfloat16")),
}


@pytest.mark.parametrize("case", SUMMED)
def test_a_gradient_is_summed_as_the_claim_of_its_parameter_says(case):
    words, expected = SUMMED[case]
    jshard.load({"jshard": {"mesh": {"data": 4}}, "rest": {"row": "data", **words, "match": ["**"]}})
    model = Counted()
    model.w = nnx.Param(model.w[...].astype(jnp.bfloat16))
    lines = [line for line in jshard.explain(accumulated(loss), jshard.shard(model), X) if line.phase == "backward"]
    assert [(line.collective, line.count, line.payload, line.dtype) for line in lines] == [expected]
    assert [line.cause.signal for line in lines] == ["rest"]
