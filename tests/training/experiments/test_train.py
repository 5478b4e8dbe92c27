"""An experiment: batches, where they lie, the loss on every layout, the step, and what training leaves behind."""

from __future__ import annotations

import gc
import io
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jshard import layers
from jshard.cli import main
from jshard.errors import JShardError
from jshard.layers import cross_entropy
from jshard.signals import active_config as current
from jshard.signals.config import load_configuration
from jshard.training.components import check_arguments
from jshard.training.data.batches import Examples, Placement, examples, padded, settle
from jshard.training.data.sources import Shuffled
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.loop import IN_FLIGHT, TrainingStep, run
from jshard.training.experiments.loss import correct
from jshard.training.experiments.train import train
from jshard.training.optimizers.chain import optimizers
from jshard.training.telemetry.metrics import written
from jshard.training.telemetry.progress import Bar

ROOT = Path(__file__).parents[3]
TEN = Examples(np.arange(10.0), np.arange(10))
pytestmark = pytest.mark.usefixtures("in_the_root")


def xor(*overrides: str) -> Experiment:
    configuration = current.load("configs/xor.yaml", overrides)
    return Experiment.build(configuration, current.mesh())


def test_padded_covers_the_data_once_and_weighs_what_is_filled_up_with_nothing():
    pieces = list(padded(TEN, 4))
    assert [batch.y.tolist() for batch, _ in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
    assert [weights.tolist() for _, weights in pieces] == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("rows", "spec"),
    [
        (["data"], P("data")),
        (["data", None], P("data")),
        ([["data", "tensor"], "data"], P("data")),
        ([["data", "tensor"], ["data", "tensor"]], P(("data", "tensor"))),
        (["data", "tensor"], P()),
        ([None], P()),
    ],
)
def test_placement_splits_rows_over_the_mesh_axes_that_every_row_names(mesh, rows, spec):
    signals = {f"s{n}": {"row": row} if row else {"column": "tensor"} for n, row in enumerate(rows)}
    configuration = load_configuration({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **signals})
    (x,) = Placement(mesh(data=2, tensor=4), configuration.signals)(np.zeros((16, 3)))
    assert x.sharding.is_equivalent_to(NamedSharding(mesh(data=2, tensor=4), spec), 2)
    assert x.addressable_shards[0].data.shape == (16 // math.prod(2 if n == "data" else 4 for n in names(spec)), 3)


def names(spec: P) -> tuple[str, ...]:
    first = spec[0] if len(spec) else ()
    return (first,) if isinstance(first, str) else first or ()


@pytest.mark.quick(3)
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(None, "tensor"), P("data", "tensor"), P(("data", "tensor"))], ids=str
)
def test_cross_entropy_and_its_gradient_equal_optax_wherever_the_outputs_lie(mesh, axis_types, spec):
    grid = mesh(axis_types=axis_types, data=2, tensor=4)
    draw = np.random.default_rng(0)
    outputs, targets = draw.normal(size=(16, 12)).astype(np.float32) * 4, draw.integers(0, 12, 16)

    def dense(outputs):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    placed = jax.device_put(outputs, NamedSharding(grid, spec))
    y = jax.device_put(targets, NamedSharding(grid, P(*spec[:1])))
    value, gradient = jax.jit(jax.value_and_grad(cross_entropy))(placed, y)
    expected, expected_gradient = jax.value_and_grad(dense)(outputs)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-7)
    hits = jax.jit(correct)(placed, y)
    np.testing.assert_array_equal(hits, outputs.argmax(-1) == targets)


def test_cross_entropy_of_outputs_beyond_the_range_of_exp_is_finite():
    assert cross_entropy(jnp.array([[1e4, -1e4]]), jnp.array([1])) == 2e4


def test_correct_counts_no_tie():
    outputs = jnp.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [3.0, 1.0, 2.0], [jnp.nan, jnp.nan, jnp.nan]])
    assert correct(outputs, jnp.array([0, 1, 0, 0])).tolist() == [0, 0, 1, 0]


@pytest.mark.slow
def test_step_compiles_once_and_holds_its_state_once():
    experiment = xor()
    step = TrainingStep(experiment.model, experiment.optimizer, experiment.loss)
    x, y = experiment.first_batch()
    jax.block_until_ready(step(x, y))
    before = step.state
    gc.collect()
    held = len(jax.live_arrays())
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            loss = step(x, y)
    jax.block_until_ready(loss)
    assert step.program._cache_size() == 1
    gc.collect()
    assert len(jax.live_arrays()) <= held + 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_step_that_was_explained_is_not_traced_again(monkeypatch):
    experiment, traced = xor(), []
    call = type(experiment.model).__call__
    monkeypatch.setattr(type(experiment.model), "__call__", lambda self, x: traced.append(x) or call(self, x))
    experiment.explain()
    step = experiment.step()
    step.program.trace(step.state, *experiment.first_batch())
    losses = [float(step(*experiment.first_batch())) for _ in range(2)]
    assert len(traced) == 1
    step.into(experiment.model, experiment.optimizer)
    assert float(experiment.step()(*experiment.first_batch())) < losses[1] < losses[0]  # from where these are now


def test_step_leaves_every_array_where_it_was():
    experiment = xor()
    step = TrainingStep(experiment.model, experiment.optimizer, experiment.loss)
    before = jax.tree.map(lambda array: array.sharding, step.state)
    step(*experiment.first_batch())
    assert jax.tree.map(lambda array: array.sharding, step.state) == before
    kernel = step.state[0]["up"]["kernel"][...]
    assert kernel.addressable_shards[0].data.shape == (2, 4)


def test_run_lets_only_so_many_steps_be_under_way():
    waited = []

    class Loss:
        def __init__(self, number):
            self.number = number

        def __float__(self):
            waited.append(self.number)
            return 0.0

    numbers = itertools.count(1)
    source = Shuffled("the data", TEN, batch=4, seed=0)
    for taken in run(lambda x, y: Loss(next(numbers)), source, Placement(None, {}), steps=40):
        assert taken.number - len(waited) <= IN_FLIGHT
    assert waited == list(range(1, 40 + 1))


@pytest.mark.quick("1")
@pytest.mark.parametrize("devices", [1, 4])
def test_train_learns_xor(devices, capsys):
    assert train(xor(f"jshard.mesh.tensor={devices}"))["test_accuracy"] == 1.0
    assert "step 300/300   loss 0.000" in capsys.readouterr().out


@pytest.mark.seconds
def test_train_loses_the_same_on_every_mesh(tmp_path):
    losses = []
    for devices in (1, 2, 4):
        train(xor(f"jshard.mesh.tensor={devices}", "steps=20", "log.every=1", f"output={tmp_path}"))
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 21))
        assert lines[-1].keys() == {"step", "test_loss", "test_accuracy"}
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)


@pytest.mark.seconds
def test_train_shows_a_bar_with_loss_and_examples_a_second_on_a_terminal():
    terminal = io.StringIO()
    bar = Bar(300, Console(file=terminal, force_terminal=True, width=100))
    assert train(xor(), bar)["test_accuracy"] == 1.0
    last = terminal.getvalue().splitlines()[-2]
    assert "300/300" in last
    assert "loss 0.000" in last
    assert "examples/s" in last


@pytest.mark.seconds
def test_train_puts_what_was_learned_into_the_model():
    experiment = xor()
    train(experiment)
    x, y = experiment.placement(experiment.test.x, experiment.test.y)
    assert correct(experiment.model(x), y).tolist() == [1, 1, 1, 1]


def test_train_evaluates_as_often_as_asked(capsys):
    train(xor("steps=30", "evaluation=10"))
    said = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in said if line[2] == "test"] == ["10/30", "20/30"]


@pytest.mark.parametrize("path", ["digits", "xor", "mlp", "pipe-1f1b", "pipe-balance"])
def test_record_writes_a_configuration_that_says_the_same(path, tmp_path):
    configuration = load_configuration(f"configs/{path}.yaml")
    (tmp_path / "again.yaml").write_text(written(configuration))
    again = load_configuration(str(tmp_path / "again.yaml"))
    assert (again.fingerprint, again.train) == (configuration.fingerprint, configuration.train)


def test_record_keeps_the_stages_of_a_pipeline_and_what_its_signals_match(tmp_path):
    said = {
        "jshard": {
            "mesh": {"stage": 2, "data": 2}, "kernel": {"all_reduce": "ring"},
            "pipeline": {"axis": "stage", "schedule": "gpipe"}, "train": {"microbatches": 4},
        },
        "halves": {"stage": {"0..2": 0, "3..7": 1}, "match": ["blocks/**", "!blocks/norm/**"]},
        "last": {"row": "data", "stage": 1, "match": ["head/**"]},
        "rest": {"row": "data", "match": ["**"]},
    }  # fmt: skip
    configuration = load_configuration(said)
    (tmp_path / "again.yaml").write_text(written(configuration))
    again = load_configuration(str(tmp_path / "again.yaml"))
    assert again.fingerprint == configuration.fingerprint and again.train == configuration.train
    assert again.signals["halves"].is_stage_alone and configuration.signals["halves"].is_stage_alone


def test_record_keeps_every_key_of_a_signal(tmp_path):
    configuration = load_configuration(
        {
            "jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": "auto", "strict": False, "default": "a"},
            "a": {
                "row": ["data", "tensor"],
                "dtype": {"param": "float32", "reduce": "bfloat16"},
                "remat": {"save": ["q"]},
            },
            "b": {"reduction": "tensor", "output": "scatter", "store": {"optimizer": "data"}, "backward": "a"},
            "c": {"shard": {"axis": 1, "workers": [0, 1]}, "compile": True},
            "d": {"shard": {"mesh": "data", "axis": 0}, "expect": {"all_reduce": 2, "bytes": "1MiB"}},
            "e": {"shard": {"replicated": True}},
            "f": {"column": "tensor", "sequence": "tensor", "store": "data"},
        }
    )
    (tmp_path / "again.yaml").write_text(written(configuration))
    again = load_configuration(str(tmp_path / "again.yaml"))
    assert again.fingerprint == configuration.fingerprint
    assert again.signals["d"].expect == configuration.signals["d"].expect


def test_settle_puts_layers_that_no_signal_has_placed_whole_on_every_device(mesh):
    grid = mesh(data=2, tensor=4)
    model = settle(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), grid)
    assert len(model.kernel[...].sharding.device_set) == 8
    assert model.kernel[...].is_fully_replicated


def test_settle_leaves_what_a_signal_has_placed():
    current.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "a": {"shard": {"axis": 1, "workers": [2, 3]}}})
    from jshard.signals.scope import signal

    with signal("a"):
        model = settle(layers.Linear(3, 4, rngs=nnx.Rngs(0)), current.mesh())
    assert {device.id for device in model.kernel[...].sharding.device_set} == {2, 3}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"test": 1}, 'the data returns no pair of arrays named "train"; return {"train": (x, y), "test": (x, y)}'),
        (None, 'the data returns no pair of arrays named "train"; return {"train": (x, y), "test": (x, y)}'),
        (
            {"train": (np.zeros((3, 2)), np.zeros(4))},
            'the data returns inputs of shape (3, 2) and targets of shape (4,) for "train"; return as many targets as '
            "inputs, and at least one",
        ),
    ],
)
def test_data_of_another_form_is_told(data, sentence):
    with pytest.raises(JShardError) as told:
        examples("the data", data, "train")
    assert str(told.value) == sentence


def takes(size, *, rngs, width=3):
    return size, rngs, width


@pytest.mark.parametrize(
    ("given", "ours", "sentence"),
    [
        ({"rngs": 1, "size": 2}, {"rngs": 0}, 'said, whose argument "rngs" jshard gives itself; remove rngs'),
        ({"size": 2, "widht": 2}, {"rngs": 0}, 'said, which takes no argument "widht"; did you mean "width"?'),
        ({"size": 2, "qq": 2}, {"rngs": 0}, 'said, which takes no argument "qq"; use size, width'),
        ({"width": 2}, {"rngs": 0}, 'said, which needs an argument "size"; write size: beside it, in a mapping'),
        ({"size": 2}, {"keys": 0}, 'said, which takes no argument "keys"; add the parameter keys to it'),
    ],
)
def test_arguments_that_do_not_fit_are_told_before_the_call(given, ours, sentence):
    with pytest.raises(JShardError) as told:
        check_arguments("said", takes, given, ours=ours)
    assert str(told.value) == sentence


def test_optimizers_are_those_of_optax():
    assert {"adamw", "adam", "sgd", "adafactor", "lion"} <= set(optimizers())
    assert not {"lbfgs", "scale_by_learning_rate"} & set(optimizers())


def test_output_that_is_no_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JShardError) as told:
        train(xor(f"output={tmp_path}/file/runs"))
    assert str(told.value) == (
        f'jshard.train.output (the command line) is "{tmp_path}/file/runs", which can\'t be written to: not a '
        "directory; make it writable, or name another output"
    )


@pytest.mark.slow
def test_digits_reaches_96_percent_and_its_last_line_says_so(capsys, tmp_path):
    assert main(["train", "configs/digits.yaml", f"output={tmp_path}"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("configs/digits.yaml:16  layer2")
    word, percent = out[-1].removesuffix(" %").rsplit(" ", 1)
    assert word == "test accuracy"
    assert 96 <= float(percent) <= 100
