"""Gradients of models whose rows lie over several slices: reduced inside each, then between them, then shared."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.signals.active_config import unload
from tests.support.one_shard_map import in_one_shard_map

pytestmark = pytest.mark.usefixtures("nothing_loaded")

MESH = {"slice": {"size": 2, "over": "dcn"}, "data": 2, "tensor": 2}
ROWS = {"row": ["slice", "data"]}
PLANS = {
    "data": ({**ROWS}, {**ROWS}),
    "tensor": ({**ROWS, "column": "tensor"}, {**ROWS, "reduction": "tensor"}),
    "store": ({**ROWS, "store": "data"}, {**ROWS, "store": "data"}),
}
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


class Layers(nnx.Module):
    """Two products by layers of jshard."""

    def __init__(self, rngs):
        with jshard.signal("up"):
            self.up = jshard.Linear(6, 8, rngs=rngs)
        with jshard.signal("down"):
            self.down = jshard.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Plain(nnx.Module):
    """The same by Flax's own."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


SUMS = {"reduce_scatter": "data", "all_reduce": "slice", "all_gather": "data"}


def loss(model, x):
    return jshard.mean(model(x) ** 2)


def whole_loss(model, x):
    return jnp.mean(model(x) ** 2)


@functools.cache
def dense():
    unload()
    return nnx.value_and_grad(whole_loss)(Plain(nnx.Rngs(0)), X)


def loaded(plan, kind, **settings):
    up, down = ({**each} for each in PLANS[plan])
    if kind is Plain:
        up["match"], down["match"] = ["up/**"], ["down/**"]
    jshard.load({"jshard": {"mesh": MESH, **settings}, "up": up, "down": down})
    model = kind(nnx.Rngs(0))
    return model, (loss if kind is Layers else jshard.shard(whole_loss))


@pytest.mark.quick("store-Plain")
@pytest.mark.parametrize("kind", [Layers, Plain])
@pytest.mark.parametrize("plan", ["data", "tensor", "store"])
def test_gradients_are_summed_in_each_slice_then_a_part_of_them_between_slices(plan, kind):
    expected, by_hand = dense()
    model, f = loaded(plan, kind)
    value, gradients = nnx.jit(nnx.value_and_grad(f))(model, X)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(by_hand), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    ledger = jshard.explain(f, model, X)
    # x lies whole, and so does its gradient, which nobody sums
    lines = [line for line in ledger.lines if line.phase == "backward" and "redistribute" not in line.via]
    asked = {
        kind: [line for line in lines if line.collective == kind and line.axis == axis] for kind, axis in SUMS.items()
    }
    assert {kind: len(found) for kind, found in asked.items()} == {  # of two kernels and two biases
        "reduce_scatter": 4, "all_reduce": 4, "all_gather": 2 if plan == "store" else 4,
    }  # fmt: skip
    assert [line for line in lines if "slice" in line.mesh_axes] == asked["all_reduce"]
    full = sum(line.payload for line in asked["reduce_scatter"])
    assert full == 4 * {"data": 110, "tensor": 58, "store": 110}[plan]  # of the parameters that a device has in use
    assert sum(line.payload for line in asked["all_reduce"]) == full / 2  # half of them from each device of a slice
    assert {line.via for line in asked["all_gather"]} == {"remat" if plan == "store" else ""}


def test_gradients_by_value_and_grad_are_summed_in_each_slice_first():
    """In a step of the user's own, whose sums are one for each parameter."""
    expected, by_hand = dense()
    model, _ = loaded("data", Layers)

    @in_one_shard_map
    def gradients_of(model, x):
        with jshard.signal("up"):
            return jshard.value_and_grad(lambda model: (model(x) ** 2).mean(-1))(model)

    value, gradients = gradients_of(model, jshard.signal.tensor(X, name="up"))
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(by_hand), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", [Layers, Plain])
def test_hierarchy_verifies_and_differs_from_one_sum_over_all(kind):
    model, f = loaded("tensor", kind)
    assert jshard.verify(f, model, X).ok
    new = jshard.explain(f, model, X)
    model, f = loaded("tensor", kind, kernel={"all_reduce": "xla"})
    difference = jshard.diff(jshard.explain(f, model, X), new)
    gone = [change.old for change in difference.changes if change.kind == "gone"]
    assert {(line.collective, line.axis) for line in gone} == {("all_reduce", "slice, data")}
    added = {(change.new.collective, change.new.axis) for change in difference.changes if change.kind == "added"}
    assert added == {*SUMS.items()}
