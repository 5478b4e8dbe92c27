"""`jshard.train` is the loop of `jshard train`, and `jshard.batches` its loader."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.signals import active_config as current
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.train import train as train_experiment
from tests.support import cases, plain

P = jax.P
SIGNALS = {
    "wide": {"row": "data", "column": "tensor", "match": ["up/**"]},
    "rest": {"row": "data", "store": "data", "match": ["**"]},
}
SETTINGS = {"batch": 16, "steps": 6, "microbatches": 2, "seed": 3, "evaluation": 3, "log": {"every": 1}}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    current.unload()


def recorded(folder):
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    timed = "examples_per_second", "memory", "learning_rate"
    return [{name: figure for name, figure in line.items() if name not in timed} for line in lines]


@pytest.mark.slow
def test_train_is_the_loop_of_the_command_line():
    named = {
        "model": "tests.support.plain:Dense",
        "data": "tests.support.plain:data",
        "optimizer": "adam",
        "output": "one",
        **SETTINGS,
    }
    signals = {"jshard": {"mesh": {"data": 2, "tensor": 4}}, **SIGNALS}
    Path("m.yaml").write_text(json.dumps({**signals, "jshard": {**signals["jshard"], "train": named}}))
    expected = train_experiment(Experiment.build(current.load("m.yaml"), current.mesh()))
    with cases.loaded(signals):
        model = plain.Dense(rngs=nnx.Rngs(3))
        found = jshard.train(model, optax.adam(1e-3), plain.data(), output="two", **SETTINGS)
        cases.assert_lies(model.up.kernel[...], P(None, "tensor"))
        cases.assert_lies(model.down.kernel[...], P("data"))
    assert found == expected
    assert found.keys() == {"loss", "test_loss", "test_accuracy"}
    assert recorded("two") == recorded("one")


def test_train_without_a_configuration_takes_a_loss_metrics_and_an_optimizer_of_ones_own():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(64, 4)).astype(np.float32)
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = jshard.Optimizer(model, optax.sgd(0.1))

    def squares(outputs, targets):
        return jnp.mean((outputs - targets) ** 2)

    def furthest(outputs, targets):
        return jnp.abs(outputs - targets).max(-1)

    data = {"train": (x, x @ np.ones((4, 1), np.float32)), "test": (x, x @ np.ones((4, 1), np.float32))}
    found = jshard.train(model, optimizer, data, loss=squares, metrics=[furthest], batch=16, steps=60, shuffle=False)
    assert found.keys() == {"loss", "test_loss", "test_furthest"}
    assert found["test_loss"] < 1e-3
    np.testing.assert_allclose(model.kernel[...], np.ones((4, 1)), atol=0.05)
    assert int(optimizer.step[...]) == 60


@pytest.mark.slow
def test_train_goes_on_from_its_last_checkpoint():
    def run(folder, steps, **more):
        model = plain.Dense(rngs=nnx.Rngs(0))
        found = jshard.train(
            model, optax.adam(1e-3), plain.data(), output=folder, batch=16, steps=steps, checkpoint=2, **more
        )
        return found, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    whole, parameters = run("whole", 4)
    run("parts", 2)
    parts, again = run("parts", 4, resume=True)
    assert parts == whole
    jax.tree.map(np.testing.assert_array_equal, again, parameters)


def test_what_is_wrong_with_the_arguments_of_train_is_one_sentence():
    model, tx = plain.Dense(rngs=nnx.Rngs(0)), optax.sgd(0.1)

    def loss(outputs, targets):
        return outputs.mean()

    for more, sentence in [
        ({"step": 3}, 'jshard.train (<dict>) has an unknown key "step"; did you mean "steps"?'),
        (
            {"metrics": [loss]},
            'jshard.train.metrics (jshard.train(...)) is "loss", and there is a figure loss already; give the function another '
            "name",
        ),
    ]:
        with pytest.raises(jshard.JShardError) as error:
            jshard.train(model, tx, plain.data(), **more)
        assert str(error.value) == sentence


def test_batches_lie_by_rows_in_the_order_of_the_seed_and_are_read_in_the_background():
    x, y = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12)
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "rest": {"row": "data"}}):
        read = jshard.batches((x, y), batch=4, seed=1)
        one = [next(read) for _ in range(6)]
        assert any(each.name == "jshard reads ahead" for each in threading.enumerate())
        read.close()
        assert not any(each.name == "jshard reads ahead" for each in threading.enumerate())
        cases.assert_lies(one[0][0], P("data"))
        assert one[0][0].addressable_shards[0].data.shape == (2, 2)
    alone = list(jshard.batches((x, y), batch=4, seed=1, steps=6, ahead=0))
    assert len(alone) == 6
    for ours, theirs in zip(one, alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert sorted(int(n) for _, y in alone[:3] for n in y) == list(range(12))
    in_order = list(jshard.batches(lambda: iter([(x[:4], y[:4])]), batch=4, steps=2))
    np.testing.assert_array_equal(in_order[1][1], y[:4])
