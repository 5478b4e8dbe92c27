"""Checkpoints: training goes on from one bit by bit, on any mesh; damage of every kind is one sentence."""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore

from jshard.cli import main
from jshard.cli.resume import found
from jshard.errors import FULL, JShardError
from jshard.signals import active_config as current
from jshard.training.checkpoints import checkpoint
from jshard.training.checkpoints.checkpoint import Checkpoint, named, steps_in
from jshard.training.checkpoints.manifest import Manifest
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.loop import TrainingStep, holds_nan
from jshard.training.experiments.train import train
from jshard.training.preemption import Preempted
from jshard.training.telemetry.progress import Bar
from tests.support.cases import compilations
from tests.support.processes import run as run_processes

ROOT = Path(__file__).parents[3]
FILE = """
jshard:
  mesh: {tensor: 4}
  train:
    model: {path: dropping:Model, hidden: 16}
    data: {path: dropping:data, last: fill}
    batch: 4
    steps: 30
    optimizer: {name: adam, learning_rate: 0.05}
    log: {every: 1}
    output: run
    checkpoint: {every: 10, keep: 2}

layer1: {column: tensor}
layer2: {reduction: tensor}
"""
MODEL = """
import jax, jshard, numpy as np
from flax import nnx

class Model(nnx.Module):
    def __init__(self, hidden=16, *, rngs):
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        with jshard.signal("layer1"):
            self.up = jshard.Linear(2, hidden, rngs=rngs)
        with jshard.signal("layer2"):
            self.down = jshard.Linear(hidden, 2, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(self.dropout(x))))

def data():
    draw = np.random.default_rng(0)
    x = draw.integers(0, 2, (10, 2)).astype(np.float32)
    y = (x[:, 0] != x[:, 1]).astype(np.int32)
    return {"train": (x, y), "test": (x, y)}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a configuration and a model that draws random numbers at every step."""
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    current.unload()


def write(folder: Path) -> None:
    (folder / "mine.yaml").write_text(FILE)
    (folder / "dropping.py").write_text(MODEL)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of 30 steps that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    write(folder)
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        train(built())
    finally:
        os.chdir(before)
        sys.path[:] = path
        current.unload()
    return folder / "run"


@pytest.fixture
def run(finished, here) -> Path:
    """A copy of it, to go on with or to damage."""
    return shutil.copytree(finished, here / "run")


def built(*words: str) -> Experiment:
    configuration = current.load("mine.yaml", words)
    return Experiment.build(configuration, current.mesh())


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def sentence(capsys, *words: str) -> str:
    """What `jshard` says on stderr, in its last line, when it refuses."""
    assert main(list(words)) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


# -- going on --


@pytest.mark.slow
def test_resume_goes_on_bit_by_bit_with_dropout_and_the_position_in_the_data(finished, here, capsys):
    train(built("steps=13"))
    assert main(["resume", "run", "--trust", "steps=30"]) == 0
    out = capsys.readouterr().out
    assert "resumed from step 13: run/checkpoints/13" in out
    assert "saved step 30: run/checkpoints/30" in out
    assert losses(here / "run") == losses(finished)
    first, second = (Checkpoint(each / "checkpoints/30", 30, "run").manifest() for each in (finished, here / "run"))
    assert (first.position, first.arrays) == (second.position, second.arrays)
    assert first.position == {"pass": 11, "row": 10, "examples": 10}
    assert "model.dropout.rngs.count" in first.arrays


@pytest.mark.quick("2")
@pytest.mark.parametrize("devices", [1, 2])
def test_restore_onto_another_mesh_gives_the_same_numbers_where_they_belong(run, devices):
    saved = TrainingStep(*parts(built()))
    here = TrainingStep(*parts(built(f"jshard.mesh.tensor={devices}")))
    there = Checkpoint.find(run / "checkpoints", "latest", "run")
    expected, _ = there.restore(saved.state, "mine.yaml")
    places = {name: array.sharding for name, array in named(here.state).items()}
    restored, manifest = there.restore(here.state, "mine.yaml")
    assert manifest.step == 30
    for name, array in named(restored).items():
        assert array.sharding == places[name], name
        assert bits(array) == bits(named(expected)[name]), name
    assert len(named(restored)["model.up.kernel"].sharding.device_set) == devices


def parts(experiment):
    return experiment.model, experiment.optimizer, experiment.loss


def bits(array):
    plain = jax.random.key_data(array) if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return np.asarray(plain).tobytes()


def test_resume_with_another_configuration_writes_where_that_says(run, here, capsys):
    (here / "other.yaml").write_text(FILE.replace("tensor: 4", "tensor: 2").replace("output: run", "output: other"))
    assert main(["resume", "run", "--trust", "--config", "other.yaml", "--from", "20", "steps=22"]) == 0
    assert "resumed from step 20: run/checkpoints/20" in capsys.readouterr().out
    assert (steps_in(run / "checkpoints"), steps_in(here / "other/checkpoints")) == ([20, 30], [22])
    assert [step for step, _ in losses(here / "other")] == [21, 22]


def test_resume_from_an_earlier_step_sets_the_later_aside_and_compiles_once(run, finished, monkeypatch, capsys):
    (run / "checkpoints/40.partial").mkdir()
    compiled, call = [], TrainingStep.__call__

    def counted(self, x, y):
        losses = []
        compiled.append(compilations(lambda: losses.append(call(self, x, y))))
        return losses[0]

    monkeypatch.setattr(TrainingStep, "__call__", counted)
    train(built(), resume=Checkpoint.find(Path("run/checkpoints"), "previous", "run"))
    assert compiled == [1, *[0] * 9]
    out = capsys.readouterr().out.splitlines()
    assert "removed run/checkpoints/40.partial, an unfinished checkpoint" in out
    assert "set aside the checkpoint of step 30, beyond step 20: run/checkpoints/30.aside-1" in out
    assert losses(run) == losses(finished)
    assert sorted(each.name for each in (run / "checkpoints").iterdir()) == ["20", "30", "30.aside-1"]


def test_resume_finds_a_run_that_was_moved_a_folder_of_checkpoints_and_one_of_them(run, here):
    moved = run.rename(here / "moved")
    assert found(moved, "latest") == (moved / "checkpoints", moved / "configuration.yaml", "latest")
    inside = moved / "checkpoints"
    assert found(inside, "previous") == (inside, inside / "30/configuration.yaml", "previous")
    assert found(inside / "20", "latest") == (inside, inside / "20/configuration.yaml", "20")


AGAIN = {
    "by the launcher": {"JSHARD_RESTART": "1"},
    "by Slurm": {"SLURM_RESTART_COUNT": "1"},
    "by both": {"JSHARD_RESTART": "1", "SLURM_RESTART_COUNT": "0"},
    "not": {"JSHARD_RESTART": "0", "SLURM_RESTART_COUNT": "0"},
}


@pytest.mark.quick("not")
@pytest.mark.parametrize("way", AGAIN)
def test_train_started_again_goes_on_by_itself(way, run, monkeypatch, capsys):
    for name, value in AGAIN[way].items():
        monkeypatch.setenv(name, value)
    status = main(["train", "mine.yaml", "steps=31"])
    said = capsys.readouterr()
    if way == "not":
        assert (status, "already holds checkpoints, the last of step 30" in said.err) == (2, True)
    else:
        assert (status, "resumed from step 30: run/checkpoints/30" in said.out) == (0, True)


@pytest.mark.quick("words2")
@pytest.mark.parametrize(
    "words",
    [
        ["train", "mine.yaml"],
        ["resume", "run", "--from", "30", "--trust"],
        ["resume", "run", "--from", "10", "--trust"],
    ],
)
def test_train_started_again_goes_on_from_the_newest_whole_checkpoint_and_says_so(
    words, run, finished, monkeypatch, capsys
):
    flip(file := largest(run / "checkpoints/30/arrays"))
    monkeypatch.setenv("JSHARD_RESTART", "1")
    assert main([*words, "steps=31"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == (
        f"the checkpoint of step 30 (run/checkpoints/30) is damaged: the bytes of {file.relative_to(run / 'checkpoints/30')} "
        "are not those that were saved; an earlier checkpoint is tried"
    )
    assert "resumed from step 20: run/checkpoints/20" in said.out
    assert "set aside the checkpoint of step 30, beyond step 20: run/checkpoints/30.aside-1" in said.out
    assert losses(run)[:30] == losses(finished)


def test_train_started_again_where_no_checkpoint_is_whole_is_told(run, monkeypatch, capsys):
    cut(run / "checkpoints/30/checkpoint.json")
    (run / "checkpoints/20/checkpoint.json").unlink()
    monkeypatch.setenv("JSHARD_RESTART", "1")
    assert sentence(capsys, "train", "mine.yaml", "steps=31") == (
        "all checkpoints in run/checkpoints are damaged; type: jshard train, with another output"
    )
    assert steps_in(run / "checkpoints") == [20, 30]


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_train_started_again_at_its_end_evaluates_what_was_not_and_ends(
    is_evaluated, run, finished, monkeypatch, capsys
):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    if not is_evaluated:  # as it is when the process ends behind its last save
        (run / "metrics.jsonl").write_text("".join(line for line in lines if "test_" not in line))
    monkeypatch.setenv("JSHARD_RESTART", "1")
    assert main(["train", "mine.yaml"]) == 0
    assert (run / "metrics.jsonl").read_text().splitlines(keepends=True) == lines
    assert "test accuracy" in capsys.readouterr().out


def test_run_that_goes_on_removes_what_the_one_before_did_not_come_to(run, monkeypatch):
    shutil.copytree(run / "checkpoints/20", run / "checkpoints/10")
    monkeypatch.setenv("JSHARD_RESTART", "1")
    assert main(["train", "mine.yaml"]) == 0
    assert sorted(each.name for each in (run / "checkpoints").iterdir()) == ["20", "30"]


def test_run_that_goes_on_writes_the_evaluation_that_was_lost(run, finished, here):
    train(built("evaluation.every=10", "output=whole", "steps=21"))
    whole = (here / "whole/metrics.jsonl").read_text().splitlines(keepends=True)
    assert sum("test_" in line for line in whole) == 3
    (run / "metrics.jsonl").write_text("".join(whole[:21]))  # one evaluation, and 20 steps
    resume = Checkpoint.find(run / "checkpoints", "previous", "run")
    train(built("evaluation.every=10", "steps=21"), resume=resume)
    there = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in there if "test_loss" in line] == [json.loads(line) for line in whole if "test_" in line]


NEWEST = """
import sys
from pathlib import Path
from tests.support.processes import join
join()
from jshard.training.checkpoints.checkpoint import Checkpoint
print(Checkpoint.newest_whole(Path("run/checkpoints"), "run").step, Checkpoint.newest_whole(Path("nowhere"), "run"))
"""


@pytest.mark.slow
def test_newest_whole_checkpoint_is_the_same_for_all_processes_though_one_alone_finds_the_damage(run, here):
    (here / "newest.py").write_text(NEWEST)
    files = [*Manifest.read(run / "checkpoints/30").files]
    flip(run / "checkpoints/30" / files[1])
    done = run_processes(here / "newest.py", 2, timeout=120)
    assert [each.stdout.strip() for each in done] == ["20 None", "20 None"], done
    assert ["is damaged" in each.stderr for each in done] == [False, True]


@pytest.mark.seconds
def test_resume_of_one_checkpoint_writes_into_its_run(run):
    before = sorted((run / "checkpoints/20").iterdir())
    shutil.rmtree(run / "checkpoints/30")
    assert main(["resume", "run/checkpoints/20", "--trust", "steps=21"]) == 0
    assert sorted((run / "checkpoints/20").iterdir()) == before
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 21


def test_restore_unpickles_nothing(run, monkeypatch):
    def refuse(*anything, **named):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    state = TrainingStep(*parts(built())).state
    Checkpoint.find(run / "checkpoints", "latest", "run").restore(state, "mine.yaml")
    names = [path.name for path in run.rglob("*") if path.is_file()]
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".npy", ".npz"))]


# -- saving --


@pytest.mark.seconds
def test_saving_goes_on_beside_training_and_keeps_what_was_there_at_that_step(here, monkeypatch, finished):
    under_way, may_end = [], threading.Event()
    begin = checkpoint.save

    def slow(folder, arrays):
        wait = begin(folder, arrays)
        under_way.append(folder.parent.name)
        return lambda: (may_end.wait(60), wait())

    shown = []

    class Watched(Bar):
        def show(self, step, loss, figures):
            shown.append((step, steps_in(here / "run/checkpoints")))
            if step == 19:
                may_end.set()

    monkeypatch.setattr(checkpoint, "save", slow)
    experiment = built("steps=20")
    train(experiment, Watched(20))
    assert under_way == ["10.partial", "20.partial"]
    assert shown[18] == (19, [])  # nine steps were made while the tenth was being saved
    shutil.rmtree(here / "run/checkpoints/20")
    assert main(["resume", "run", "--trust", "steps=20"]) == 0
    assert losses(here / "run") == losses(finished)[:20]


def test_saver_keeps_the_last_few_and_leaves_nothing_else(finished):
    assert sorted(each.name for each in (finished / "checkpoints").iterdir()) == ["20", "30"]
    inside = sorted(each.name for each in (finished / "checkpoints/30").iterdir())
    assert inside == ["arrays", "checkpoint.json", "configuration.yaml"]
    assert (finished / "checkpoints/30/configuration.yaml").read_text() == (finished / "configuration.yaml").read_text()


def test_a_checkpoint_has_its_name_once_all_of_it_is_on_the_disk(run, monkeypatch):
    """Every file and folder of it, as long as it stays, and the manifest behind all that it has checksums of."""
    deeds, fsync, rename = [], os.fsync, os.rename

    def flushed(file):
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        deeds.append((path, path.stat().st_size if path.is_file() else None))
        return fsync(file)

    def renamed(source, target, **more):
        if Path(source).name == "31.partial":
            whole = {path.absolute() for path in (Path(source), *Path(source).rglob("*"))}
            Manifest.read(Path(source)).check_files(Path(source))
            before = dict(deeds)
            assert whole - before.keys() == set()
            assert all(before[path] == path.stat().st_size for path in whole if path.is_file())
            names = [path.name for path, size in deeds if size is not None and path in whole]
            assert (names[-1], names.count("checkpoint.json")) == ("checkpoint.json", 1)
            folders = sum(path.is_dir() for path in whole)
            assert {size for _, size in deeds[-folders:]} == {None}
        deeds.append((Path(target).absolute(), "renamed"))
        return rename(source, target, **more)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    train(built("steps=31"), resume=Checkpoint.find(run / "checkpoints", "latest", "run"))
    folder = (run / "checkpoints").absolute()
    at = deeds.index((folder / "31", "renamed"))
    assert deeds[at + 1] == (folder, None)  # and so is its name


def test_checkpoint_that_can_not_be_removed_is_told_once_and_ends_no_training(here, monkeypatch, capsys):
    (here / "run/checkpoints/5.partial").mkdir(parents=True)
    remove = shutil.rmtree

    def refuse(path, **how):
        if Path(path).name.partition(".")[0] in ("5", "10"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        remove(path, **how)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    train(built("checkpoint.every=5", "steps=25"))
    told = [line for line in capsys.readouterr().out.splitlines() if "remove" in line]
    assert told == [
        f"run/checkpoints/{name} can't be removed: permission denied; training goes on: remove it by hand"
        for name in ("5.removed-1", "5.removed-2", "10.removed-1")
    ]
    folders = sorted(each.name for each in (here / "run/checkpoints").iterdir())
    assert folders == ["10.removed-1", "20", "25", "5.removed-1", "5.removed-2"]


def test_checkpoint_whose_folder_is_busy_is_told_once_and_ends_no_training(here, monkeypatch, capsys):
    rename = Path.rename

    def refuse(path, target):
        if path.name == "5":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    train(built("checkpoint.every=5", "steps=25"))
    told = [line for line in capsys.readouterr().out.splitlines() if "remove" in line]
    assert told == ["run/checkpoints/5 can't be removed: device or resource busy; training goes on: remove it by hand"]
    assert steps_in(here / "run/checkpoints") == [5, 20, 25]


def test_train_refuses_a_folder_that_holds_another_run(run, capsys):
    before = (run / "metrics.jsonl").read_text()
    assert sentence(capsys, "train", "mine.yaml") == (
        'jshard.train.checkpoint (mine.yaml:12) saves to "run/checkpoints", which already holds checkpoints, the last of '
        "step 30; type: jshard resume run --trust, or name another output"
    )
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("other", ["earlier", "with-another"])  # before and behind `run`, by their names
def test_resume_refuses_an_output_that_holds_another_run(run, here, capsys, other):
    shutil.copytree(run / "checkpoints", here / other / "checkpoints")
    assert sentence(capsys, "resume", "run", "steps=31", f"output={other}", "--trust") == (
        f'jshard.train.checkpoint (run/configuration.yaml:21) saves to "{other}/checkpoints", which already holds checkpoints, '
        f"the last of step 30; type: jshard resume {other} --trust, or name another output"
    )
    assert steps_in(here / other / "checkpoints") == [20, 30]


# -- SIGTERM and NaN --


class Interrupted(Bar):
    """SIGTERM comes during step 7."""

    def show(self, step, loss, figures):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.seconds
def test_sigterm_saves_the_step_it_came_in_and_ends_with_143(here, finished, capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted) as ended:
        train(built(), Interrupted(30))
    assert (ended.value.code, ended.value.step) == (143, 7)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "saved step 7: run/checkpoints/7",
        "SIGTERM: stopped at step 7; type: jshard resume run --trust",
    ]
    assert signal.getsignal(signal.SIGTERM) is before
    assert main(["resume", "run", "--trust"]) == 0
    assert losses(here / "run") == losses(finished)


SCRIPT = """
import os, signal, sys
from tests.support.processes import join
join()
import jax
from jshard.signals import active_config as current
from jshard.training.experiments.experiment import Experiment
from jshard.training.telemetry.progress import Bar
from jshard.training.experiments.train import train
sys.path.insert(0, os.getcwd())

class Interrupted(Bar):
    def show(self, step, loss, figures):
        loss.block_until_ready()
        if step == 7 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

experiment = Experiment.build(current.load("mine.yaml", ["steps=100000", "checkpoint.every=50000", "log.every=50000"]), current.mesh())
train(experiment, Interrupted(1000))
"""


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_saves_the_same_step_on_both(here):
    (here / "script.py").write_text(SCRIPT)
    done = run_processes(here / "script.py", 2, devices=2, fails=True, timeout=120, hashes=True)
    assert [each.code for each in done] == [143, 143], done
    (step,) = steps_in(here / "run/checkpoints")
    assert 7 < step < 50000
    for each in done:
        assert f"SIGTERM: stopped at step {step}; type: jshard resume run --trust" in each.stdout
    assert Checkpoint.find(here / "run/checkpoints", "latest", "run").manifest().step == step


KILLED = """
import os, signal, sys
sys.path.insert(0, os.getcwd())
from jshard.signals import active_config as current
from jshard.training.checkpoints import checkpoint
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.train import train

begin = checkpoint.save

def killed(folder, arrays):
    wait = begin(folder, arrays)
    return lambda: (wait(), os.kill(os.getpid(), signal.SIGKILL)) if "20" in folder.parent.name else wait()

checkpoint.save = killed
train(Experiment.build(current.load("mine.yaml"), current.mesh()))
"""


@pytest.mark.slow
def test_process_killed_while_it_saves_leaves_the_checkpoint_before_and_is_gone_on_from(here, finished, capsys):
    (here / "killed.py").write_text(KILLED)
    done = subprocess.run(
        [sys.executable, "killed.py"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=240
    )
    assert done.returncode == -signal.SIGKILL
    assert sorted(each.name for each in (here / "run/checkpoints").iterdir()) == ["10", "20.partial"]
    assert main(["resume", "run", "--trust"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == [
        "resumed from step 10: run/checkpoints/10",
        "removed run/checkpoints/20.partial, an unfinished checkpoint",
    ]
    assert losses(here / "run") == losses(finished)


RISING = "optimizer={name: sgd, learning_rate: 1e38}"


@pytest.mark.seconds
def test_nan_stops_and_names_the_last_good_checkpoint(here):
    with pytest.raises(JShardError) as told:
        train(built(RISING, "output=bad", "checkpoint.every=1"))
    assert str(told.value) == (
        "the loss of step 4 is NaN: sub makes it in the forward pass; the last good checkpoint is that of step 3 (bad/checkpoints/3); "
        "type: jshard resume bad --trust optimizer.learning_rate=1e+37"
    )
    assert steps_in(here / "bad/checkpoints") == [2, 3]


def test_nan_in_a_parameter_is_seen_before_a_save():
    state = TrainingStep(*parts(built())).state
    assert not holds_nan(state)
    state[0]["up"]["bias"][...] *= np.nan
    assert holds_nan(state)


@pytest.mark.quick(1)
@pytest.mark.parametrize("log", [1, 100])
@pytest.mark.parametrize(
    ("written", "end"),
    [
        ("checkpoint: 25", "and no checkpoint was saved before; try optimizer.learning_rate=1e+37"),
        ("", "and nothing was saved; try optimizer.learning_rate=1e+37, and write checkpoint: 100 under jshard.train"),
    ],
)
def test_nan_without_a_checkpoint_stops_too(here, log, written, end):
    (here / "mine.yaml").write_text(FILE.replace("checkpoint: {every: 10, keep: 2}", written))
    with pytest.raises(JShardError) as told:
        train(built(RISING, "output=bad", f"log.every={log}"))
    assert str(told.value) == f"the loss of step 4 is NaN: sub makes it in the forward pass, {end}"


# -- damage --


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(step: Path) -> Path:
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: (path.stat().st_size, str(path)))


def of_release(number: int, step: Path) -> None:
    fields = json.loads((step / "checkpoint.json").read_text()) | {"format": number}
    del fields["sha256"]
    own = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    (step / "checkpoint.json").write_text(json.dumps({**fields, "sha256": own}))


OTHER = "the checkpoint of step 30 (run/checkpoints/30) was written by another release of jshard, whose format this one does not know"
IS = "the checkpoint of step 30 (run/checkpoints/30) is"
DAMAGE = {
    "missing": (lambda step: largest(step / "arrays").unlink(), f"{IS} damaged: {{file}} is missing"),
    "truncated": (lambda step: cut(largest(step / "arrays")), f"{IS} damaged: {{file}} has {{short}} of its {{size}} bytes"),
    "flipped": (lambda step: flip(largest(step / "arrays")), f"{IS} damaged: the bytes of {{file}} are not those that were saved"),
    "half-written": (lambda step: (step / "checkpoint.json").unlink(), f"{IS} half-written: it has no checkpoint.json"),
    "manifest cut": (lambda step: cut(step / "checkpoint.json"), f"{IS} damaged: checkpoint.json is cut off or changed"),
    "manifest changed": (
        lambda step: (step / "checkpoint.json").write_text((step / "checkpoint.json").read_text().replace("30", "31", 1)),
        f"{IS} damaged: checkpoint.json is cut off or changed",
    ),
    "of an earlier release": (functools.partial(of_release, 0), OTHER),
    "of a later release": (functools.partial(of_release, 2), OTHER),
    "manifest empty": (lambda step: (step / "checkpoint.json").write_text("[]"), f"{IS} damaged: checkpoint.json is cut off or changed"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_sentence_and_the_checkpoint_before_is_whole(run, kind):
    harm, says = DAMAGE[kind]
    step = run / "checkpoints/30"
    file = largest(step / "arrays")
    size = file.stat().st_size
    harm(step)
    with pytest.raises(JShardError) as told:
        Checkpoint.find(Path("run/checkpoints"), "latest", "run").manifest()
    says = says.format(file=file.relative_to(step), size=f"{size:,}", short=f"{size - 7:,}")
    assert str(told.value) == f"{says}; type: jshard resume run --from 20"
    assert Checkpoint.find(Path("run/checkpoints"), "previous", "run").manifest().step == 20


def test_every_file_of_a_checkpoint_is_under_a_checksum(run):
    step = run / "checkpoints/30"
    files = [path for path in step.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 5
    for path in files:
        before = path.read_bytes()
        flip(path)
        with pytest.raises(JShardError, match="is damaged"):
            Checkpoint.find(run / "checkpoints", "latest", "run").manifest()
        path.write_bytes(before)
    assert Checkpoint.find(run / "checkpoints", "latest", "run").manifest().step == 30


def test_resume_of_a_damaged_checkpoint_is_told_and_goes_on_from_the_one_it_names(run, finished, capsys):
    flip(largest(run / "checkpoints/30/arrays"))
    assert sentence(capsys, "resume", "run", "--trust", "steps=31").endswith(
        "type: jshard resume run --trust --from 20"
    )
    assert steps_in(run / "checkpoints") == [20, 30]
    assert main(["resume", "run", "--trust", "--from", "20"]) == 0
    assert losses(run) == losses(finished)


def test_a_parameter_that_is_not_finite_is_told_when_it_is_restored(run):
    step = built("steps=31").step()
    saved = Checkpoint.find(run / "checkpoints", "latest", "run")
    read = checkpoint.load

    def spoilt(folder, like):
        arrays = read(folder, like)
        bias = np.array(arrays["model.up.bias"])
        bias[0] = np.inf
        return {**arrays, "model.up.bias": jax.device_put(bias, arrays["model.up.bias"].sharding)}

    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning) as told:
        patch.setattr(checkpoint, "load", spoilt)
        saved.restore(step.state, "mine.yaml")
    assert [str(each.message) for each in told] == [
        f"the checkpoint of step 30 ({run}/checkpoints/30) holds numbers that are NaN or infinite: 1 in model.up.bias; fetch it "
        "again, or train from another"
    ]


FIT = "use the model and the optimizer of run/checkpoints/30/configuration.yaml"


@pytest.mark.quick("optimizer")
@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (
            ["model.hidden=8"],
            [
                "model.down.kernel is float32[16, 2] in the checkpoint of step 30 (run/checkpoints/30), and float32[8, 2] by mine.yaml; " + FIT,
                "model.up.bias is float32[16] in the checkpoint of step 30 (run/checkpoints/30), and float32[8] by mine.yaml; " + FIT,
                "model.up.kernel is float32[2, 16] in the checkpoint of step 30 (run/checkpoints/30), and float32[2, 8] by mine.yaml, and 6 more of this kind; " + FIT,
            ],
        ),
        (
            ["optimizer={name: sgd, momentum: 0.5}"],
            [
                "the checkpoint of step 30 (run/checkpoints/30) has no optimizer.opt_state.0.trace.down.bias, which mine.yaml needs; " + FIT,
                "the checkpoint of step 30 (run/checkpoints/30) has no optimizer.opt_state.0.trace.down.kernel, which mine.yaml needs; " + FIT,
                "the checkpoint of step 30 (run/checkpoints/30) has no optimizer.opt_state.0.trace.up.bias, which mine.yaml needs, and 10 more of this kind; " + FIT,
            ],
        ),
    ],
    ids=["model", "optimizer"],
)  # fmt: skip
def test_checkpoint_that_does_not_fit_is_told_by_the_names_of_its_arrays(run, words, faults):
    with pytest.raises(JShardError) as told:
        train(built("steps=31", *words), resume=Checkpoint.find(Path("run/checkpoints"), "latest", "run"))
    assert list(told.value.faults) == faults
    assert steps_in(run / "checkpoints") == [20, 30]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["resume", "nowhere"], "nowhere is not a run: there is no such folder; name the output folder of a run"),
        (["resume", "."], ". is not a run: it has no configuration.yaml and no checkpoints; name the output folder of a run"),
        (["resume", "run", "--trust"], "the checkpoint of step 30 (run/checkpoints/30) has trained 30 of 30 steps, so there is nothing to do; type: jshard resume run --trust steps=60"),
        (["resume", "run", "--trust", "--from", "25"], 'run/checkpoints holds no checkpoint "25"; use --from latest, previous or a step of 20, 30'),
        (["train", "mine.yaml", "output=mine.yaml/x"], 'jshard.train.output (the command line) is "mine.yaml/x", which can\'t be written to: not a directory; make it writable, or name another output'),
    ],
)  # fmt: skip
def test_what_can_not_be_resumed_or_saved_is_told(run, capsys, words, says):
    assert sentence(capsys, *words) == says


def test_previous_of_one_and_latest_of_none_are_told(run):
    shutil.rmtree(run / "checkpoints/20")
    with pytest.raises(JShardError) as told:
        Checkpoint.find(Path("run/checkpoints"), "previous", "run")
    assert str(told.value) == (
        "run/checkpoints holds one checkpoint, of step 30, and no earlier one; type: jshard train, with another output"
    )
    (run / "checkpoints/30").rename(run / "checkpoints/30.partial")
    with pytest.raises(JShardError) as told:
        Checkpoint.find(Path("run/checkpoints"), "latest", "run")
    assert str(told.value) == (
        "there is no checkpoint in run/checkpoints but 30.partial, an unfinished checkpoint; type: jshard train"
    )


def test_checkpoint_without_a_folder_is_told(here):
    (here / "mine.yaml").write_text(FILE.replace("    output: run\n", ""))
    with pytest.raises(JShardError) as told:
        built()
    assert str(told.value) == (
        "jshard.train.checkpoint (mine.yaml:11) has no folder to save to; write output: runs/mine beside it, or folder: in it"
    )


def test_disk_that_fills_up_while_saving_is_told_and_the_checkpoint_before_is_whole(run, monkeypatch):
    def full(folder, arrays):
        def wait():
            raise ValueError("RESOURCE_EXHAUSTED: Failed writing: No space left on device [os_error_code='28']")

        folder.mkdir()
        return wait

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(JShardError) as told:
        train(built("steps=31"), resume=Checkpoint.find(run / "checkpoints", "latest", "run"))
    assert str(told.value) == (
        'jshard.train.checkpoint (mine.yaml:12) saves to "run/checkpoints", which can\'t save step 31: no space left on '
        "device, and the last checkpoint is that of step 30; make room, then type: jshard resume run --trust"
    )
    assert isinstance(told.value.__cause__, OSError) and told.value.__cause__.errno in FULL
    assert sorted(each.name for each in (run / "checkpoints").iterdir()) == ["20", "30"]


def test_disk_that_fills_up_while_figures_are_written_is_told(here, monkeypatch):
    opened = Path.open

    def full(path, mode="r", *more, **named):
        if path.name == "metrics.jsonl" and mode == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *more, **named)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(JShardError) as told:
        train(built("steps=3"))
    assert str(told.value) == (
        'jshard.train.output (mine.yaml:11) is "run", which can\'t be written to: no space left on device; '
        "make room, or name another output"
    )
    assert isinstance(told.value.__cause__, OSError) and told.value.__cause__.errno in FULL


@pytest.mark.seconds
def test_of_a_save_that_failed_no_write_that_ends_later_is_told(run, monkeypatch):
    def writes(folder, arrays):
        def wait():
            for f in (loop.call_soon_threadsafe, lambda _: 1 / 0):  # as orbax waits for a write; and a fault
                promise, written = tensorstore.Promise.new()
                written.add_done_callback(f)
                promise.set_result(None)
            raise OSError(errno.ENOSPC, "No space left on device")

        loop = asyncio.new_event_loop()
        loop.close()
        folder.mkdir()
        return wait

    told = []
    hook = lambda said: told.append(str(said.exc_value))
    monkeypatch.setattr(sys, "unraisablehook", hook)
    resume = Checkpoint.find(run / "checkpoints", "latest", "run")
    train(built("steps=31"), resume=resume)
    assert sys.unraisablehook is hook
    monkeypatch.setattr(checkpoint, "save", writes)
    with pytest.raises(JShardError):
        train(built("steps=32"), resume=resume)
    assert told == ["division by zero"]


MOUNTS = "mkdir -p full ro; mount -t tmpfs -o size=48k tmpfs full && mount -t tmpfs -o ro tmpfs ro && "


@pytest.mark.slow
def test_disk_that_is_really_full_or_read_only_is_told(here):
    if subprocess.run(["unshare", "-rm", "sh", "-c", MOUNTS + "true"], capture_output=True).returncode:
        pytest.skip("needs `unshare -rm` and tmpfs, to have a disk that is full")
    run = "main(['train', 'mine.yaml', 'steps=3', 'model.hidden=4096', 'checkpoint.folder={}'])"
    program = f"from jshard.cli import main; {run.format('full')}; {run.format('ro/x')}"  # one start of Python for both
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{MOUNTS} {sys.executable} -c "{program}"'],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    faults = [line for line in done.stderr.splitlines() if not line.startswith("JAX_PLATFORMS")]
    said = "jshard.train.checkpoint.folder (the command line) saves to"
    assert faults == [
        f'{said} "full", which can\'t save step 3: no space left on device; make room, or name another output',
        f'{said} "ro/x", which can\'t be written to: read-only file system; make it writable, or name another output',
    ]


PAGE = (ROOT / "docs/checkpoints.md").read_text()


@pytest.mark.slow
def test_page_shows_what_the_commands_print(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    session, _ = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ jshard ([^\n]+)\n(.*?)(?=^\$|\Z)", session, re.MULTILINE | re.DOTALL)
    assert [command.split()[0] for command, _ in commands] == ["train", "resume"]
    for command, says in commands:
        done = subprocess.run(
            [sys.executable, "-m", "jshard", *command.split()],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for line in says.splitlines():  # in any order: a save may end a step earlier or later
            form = re.escape(line).replace(r"\.\.\.", ".*")
            assert re.search(f"^{form}$", done.stdout, re.MULTILINE), line + "\n" + done.stdout + done.stderr
