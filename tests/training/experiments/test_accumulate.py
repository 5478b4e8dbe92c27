"""`microbatches`: a step over microbatches is a step on the whole batch, and its gradients cross the wire once."""

from __future__ import annotations

import collections
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.layers.gradients import accumulated
from jshard.signals import active_config as current
from jshard.training.experiments.experiment import Experiment
from tests.support import cases, plain

P = jax.P
REST = {"row": "data", "match": ["**"]}
PLANS = {
    "none": {},
    "data": {"rest": REST},
    "tensor": {
        "wide": {"row": "data", "column": "tensor", "match": ["up/**"]},
        "sums": {"row": "data", "reduction": "tensor", "store": {"optimizer": "data"}, "match": ["down/**"]},
        "rest": REST,
    },
    "fsdp": {"rest": {**REST, "store": "data"}},
}


class Still(plain.Dense):
    """The same without random numbers."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)


class Stacked(nnx.Module):
    """Four equal layers as one scan, with a parameter that all of them use."""

    def __init__(self, *, rngs):
        self.kernels = nnx.Param(rngs.params.normal((4, 16, 16)) / 4)
        self.shared = nnx.Param(jnp.ones(16))
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        turn = lambda x, w: (x + jax.nn.relu(x @ w) * self.shared[...], None)
        return self.head(jax.lax.scan(turn, x, self.kernels[...])[0])


class Layers(nnx.Module):
    """Layers of jshard, built under signals."""

    def __init__(self, *, rngs):
        self.mlp = jshard.MLP(16, 32, 8, rngs=rngs)

    def __call__(self, x):
        return self.mlp(x)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    current.unload()


def built(model, plan, *overrides, **train):
    settings = {
        "model": f"{model}",
        "data": "tests.support.plain:data",
        "batch": 32,
        "steps": 4,
        "optimizer": "sgd",
        **train,
    }
    mesh = {"mesh": {"data": 2, "tensor": 4} if plan != "none" else {"data": 1}}
    signals = {"up": {"row": "data", "column": "tensor"}, "down": {"row": "data", "reduction": "tensor"}}
    signals = signals if plan == "layers" else PLANS[plan]
    Path("m.yaml").write_text(json.dumps({"jshard": {**mesh, "strict": False, "train": settings}, **signals}))
    return Experiment.build(current.load("m.yaml", overrides), current.mesh())


def stepped(experiment):
    """The losses of two steps, and the parameters behind them."""
    step, batch = experiment.step(), experiment.first_batch()
    losses = [float(step(*batch)) for _ in range(2)]
    where = jax.tree.map(lambda array: array.sharding, nnx.state((experiment.model, experiment.optimizer)))
    assert jax.tree.map(lambda array: array.sharding, step.state) == where
    return losses, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.filter_state(step.state[0], nnx.Param)))


@functools.cache
def whole(model):
    """The same of the whole batch on one device."""
    return stepped(built(model, "none"))


def close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), one, other)


EXPLICIT = [*(("Still", plan) for plan in PLANS), ("Stacked", "data"), ("Stacked", "fsdp"), ("Layers", "layers")]


@pytest.mark.quick("Still-tensor-auto")
@pytest.mark.parametrize(
    ("model", "plan", "axis_types"),
    [
        *((model, plan, "explicit") for model, plan in EXPLICIT),
        ("Still", "tensor", "auto"),
        ("Layers", "layers", "auto"),
    ],
)
def test_a_step_over_microbatches_is_a_step_on_the_whole_batch(model, plan, axis_types):
    words = ["microbatches=8", f"jshard.axis_types={axis_types}"]
    ours = stepped(built(f"{__name__}:{model}", plan, *words))
    close(ours, whole(f"{__name__}:{model}"))


@pytest.mark.slow
def test_dropout_is_drawn_anew_for_each_microbatch_and_alike_on_every_mesh():
    one = stepped(built("tests.support.plain:Dense", "none", "microbatches=4"))
    for plan in ("data", "tensor", "fsdp"):
        close(stepped(built("tests.support.plain:Dense", plan, "microbatches=4")), one)
    assert abs(whole("tests.support.plain:Dense")[0][0] - one[0][0]) > 1e-3


def counts(experiment, phase="backward"):
    found = collections.Counter()
    for line in experiment.explain().only(phase=phase):
        assert line.count_known
        found[line.collective, line.axis] += line.count
    return dict(found)


@pytest.mark.quick("Layers-layers")
@pytest.mark.parametrize(
    ("model", "plan"), [("Still", "data"), ("Stacked", "data"), ("Still", "tensor"), ("Layers", "layers")]
)
def test_gradients_cross_the_wire_once(model, plan):
    parts = built(f"{__name__}:{model}", plan, "microbatches=8")
    ledger = parts.explain()
    data = [line for line in ledger.only(phase="backward") if "data" in line.axis]
    assert sum(line.count for line in data) == len(jax.tree.leaves(nnx.state(parts.model, nnx.Param)))
    assert {line.collective for line in data} == {"all_reduce"}
    assert sum(line.payload * line.count for line in data) == sum(rest.parameters for rest in ledger.memory)
    assert all(line.signal != "-" for line in data)


def test_a_stored_parameter_is_gathered_and_its_gradient_scattered_for_each_microbatch():
    lines = built(f"{__name__}:Still", "fsdp", "microbatches=4").explain()
    parameters = 6
    found = collections.Counter()
    for line in lines:
        found[line.collective] += line.count
    assert found["all_gather"] == 4 * (parameters + 2)  # the norm's scale and the second kernel again backward
    assert found["reduce_scatter"] == 4 * parameters


@pytest.mark.slow
def test_a_step_over_microbatches_is_verified():
    for plan in ("tensor", "fsdp"):
        found = built(f"{__name__}:Still", plan, "microbatches=4").verify()
        assert found, str(found)


@pytest.mark.seconds
def test_statistics_and_tokens_go_from_one_microbatch_to_the_next():
    experiment = built("tests.support.plain:Filters", "data", "microbatches=4")
    close(stepped(experiment), stepped(built("tests.support.plain:Filters", "none", "microbatches=4")))


def test_without_a_configuration_it_is_the_mean_of_microbatches():
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    loss = lambda model, x, y: jnp.mean((model(x) - y) ** 2)
    x, y = cases.numbers((8, 4)), cases.numbers((8, 1), 1)
    value, gradients = accumulated(loss)(model, x.reshape(4, 2, 4), y.reshape(4, 2, 1))
    close((value, gradients), nnx.value_and_grad(loss)(model, x, y))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["microbatches=5"],
            "jshard.train.microbatches (the command line) splits 32 rows into 5 microbatches; use batch=30 or 35",
        ),
        (
            ["microbatches=8", "batch=24"],
            'jshard.train.batch (the command line) splits the 3 rows of each of 8 microbatches over mesh axis "data" of size 2; '
            "use 16 or 32",
        ),
    ],
)
def test_microbatches_that_do_not_divide(words, sentence):
    with pytest.raises(jshard.JShardError) as error:
        built("tests.support.plain:Dense", "data", *words)
    assert str(error.value) == sentence
