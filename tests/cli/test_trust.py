"""A YAML of a stranger is safe to read: what it names runs only from its own folder, and from nowhere for a run's copy."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from jshard.cli import main, parse
from jshard.signals.active_config import unload
from jshard.signals.trust import Trust, is_ours
from jshard.training.experiments import experiment

ROOT = Path(__file__).parents[2]
READ = ["check", "explain", "plan", "diff", "verify", "report", "trace"]
EVIL = """
import os, pathlib
pathlib.Path("PWNED").touch()

def data(command=""):
    pathlib.Path("PWNED").touch()

Model = loss = hits = tx = data
"""
MODEL = """
import functools, os
import jshard
import numpy as np
from flax import nnx

class Model(nnx.Module):
    def __init__(self, *, rngs):
        with jshard.signal("layer"):
            self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        with jshard.signal("layer"):
            return self.layer(x)

def rows(count):
    zeros = np.zeros((count, 8), np.float32)
    return {"train": (zeros, zeros[:, 0].astype(np.int32)), "test": (zeros, zeros[:, 0].astype(np.int32))}

data = functools.partial(rows, 16)
"""
HEAD = "jshard:\n  mesh: {data: 2, tensor: 4}\n  train:\n"
OWN = {"model": "theirs.own:Model", "data": "theirs.own:data", "batch": "8"}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """Stand in a folder with a module that is not to run; the model of the YAMLs, own.py, lies in the folder `theirs`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("jshard.cli.experiment.pretend", lambda count, platforms: None)  # this process has its devices
    monkeypatch.setattr("jshard.training.diff._output", _ended_here)
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/own.py").write_text(MODEL)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("evil", "theirs", "packed", "linked"):
            del sys.modules[name]
    unload()


def _ended_here(sides, commands):
    """What the process of the new side of a difference ends with."""
    chosen = parse([commands[1][0], *sides[1].words, *commands[1][1:]])
    chosen.command(chosen)
    raise AssertionError("it went well")


def written(path: str, **train: str) -> str:
    """A YAML with an experiment of these keys."""
    lines = "".join(f"    {key}: {value}\n" for key, value in ({**OWN} | train).items())
    Path(path).write_text(f"{HEAD}{lines}layer: {{row: data, column: tensor}}\n")
    return path


def said(capsys, *words: str) -> tuple[int, str]:
    """Status, and what is said on both; a name that is run would touch PWNED."""
    capsys.readouterr()
    status = main([*words])
    out, err = capsys.readouterr()
    assert not Path("PWNED").exists(), f"{words} runs what the YAML names"
    return status, out + err


def refused(capsys, command: str, path: str, *words: str) -> str:
    """The one sentence that a command ends in; `check` says it, and what it leaves out."""
    status, text = said(capsys, command, path, *([path] if command == "diff" else []), *words)
    lines = [line for line in text.splitlines() if "pretending" not in line]
    if command == "check":
        assert (status, lines[-1]) == (0, "not checked: claims, promises; add --trust")
        return lines[-2]
    assert (status, len(lines)) == (2, 1), text
    assert lines[0].endswith("; add --trust to run it")
    return lines[0].removesuffix("; add --trust to run it")


@pytest.mark.parametrize("command", READ)
def test_a_function_of_python_is_not_run(capsys, command):
    path = written("x.yaml", data='{path: "os:system", command: "touch PWNED"}')
    sentence = 'jshard.train.data (x.yaml:5) is "os:system", but os is part of Python, and no file outside of . may run'
    assert refused(capsys, command, path) == sentence


@pytest.mark.parametrize("command", READ)
def test_a_module_of_this_folder_is_not_run_by_a_yaml_elsewhere(capsys, command):
    path = written("theirs/x.yaml", data="evil:data")
    sentence = 'jshard.train.data (theirs/x.yaml:5) is "evil:data", but evil is in evil.py, and no file outside of theirs may run'
    assert refused(capsys, command, path) == sentence


NAMES = {
    "model": {"model": "evil:Model"},
    "loss": {"loss": "evil:loss"},
    "metrics": {"metrics": "[evil:hits]"},
    "optimizer": {"optimizer": "evil:tx"},
    "chain": {"optimizer": '{"evil:tx": {}, adamw: {}}'},
    "schedule": {"optimizer": '{adamw: {}, schedule: "evil:tx"}'},
    "schedule with arguments": {"optimizer": '{adamw: {}, schedule: {"evil:tx": {command: a}}}'},
    "attribute": {"data": "theirs.own:os.system"},
    "a file of jshard": {"data": "jshard.training.components:importlib.import_module"},
    "a function of jshard": {"data": "{path: 'jshard:diff', old: evil:data, new: evil:data}"},
    "a function of flax": {"data": "{path: 'flax.io:copy', src: own.py, dst: PWNED}"},
    "out of flax": {"data": "{path: 'flax.nnx:object.os.system', command: touch PWNED}"},
    "out of optax": {"data": "{path: 'optax:tree_utils.typing.sys.exit'}"},
    "a method of a builtin": {"data": "{path: 'flax.nnx:Module.__subclasses__'}"},
    "a package around it": {"data": "packed.inside:data"},
    "a link": {"data": "linked:data"},
    "a link in a folder": {"data": "theirs.linked:data"},
}


@pytest.mark.parametrize("key", NAMES)
def test_no_key_runs_what_lies_elsewhere(capsys, key):
    Path("packed/theirs").mkdir(parents=True)
    Path("packed/__init__.py").write_text(EVIL)
    Path("packed/inside.py").write_text(MODEL)
    Path("theirs/linked.py").symlink_to(Path("evil.py").absolute())
    sys.path.insert(0, str(Path("theirs").absolute()))
    path = written("theirs/x.yaml", **NAMES[key])
    assert refused(capsys, "explain", path).startswith("jshard.train.")


def test_an_included_file_has_the_trust_of_the_file_that_is_typed(capsys):
    Path("elsewhere").mkdir()
    written("elsewhere/x.yaml", data="evil:data")
    Path("elsewhere/evil.py").write_text(EVIL)
    sys.path.insert(0, str(Path("elsewhere").absolute()))
    Path("evil.py").unlink()
    Path("theirs/y.yaml").write_text("jshard: {include: ../elsewhere/x.yaml}\n")
    assert "evil is in elsewhere/evil.py, and no file outside of theirs may run" in refused(
        capsys, "explain", "theirs/y.yaml"
    )


@pytest.fixture
def _run():
    """The folder of a run as a stranger sends it, in which the user stands."""
    Path("checkpoints/4").mkdir(parents=True)
    for folder in (Path(), Path("checkpoints/4")):
        written(str(folder / "configuration.yaml"), model="evil:Model", data="evil:data", checkpoint="4", output=".")
        (folder / "evil.py").write_text(EVIL)
    Path("checkpoints/4/checkpoint.json").write_text("{}")
    written("checkpoints/4/renamed.yaml", model="evil:Model", data="evil:data")


@pytest.mark.usefixtures("_run")
@pytest.mark.parametrize("words", [
    ["resume", "."], ["resume", "checkpoints"], ["resume", "checkpoints/4"], ["generate", ".", "--prompt", "a"],
    *(["explain", path] for path in ("configuration.yaml", "checkpoints/4/configuration.yaml", "checkpoints/4/renamed.yaml")),
], ids=" ".join)  # fmt: skip
def test_a_copy_in_a_run_runs_no_file(capsys, words):
    assert refused(capsys, *words).endswith("but evil is in evil.py, and no file named by a copy in a run may run")
    assert str(Path.cwd()) not in sys.path  # where a file could stand for a module that jshard imports


@pytest.mark.usefixtures("_run")
@pytest.mark.parametrize("name", ["configuration.yaml", "checkpoints/4/configuration.yaml"])
def test_check_of_a_copy_runs_no_file(capsys, name):
    assert refused(capsys, "check", name).endswith("and no file named by a copy in a run may run")


def test_check_still_finds_mistakes_and_says_what_it_leaves_out(capsys):
    path = written("theirs/x.yaml", data="evil:data")
    status, text = said(capsys, "check", path, "batch=7", "layer.colum=data")
    assert (status, text) == (
        2,
        'signal "layer" (the command line) has an unknown key "colum"; did you mean "column"?\n',
    )
    status, text = said(capsys, "check", path, "--json")
    assert (status, json.loads(text)["configurations"][0]["holds"][-1]) == (
        0, "not checked: claims, promises; add --trust",
    )  # fmt: skip
    for words in (["--update"], ["--claims", "model=evil:Model"]):
        status, text = said(capsys, "check", path, *words)
        assert (status, text.splitlines()[-1][-23:]) == (2, "; add --trust to run it")


def test_what_lies_beside_the_yaml_runs_and_with_trust_all(capsys, monkeypatch):
    monkeypatch.setattr(experiment, "plain_steps", lambda *_: None)  # they prove the step, and read no file
    path = written("theirs/x.yaml")
    assert said(capsys, "check", path)[0] == 0
    status, text = said(capsys, "explain", path)
    assert (status, "total: " in text) == (0, True)
    path = written("x.yaml")
    assert said(capsys, "verify", path)[0] == 0
    Path("elsewhere").mkdir()
    path = written("elsewhere/x.yaml")
    assert refused(capsys, "explain", path)
    assert said(capsys, "explain", path, "--trust")[0] == 0
    assert "not checked" not in said(capsys, "check", path, "--trust")[1]


def test_train_runs_what_its_yaml_names(capsys):
    Path("elsewhere").mkdir()
    path = written("elsewhere/x.yaml", steps="1", output="run")
    assert said(capsys, "train", path)[0] == 0


def test_the_page_shows_what_is_said(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/checkpoints.md").read_text()
    ((command, sentence),) = re.findall(r"^```console\n\$ jshard (explain .*)\n(.*)\n```$", page, re.MULTILINE)
    assert said(capsys, *command.split()) == (2, f"{sentence}\n")


def test_names_of_these_packages_run_from_every_yaml():
    Trust.beside("run/configuration.yaml").check("", "flax.nnx.module")
    ours = ("jshard", "jshard.layers.decoder", "flax.linen", "optax", "optax.losses._classification")
    others = ("jshards", "jshard.training.diff", "flax.io", "flax.training.checkpoints", "optaxes", "jax", "")
    assert [*map(is_ours, (*ours, *others))] == [True] * len(ours) + [False] * len(others)
