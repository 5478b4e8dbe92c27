"""A model, data or a loss of another form is one sentence before the first step; an evaluation is in evaluation mode."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard.cli import main
from jshard.errors import JShardError, Location
from jshard.layers import cross_entropy
from jshard.signals import active_config
from jshard.training.checkpoints.checkpoint import steps_in
from jshard.training.components import Component
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.loop import evaluate

FORMS = """
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard

Y = np.arange(24) % 3
X = np.eye(4, dtype=np.float32)[Y]

class Model(nnx.Module):
    def __init__(self, *, rngs):
        with jshard.signal("layer"):
            self.up = jshard.Linear(4, 8, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.9, rngs=rngs)
        self.down, self.own, self.viewed = nnx.Linear(8, 3, rngs=rngs), Own(), Viewed()

    def __call__(self, x):
        return self.viewed(self.own(self.down(self.drop(self.norm(self.up(x))))))

class Own(nnx.Module):
    deterministic = False

    def __call__(self, x):
        return x if self.deterministic else x[..., ::-1]

class Viewed(nnx.Module):
    trains = True

    def set_view(self, deterministic=None, **others):
        self.trains = not deterministic
        return others

    def __call__(self, x):
        return x[..., ::-1] if self.trains else x

class Balanced(nnx.Module):
    def __init__(self, *, rngs):
        with jshard.signal("layer"):
            self.up = jshard.Linear(4, 8, rngs=rngs)
        self.down, self.balance = nnx.Linear(8, 3, rngs=rngs), jshard.AuxLoss(jnp.zeros(()))

    def __call__(self, x):
        y = self.down(self.up(x))
        self.balance[...] = 0.5 * jshard.mean(y**2)
        return y

class Pair(Model):
    def __call__(self, x): return super().__call__(x), x

class Train(Model):
    def __call__(self, x, train=True): return super().__call__(x)

class Mask(Model):
    def __call__(self, x, mask): return super().__call__(x)

class Uncalled(nnx.Module):
    def __init__(self, *, rngs): pass

def classes(train, test): return {"train": (X, train), "test": (X, test)}
def data(): return classes(Y, Y)
def masked():
    y = np.where(np.arange(24).reshape(12, 2) % 5 < 3, Y.reshape(12, 2), -1)
    return {part: (X.reshape(12, 2, 4), y) for part in ("train", "test")}
def tokens(): return {part: (X.reshape(12, 2, 4), Y.reshape(12, 2)) for part in ("train", "test")}
def untested(): return {"train": (X, Y)}
def beyond(): return classes(Y, Y + 1)
def negative(): return classes(Y - 1, Y)
def one_hot(): return classes(np.eye(3)[Y], np.eye(3)[Y])
def text(): return classes(np.array(["a", "b", "c"])[Y], Y)
def stream(): return {"train": lambda: iter([(X[:8], Y[:8]), (X[:8], Y[:8] + 2)])}
def losses(outputs, targets): return jnp.sum(outputs, axis=-1)
def furthest(outputs, targets): return jnp.max((outputs - targets) ** 2, axis=-1)
def sure(outputs, targets): return outputs.max(-1)
def whole(outputs, targets): return outputs.mean()
def loss(outputs, targets): return outputs.mean()
def single(outputs): return jnp.sum(outputs)
def squares(outputs, targets): return jshard.mean((outputs - targets) ** 2)
"""
YAML = """jshard:
  mesh: {data: 2, tensor: 4}
  train:
    model: forms:Model
    data: forms:data
    batch: 8
    steps: 2
    optimizer: sgd
layer: {row: data, column: tensor}
"""
MODEL, DATA, LOSS = (f'jshard.train.{key} (the command line) is "forms:{{}}", ' for key in ("model", "data", "loss"))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("jshard.cli.experiment.pretend", lambda count, platforms: None)  # this process has its devices
    Path("forms.py").write_text(FORMS)
    Path("forms.yaml").write_text(YAML)
    yield
    sys.modules.pop("forms", None)
    active_config.unload()


def trained(capsys, *words: str) -> tuple[int, list[str], list[str]]:
    status = main(["train", "forms.yaml", "output=run", *words])
    out, err = capsys.readouterr()
    return status, out.splitlines(), [line for line in err.splitlines() if "pretending" not in line]


SENTENCES = [
    (
        "model=forms:Pair",
        MODEL.format("Pair")
        + "which returns a tuple, and cross entropy takes an array with a number for each class; return "
        "that array alone, or write loss: and the path of a loss for what it returns",
    ),
    (
        "model=forms:Train",
        MODEL.format("Train")
        + 'whose __call__ takes "train"; leave train out: model(x) is called under Flax\'s train and '
        "eval views, which set Dropout and BatchNorm",
    ),
    (
        "model=forms:Mask",
        MODEL.format("Mask")
        + 'whose __call__ needs "mask", and is called with x alone; give mask a default, or return it '
        "in x: a tuple or a mapping of arrays",
    ),
    ("model=forms:Uncalled", MODEL.format("Uncalled") + "which has no __call__; define __call__(self, x) in it"),
    (
        "data=forms:one_hot",
        DATA.format("one_hot")
        + "which returns targets float32[8, 3] for outputs float32[8, 3], and cross entropy takes a "
        "class number for each; return y.argmax(axis=-1), or write loss: and the path of a loss for these",
    ),
    (
        "data=forms:text",
        DATA.format("text")
        + 'which returns targets of text for "train", and devices take numbers; number the classes: '
        "np.unique(y, return_inverse=True)[1]",
    ),
    (
        "data=forms:beyond",
        DATA.format("beyond")
        + 'which returns class 3 in "test", and forms:Model has 3 outputs; return classes from 0 to 2, '
        "or give the model 4 outputs",
    ),
    (
        "data=forms:negative",
        DATA.format("negative")
        + 'which returns class -1 in "train", and forms:Model has 3 outputs; return classes from 0 '
        "to 2",
    ),
    (
        "data=forms:stream",
        DATA.format("stream")
        + "which returns class 4 in a batch, and forms:Model has 3 outputs; return classes from 0 to 2, "
        "or give the model 5 outputs",
    ),
    (
        "loss=forms:losses",
        LOSS.format("losses") + "which returns float32[8] and not one number; reduce it to the loss of the batch: "
        "jshard.mean(losses)",
    ),
    (
        "loss=forms:single",
        LOSS.format("single") + "which takes outputs, and is called with 2 arguments; write loss(outputs, targets)",
    ),
]


@pytest.mark.parametrize(("word", "sentence"), SENTENCES, ids=[word for word, _ in SENTENCES])
def test_form_that_can_not_be_trained_is_one_sentence_before_the_first_step(capsys, word, sentence):
    status, _, err = trained(capsys, word)
    assert (status, err) == (2, [sentence])
    figures = Path("run/metrics.jsonl")
    assert not figures.exists() or not figures.read_text()


def test_targets_of_a_row_are_counted_in_float32_whatever_the_outputs_are():
    """513 is no number of bfloat16, nor is the sum of as many losses."""
    targets = np.zeros((1, 1024), np.int32)
    targets[0, 513:] = -1
    value = cross_entropy(jnp.zeros((1, 1024, 2), jnp.bfloat16), jnp.asarray(targets))
    assert value == jnp.bfloat16(np.log(2)) and value.dtype == jnp.float32


def test_evaluation_is_in_evaluation_mode_and_leaves_the_model_in_training_mode():
    configuration = active_config.load("forms.yaml")
    built = Experiment.build(configuration, active_config.mesh())
    # Each input gives its class, by the running averages alone: the mean of a batch would not take the bias away again.
    model = built.model
    for variable, value in [
        (model.up.kernel, np.eye(4, 8)), (model.down.kernel, np.eye(8, 3)),
        (model.norm.mean, 100 * np.eye(8)[0]), (model.down.bias, 100 * np.eye(3)[0]),
    ]:  # fmt: skip
        variable[...] = jax.device_put(value.astype(np.float32), variable[...].sharding)
    step = built.step()
    where = jax.tree.map(lambda array: array.sharding, step.state)
    assert evaluate(step, built.test, built.placement, built.settings["batch"])["test_accuracy"] == 1.0
    assert (model.drop.deterministic, model.norm.use_running_average, model.own.deterministic) == (False,) * 3
    assert model.viewed.trains
    step(*built.first_batch())
    step.into(built.model, built.optimizer)
    assert jax.tree.map(lambda array: array.sharding, step.state) == where
    assert model.norm.mean[0] < 100  # the step took the averages of its batch


@pytest.mark.seconds
def test_several_targets_of_a_row_are_counted_one_by_one(capsys):
    status, out, _ = trained(capsys, "data=forms:tokens", "steps=30", "optimizer={name: adam, learning_rate: 0.1}")
    assert status == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert out[-1] == f"test accuracy {100 * lines[-1]['test_accuracy']:.1f} %"
    assert lines[-1]["test_accuracy"] * 24 == pytest.approx(round(lines[-1]["test_accuracy"] * 24))
    assert lines[-1]["test_accuracy"] > 0.3


def test_data_without_a_test_part_train_and_are_not_evaluated(capsys):
    status, out, err = trained(capsys, "data=forms:untested")
    assert (status, err) == (0, [])
    assert 'nothing is evaluated: forms:untested returns no "test"' in out
    assert out[-1].startswith("step 2/2   loss ")
    status, _, err = trained(capsys, "data=forms:untested", "evaluation=1")
    assert (status, err) == (
        2,
        [
            'jshard.train.evaluation (the command line) needs test data, and forms:untested returns no "test"; return '
            '{"train": (x, y), "test": (x, y)}, or write evaluation: {held_out: 0.1}'
        ],
    )


def test_an_evaluation_has_the_loss_and_metrics_of_ones_own(capsys):
    words = "data=forms:one_hot", "loss=forms:squares", "metrics=[forms:furthest]", "steps=1"
    status, out, _ = trained(capsys, *words)
    assert status == 0
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert last.keys() == {"step", "test_loss", "test_furthest"}
    assert out[-2:] == [f"test loss {last['test_loss']:.4f}", f"test furthest {last['test_furthest']:.4g}"]
    assert last["test_loss"] < last["test_furthest"]


@pytest.mark.seconds
def test_an_evaluation_leaves_out_targets_below_zero_and_weighs_rows_by_the_others(capsys):
    status, _, _ = trained(capsys, "data=forms:masked", "metrics=[forms:sure]", "batch=8", "steps=1")
    assert status == 0
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    configuration = active_config.load(
        "forms.yaml", ["data=forms:masked", "metrics=[forms:sure]", "steps=1", "batch=8"]
    )
    built = Experiment.build(configuration, active_config.mesh())
    step = built.step()
    step(*built.first_batch())
    x, y = built.test.x, built.test.y
    logits = np.asarray(step.predict(step.state, x))
    counted = y >= 0
    each = -jax.nn.log_softmax(logits)[(*np.indices(y.shape), np.maximum(y, 0))]
    assert 0 < counted.sum() < y.size
    np.testing.assert_allclose(last["test_loss"], each[counted].mean(), rtol=1e-5)
    np.testing.assert_allclose(last["test_accuracy"], (logits.argmax(-1) == y)[counted].mean(), rtol=1e-6)
    np.testing.assert_allclose(last["test_perplexity"], np.exp(last["test_loss"]), rtol=1e-6)
    np.testing.assert_allclose(last["test_sure"], logits.max(-1)[counted].mean(), rtol=1e-5)


@pytest.mark.seconds
def test_examples_held_out_are_evaluated_and_not_trained_on(capsys):
    configuration = active_config.load("forms.yaml", ["data=forms:untested", "evaluation={held_out: 0.25}"])
    built = Experiment.build(configuration, active_config.mesh())
    assert (len(built.data.examples), len(built.test)) == (18, 6)
    status, out, _ = trained(capsys, "data=forms:untested", "evaluation={held_out: 0.25, every: 1}")
    assert status == 0
    assert out[-1].startswith("test accuracy ")
    for words, sentence in [
        (
            ["evaluation.held_out=0.25"],
            'jshard.train.evaluation.held_out (the command line) is set, and forms:data returns a "test"; remove one of the two',
        ),
        (
            ["data=forms:untested", "evaluation.held_out=2"],
            "jshard.train.evaluation.held_out (the command line) is 2, of 24 examples; use a share of them, such as 0.1",
        ),
        (
            ["metrics=[forms:whole]"],
            'jshard.train.metrics (the command line) is "forms:whole", which returns float32[] for 8 rows; return one number for '
            "each row",
        ),
        (
            ["metrics=[forms:loss]"],
            'jshard.train.metrics (the command line) is "forms:loss", and there is a figure loss already; give the function '
            "another name",
        ),
        (
            ["loss={y: 3}"],
            'jshard.train.loss (the command line) names no path, and cross entropy takes no argument "y"; write path: and the '
            "import path of a loss, or z: 1e-4",
        ),
        (
            ["loss.chunk=4"],
            "jshard.train.loss.chunk (the command line) is 4, and forms:Model computes all logits at once; remove it, or give "
            "the model hidden(x), and logits(hidden) of some places, as a jshard.Decoder has",
        ),
    ]:
        status, _, err = trained(capsys, *words)
        assert (status, err) == (2, [sentence])


@pytest.mark.quick(1)
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("mesh", [{"data": 1, "tensor": 1}, {"data": 2, "tensor": 4}], ids=str)
def test_loss_of_a_step_is_that_of_the_targets_that_count_with_z_and_auxiliary_losses(mesh, microbatches):
    words = [f"jshard.mesh={json.dumps(mesh)}", f"microbatches={microbatches}", "batch=8", "loss={z: 0.01}"]
    configuration = active_config.load("forms.yaml", ["data=forms:masked", "model=forms:Balanced", *words])
    built = Experiment.build(configuration, active_config.mesh())
    (x, y), step = built.data.first(), built.step()
    logits = np.asarray(built.model(x))
    total = jax.nn.logsumexp(logits, axis=-1)
    each = total - np.take_along_axis(logits, np.maximum(y, 0)[..., None], -1)[..., 0] + 0.01 * total**2
    expected = each[y >= 0].mean() + 0.5 * np.square(logits).mean()
    np.testing.assert_allclose(float(step(*built.first_batch())), expected, rtol=1e-5)


def test_what_was_trained_is_saved_before_it_is_evaluated(capsys, monkeypatch):
    def failing(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("jshard.training.experiments.train.evaluate", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        trained(capsys, "checkpoint=100")
    assert steps_in(Path("run/checkpoints")) == [2]


@pytest.mark.parametrize(("fault", "told"), [
    ("x is 3", 'jshard.train.model (run.yaml:3) is "m:build": x is 3; use 4'),
    ("layer (run.yaml:7) has x: 3", "layer (run.yaml:7) has x: 3; use 4"),
    ("layer (the command line) has x: 3", "layer (the command line) has x: 3; use 4"),
])  # fmt: skip
def test_what_is_wrong_in_a_model_is_told_with_the_line_that_names_it(fault, told):
    def build(x):
        raise JShardError(fault, hint=f"use {x}") from cause

    cause = OSError("why")
    with pytest.raises(JShardError) as error:
        Component("model", Location("run.yaml", 3), "m:build", build, {"x": 4})()
    assert (str(error.value), error.value.faults) == (told, (told,))
    assert error.value.__cause__ is cause and error.traceback[-1].name == "build"
