"""Which equation made a NaN: found in a program, and by running the steps before it again."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jshard
from jshard.errors import JShardError
from jshard.signals import active_config as current
from jshard.training.experiments import nan_cause as again
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.nan_cause import first, nan_origins
from jshard.training.experiments.train import train
from tests.support.processes import run as run_processes

# -- in a program --


@pytest.mark.parametrize("sizes", [{"d": 2}, {"d": 2, "t": 4}])
@pytest.mark.parametrize("reverse", [False, True])
def test_birth_has_the_equation_the_device_and_the_trip_of_a_loop(mesh, sizes, reverse):
    """The second half takes the root of -6 in trip 2. Then the first half makes inf - inf in trip 1, and the second that root."""
    here = mesh(**sizes)

    def body(x, w):
        def turn(c, w):
            c = jnp.sqrt(c)
            return c - w, None

        y, _ = lax.scan(turn, x, w, reverse=reverse)
        return lax.psum(y, "d")

    def f(x, w):
        return jax.shard_map(body, mesh=here, in_specs=(P("d"), P()), out_specs=P())(x, w).sum()

    x = jax.device_put(np.array([7e4, 4.0], np.float32), jax.NamedSharding(here, P("d")))
    w = np.array([2.0, 8.0, 1.0][:: -1 if reverse else 1], np.float32)
    root, joined = nan_origins(f, here)(x, w)
    assert (root.where.primitive, root.device.id) == ("sqrt", here.devices.size // 2)
    assert root.words().startswith("sqrt at test_nan_origin.py:")
    assert joined.words().startswith("all_reduce at test_nan_origin.py:")  # the other half's NaN

    x = jax.device_put(np.array([np.inf, 4.0], np.float32), jax.NamedSharding(here, P("d")))
    w = np.array([np.inf, 1.0, 1.0][:: -1 if reverse else 1], np.float32)
    root, difference, *_ = nan_origins(f, here)(x, w)
    assert (root.where.primitive, root.device.id) == ("sqrt", here.devices.size // 2)
    assert (difference.where.primitive, difference.device.id) == ("sub", 0)


def test_birth_is_in_the_phase_and_under_the_signal_that_made_it(mesh):
    current.load({"jshard": {"mesh": {"t": 2}}, "root": {"column": "t"}})

    def loss(w, x):
        with jshard.signal("root"):
            return jnp.where(x > 0, jnp.sqrt(w * x), 1.0).sum()

    try:
        found = nan_origins(jax.value_and_grad(loss), None)(jnp.float32(3), jnp.zeros(2))
        assert ' makes it in the backward pass of step 3, under signal "root"' in found[0].words(" of step 3")
    finally:
        current.unload()


def test_nan_that_reaches_no_result_is_harmless():
    def f(x):
        return jnp.where(x > 0, jnp.log(x), 0.0).sum() / x[0]

    look = nan_origins(f, None)
    before = look(jnp.array([1.0, -1.0]))
    assert [each.where.primitive for each in before] == ["log"]
    now = look(jnp.array([0.0, -1.0]))
    assert first(now, {each.number for each in before}).where.primitive == "div"
    assert first(before, {each.number for each in before}) is None


def test_program_without_nan_has_no_origins(mesh):
    assert nan_origins(lambda x: jnp.tanh(x).sum(), None)(np.ones(3, np.float32)) == []
    assert nan_origins(lambda x: x + 1, None)(np.ones(3, np.int32)) == []


# -- in a run --

FILE = """
jshard:
  mesh: {data: 2, tensor: 2}
  train:
    model: {path: failing:Model, how: forward}
    data: failing:data
    batch: 4
    steps: 30
    optimizer: {name: sgd, learning_rate: 0.01}
    output: run
    checkpoint: 4
layer1: {row: data, column: tensor}
layer2: {row: data, reduction: tensor}
head: {row: data}
"""
MODEL = """
import jax.numpy as jnp, jshard, numpy as np
from flax import nnx

class Model(nnx.Module):
    '''At its sixth call it makes a NaN.'''

    def __init__(self, how, *, rngs):
        self.how, self.left, self.weight = how, nnx.Variable(jnp.float32(5)), nnx.Param(jnp.float32(1))
        with jshard.signal("layer1"):
            self.up = jshard.Linear(2, 8, rngs=rngs)
        with jshard.signal("layer2"):
            self.down = jshard.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        left, self.left[...] = self.left[...], self.left[...] - 1
        y = self.down(nnx.tanh(self.up(x)))
        with jshard.signal("head"):
            y = jnp.where(left > -100, y, jnp.log(-1 - y * y))  # masked at every call
            if self.how == "forward":
                return y * jnp.sqrt(left - 0.5)
            return y * jnp.where(left > 0, jnp.sqrt(jnp.maximum(left, 0) * self.weight), 1)

def data():
    draw = np.random.default_rng(0)
    x = draw.integers(0, 2, (12, 2)).astype(np.float32)
    y = (x[:, 0] != x[:, 1]).astype(np.int32)
    return {"train": (x, y), "test": (x, y)}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(FILE)
    (tmp_path / "failing.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("failing", None)
    current.unload()


def fault(*words):
    with pytest.raises(JShardError) as told:
        train(Experiment.build(current.load("mine.yaml", words), current.mesh()))
    return str(told.value)


def line(text):
    return 1 + next(number for number, line in enumerate(MODEL.splitlines()) if text in line)


@pytest.mark.slow
def test_forward_nan_is_told_with_its_signal_and_line_and_masked_ones_are_not(here, capsys):
    assert fault() == (
        f"the loss of step 6 is NaN: sqrt at failing.py:{line('left - 0.5')} makes it in the forward pass, "
        'under signal "head" (mine.yaml:14); the last good checkpoint is that of step 4 (run/checkpoints/4); '
        "type: jshard resume run --trust optimizer.learning_rate=0.001"
    )
    assert "looking for the cause of the NaN: running again 2 steps from step 4" in capsys.readouterr().out


@pytest.mark.slow
def test_backward_nan_is_told_with_the_step_whose_update_took_it(here):
    said = fault("model.how=backward")
    assert said.startswith("a parameter behind step 8 is NaN: mul at failing.py:"), said
    assert f':{line("jnp.maximum(left, 0)")} makes it in the backward pass of step 6, under signal "head"' in said


@pytest.mark.slow
def test_without_a_checkpoint_it_is_looked_for_from_the_beginning_if_that_is_near(here, capsys, monkeypatch):
    (here / "mine.yaml").write_text(FILE.replace("    checkpoint: 4\n", ""))
    assert f"NaN: sqrt at failing.py:{line('left - 0.5')} makes it" in fault()
    monkeypatch.setattr(again, "MOST", 5)
    assert fault().startswith("the loss of step 6 is NaN, and nothing was saved")
    assert "6 steps from the beginning, and at most 5 are run again" in capsys.readouterr().out


def test_what_keeps_it_from_being_found_is_said(here, capsys, monkeypatch):
    def full(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(again, "nan_origins", full)
    assert fault().startswith("the loss of step 6 is NaN; the last good")
    assert "the search for the cause of the NaN failed: RuntimeError: no room" in capsys.readouterr().out


SCRIPT = """
import os, sys
from tests.support.processes import join
join()
sys.path.insert(0, os.getcwd())
from jshard.signals import active_config as current
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.train import train
train(Experiment.build(current.load("mine.yaml"), current.mesh()))
"""


@pytest.mark.slow
def test_several_processes_find_the_same(here):
    (here / "script.py").write_text(SCRIPT)
    for each in run_processes(here / "script.py", 2, devices=2, fails=True, timeout=120):
        assert f"step 6 is NaN: sqrt at failing.py:{line('left - 0.5')} makes it in the forward pass" in each.stderr
