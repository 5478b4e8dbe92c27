"""What anyone gets wrong, by every command that sees it before it runs: one sentence, exit 2, nothing on stdout, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jshard.cli import main, parse
from jshard.signals.active_config import unload

COMMANDS = ["explain", "plan", "diff", "check", "verify", "report"]
MODEL = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import jshard

class Model(nnx.Module):
    def __init__(self, *, rngs):
        with jshard.signal("layer"):
            self.layer = jshard.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        with jshard.signal("layer"):
            return self.layer(x) @ jnp.ones((3, 3))

class Unbuilt(nnx.Module):
    def __init__(self, *, rngs):
        raise KeyError("no such size")

def data():
    zeros = np.zeros((16, 8), np.float32)
    return {"train": (zeros, zeros[:, 0].astype(np.int32)), "test": (zeros, zeros[:, 0].astype(np.int32))}
"""
YAML = """jshard:
  mesh: {data: 2, tensor: 4}
  budget: 1GiB
  train: {model: 'wrong:Model', data: 'wrong:data', batch: 8}
layer: {row: data, column: tensor}
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("jshard.cli.experiment.pretend", lambda count, platforms: None)  # this process has its devices
    monkeypatch.setattr("jshard.training.diff._output", _ended_here)
    (tmp_path / "wrong.py").write_text(MODEL)
    (tmp_path / "wrong.yaml").write_text(YAML)
    yield
    sys.modules.pop("wrong", None)
    unload()


def _ended_here(sides, commands):
    """What the process of the new side ends with."""
    for side, (command, *options) in [(sides[1], commands[1])]:
        chosen = parse([command, *side.words, *options])
        chosen.command(chosen)
    raise AssertionError("it went well")


def said(capsys, command: str, path: str, *words: str) -> tuple[int, str, str]:
    """Status, stdout without what `check` says of the configuration, and stderr."""
    status = main([command, path, *([path] if command == "diff" else []), *words])
    out, err = capsys.readouterr()
    out = "" if command == "check" else out
    return status, out, "\n".join(line for line in err.splitlines() if "pretending" not in line)


@pytest.mark.parametrize("command", COMMANDS)
def test_path_that_is_not_there_is_one_sentence(capsys, command):
    assert said(capsys, command, "wrnog.yaml") == (2, "", 'wrnog.yaml is not there; did you mean "wrong.yaml"?')


@pytest.mark.parametrize("command", COMMANDS)
def test_file_without_an_experiment_is_one_sentence(capsys, command):
    Path("bare.yaml").write_text("jshard: {mesh: {data: 2, tensor: 4}, budget: 1GiB}\nlayer: {row: data}\n")
    sentence = "bare.yaml names no model to train; write model: examples.digits:Model under jshard.train"
    if command == "check":
        sentence = (
            "jshard.budget (bare.yaml:1) needs a training step, and bare.yaml describes none; write "
            "model and data under jshard.train, or remove it"
        )
    assert said(capsys, command, "bare.yaml") == (2, "", sentence)


@pytest.mark.parametrize("command", COMMANDS)
def test_model_that_fails_in_tracing_is_told_by_its_own_line_and_signal(capsys, command):
    line = MODEL[: MODEL.index("return self.layer(x) @")].count("\n") + 1
    status, out, err = said(capsys, command, "wrong.yaml")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(
        f'wrong.py:{line} (in __call__, under signal "layer" (wrong.yaml:5)) fails while it is traced: TypeError: dot_general '
        "requires contracting dimensions to have the same shape"
    )
    assert err.endswith(f"; fix wrong.py:{line}")


@pytest.mark.parametrize("command", COMMANDS)
def test_model_that_can_not_be_built_is_told_by_its_own_line(capsys, command):
    line = MODEL[: MODEL.index("raise KeyError")].count("\n") + 1
    assert said(capsys, command, "wrong.yaml", "model=wrong:Unbuilt") == (
        2, "",
        f"wrong.py:{line} (in __init__) fails while wrong:Unbuilt is built: KeyError: 'no such size'; fix wrong.py:{line}",
    )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_key_that_is_not_there_is_one_sentence(capsys, command):
    assert said(capsys, command, "wrong.yaml", "layer.colum=tensor") == (
        2, "", 'signal "layer" (the command line) has an unknown key "colum"; did you mean "column"?',
    )  # fmt: skip


@pytest.mark.parametrize("text", ["baseline 0\n", "hello\n"])
def test_baseline_that_is_old_is_one_sentence(capsys, text):
    Path("wrong.py").write_text(MODEL.replace(" @ jnp.ones((3, 3))", ""))
    Path("wrong.baseline").write_text(text)
    told = 'wrong.baseline does not begin with "baseline 1", as this jshard writes it; type: jshard check wrong.yaml --update'
    assert said(capsys, "check", "wrong.yaml") == (2, "", told)


@pytest.mark.parametrize("words", [["explain", "wrnog.yaml"], ["train", "wrong.yaml", "batch=64"], ["frobnicate"]])
def test_mistake_has_no_traceback_in_a_process_of_its_own(words):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "jshard", *words], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len([line for line in done.stderr.splitlines() if "pretending" not in line]) == 1
