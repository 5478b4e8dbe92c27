"""Two runs don't write to one folder, and a run that was killed keeps none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jshard.cli import main
from jshard.signals import active_config as current
from jshard.training.checkpoints import run_lock

ROOT = Path(__file__).parents[3]
YAML = """
jshard:
  mesh: {data: 2}
  train:
    model: tests.support.plain:Dense
    data: tests.support.plain:data
    batch: 16
    steps: 2
    output: run
    checkpoint: 1
rest: {row: data, match: ["**"]}
"""
HOLDER = """
import os, sys, time
from pathlib import Path
from jshard.training.checkpoints.run_lock import locked
with locked({Path(sys.argv[1]): "it"}):
    child = os.fork()  # as a process that reads data: it outlives this one
    if child:
        print(child, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_lock, "DYING", 0.2)
    yield tmp_path
    current.unload()


@contextlib.contextmanager
def held(folder: str) -> Iterator[subprocess.Popen[str]]:
    """Another process has the folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-W", "ignore", "-c", HOLDER, folder]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            yield holder
        finally:
            os.kill(child, signal.SIGKILL)
            holder.kill()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("words", "folder", "opening"),
    [
        (["train", "mine.yaml"], "run", 'jshard.train.output (mine.yaml:9) is "run", which'),
        (["resume", "run", "--trust", "steps=3"], "run", 'jshard.train.output (the command line) is "run", which'),
        (
            ["train", "mine.yaml", "output=other", "checkpoint.folder=saved"],
            "saved",
            'jshard.train.checkpoint.folder (the command line) saves to "saved", which',
        ),
    ],
)
def test_second_run_in_a_folder_is_refused_and_writes_nothing(words, folder, opening, here, capsys):
    if words[0] == "resume":
        assert main(["train", "mine.yaml"]) == 0
    with held(folder) as holder:
        before = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
        assert main(words) == 2
        assert {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()} == before
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        rf"{re.escape(opening)} another run writes to: process {holder.pid} on {re.escape(socket.gethostname())}, "
        r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; wait until it ends, or name another output",
        told,
    ), told


def test_run_that_was_killed_blocks_none_though_a_child_of_it_lives(here, capsys):
    with held("run") as holder:
        holder.kill()
        holder.wait()
        assert main(["train", "mine.yaml"]) == 0
        assert main(["resume", "run", "--trust", "steps=3"]) == 0


def test_file_system_without_locks_is_told_and_training_goes_on(here, monkeypatch, capsys):
    def refuse(*anything):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert main(["train", "mine.yaml"]) == 0
    says = "this file system locks no files (no locks available): make sure that no other run writes to its folder"
    assert says in capsys.readouterr().err
