"""What a command prints fits the window, has no colour in a pipe, and is one document with a version for `--json`."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import jax
import pytest

import jshard
from jshard.cli import main
from jshard.cli.terminal import fitted, width
from tests.support.typed_in import typed_in

ROOT = Path(__file__).parents[2]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
YAML = """jshard:
  mesh: {data: 2, tensor: 4}
up: {row: data, column: tensor, expect: {all_reduce: 2}}
down: {row: data, reduction: tensor}
"""
LOSS = ["folded:loss", "--config", "mlp.yaml", "--args", "folded:model", "float32[8,8]@data"]
WIDER = ["folded:loss", "down.reduction=[]", *LOSS[1:]]
COMMANDS = {
    "explain": LOSS,
    "explain by": [*LOSS, "--by", "line"],
    "plan": LOSS,
    "diff": WIDER,
    "diff compiled": [*WIDER, "--topology", "cpu:8"],
    "check": LOSS,
    "verify": LOSS,
    "report": LOSS,
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch, kept_plans):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("jshard.training.diff._output", _printed_here)
    monkeypatch.setattr("jshard.training.function.Function.verify", lambda self, meshes: _verified())
    with typed_in(tmp_path, "folded", YAML, monkeypatch):
        yield


@functools.cache
def _printed(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(words)
    return out.getvalue()


def _printed_here(sides, commands):
    """What the processes of a diff would print, without processes."""
    return [_printed(command, *side.words, *options) for side, (command, *options) in zip(sides, commands, strict=True)]


@functools.cache
def _verified():
    """The one verification that these tests print in many ways."""
    return jshard.verify(lambda x: jshard.sum(x * x), jax.ShapeDtypeStruct((8,), "float32"))


class Terminal:
    """A terminal of so many columns; `seen` is what was written to it."""

    def __init__(self, columns: int):
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.file = os.fdopen(self.theirs, "w")
        self.read = b""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(self.ours, 65536):
                self.read += part

    def seen(self) -> str:
        self.file.close()
        self.reader.join(10)
        os.close(self.ours)
        return self.read.decode().replace("\r\n", "\n")


def in_a_window(columns: int, words: list[str]) -> str:
    terminal = Terminal(columns)
    with contextlib.redirect_stdout(terminal.file):
        main(words)
    return terminal.seen()


@pytest.mark.quick("diff", "explain", "explain by", "report")
@pytest.mark.parametrize("name", COMMANDS)
def test_command_fits_the_window_and_is_whole_in_a_pipe(name, capsys):
    words = [name.split()[0], *COMMANDS[name]]
    if name == "plan":
        main(words)  # it is cached from now on, and says so
        capsys.readouterr()
    main(words)
    piped = capsys.readouterr().out
    assert "\x1b" not in piped
    for columns in (60, 80, 200):
        shown = COLOUR.sub("", in_a_window(columns, words))
        assert max(map(len, shown.splitlines())) <= columns, columns
        assert "".join(shown.split()) == "".join(piped.split())
    longest = max(map(len, piped.splitlines()))
    assert longest > 60 or name in ("report", "check")


def test_mistake_fits_the_window(monkeypatch):
    terminal = Terminal(60)
    monkeypatch.setattr(sys, "stderr", terminal.file)
    status = main(["explain", "folded:los", *LOSS[1:]])
    monkeypatch.undo()
    shown = terminal.seen()
    assert status == 2
    assert shown == ('"folded:los" names a function, but folded has no "los"; did\n    you mean "folded:loss"?\n')


def test_rows_are_folded_between_their_cells_and_words_that_are_too_long_are_cut():
    assert fitted("a row  of  cells that are long", 20) == "a row  of\n    cells that are\n    long"
    assert fitted("    inside  of  another one", 20) == "    inside  of\n        another one"
    assert fitted("x" * 30, 20).splitlines() == ["x" * 20, "    " + "x" * 10]
    assert fitted("any" * 99, None) == "any" * 99


def test_window_is_as_wide_as_columns_says(monkeypatch):
    terminal = Terminal(70)
    assert width(terminal.file) == 70
    monkeypatch.setenv("COLUMNS", "44")
    assert width(terminal.file) == 44
    terminal.seen()
    assert width(io.StringIO()) is None


JSON = {
    "explain": ("jshard.explain/1", ["lines", "total"]),
    "plan": ("jshard.plan/1", ["wire", "memory"]),
    "diff": ("jshard.diff/2", ["changes", "same"]),
    "diff compiled": ("jshard.diff/2", ["changes", "same"]),
    "check": ("jshard.check/1", ["configurations", "ok"]),
    "verify": ("jshard.verify/1", ["findings", "ok"]),
}


@pytest.mark.quick("explain", "diff", "diff compiled", "check", "verify")  # tests of plans read its document
@pytest.mark.parametrize("name", JSON)
def test_command_prints_one_document_with_a_version(name, capsys):
    schema, keys = JSON[name]
    main([name.split()[0], *COMMANDS[name], "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == schema
    assert set(keys) <= set(document)


def test_check_document_tells_what_is_broken(capsys):
    assert main(["check", "folded:loss", "up.expect.all_reduce=9", *LOSS[1:], "--json"]) == 1
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["ok"] is False
    (each,) = document["configurations"]
    assert (each["path"], each["function"], each["holds"]) == ("mlp.yaml", "folded:loss", [])
    assert each["meaning"][0] == {"place": "mlp.yaml:2", "says": "mesh {data: 2, tensor: 4} of 8 devices, explicit"}
    assert each["broken"] == [
        'signal "up" (the command line) expects 9 all_reduce, and 2 are asked for; write all_reduce: 2, or see jshard explain'
    ]
    assert "psum" not in err


@pytest.mark.parametrize(
    "words", [["schema"], ["--help"], ["check", "mlp.yaml"], ["explain", *LOSS]], ids=lambda words: words[0]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_disk_that_is_full_is_one_sentence(words, unbuffered):
    if words[0] == "explain" and unbuffered:
        pytest.skip("once is enough for what takes seconds")
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jshard", *words],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (
        2, f"the output of jshard {words[0]} can't be written: no space left on device; redirect it to another disk\n",
    )  # fmt: skip


EVIL = "a\x1b[31m\x07\n\u202e\u2066b"
SHOWN = r"a\x1b[31m\x07\n\u202e\u2066b"
MODEL = """
import jshard, numpy as np
from flax import nnx

class Model(nnx.Module):
    def __init__(self, *, rngs):
        with jshard.signal({name!r}):
            setattr(self, {name!r}, jshard.Linear(8, 8, rngs=rngs))

    def __call__(self, x):
        return getattr(self, {name!r})(x)

def data():
    return {{"train": (np.zeros((8, 8), np.float32), np.zeros(8, np.int32))}}
"""


@pytest.mark.parametrize("words", [
    ["check", "evil.yaml"], ["check", "evil.yaml", "--claims"], ["explain", "evil.yaml"], ["report", "evil.yaml"],
    ["check", f"{EVIL}.yaml"], ["check", "evil.yaml", f"{EVIL}=3"], ["check", "evil.yaml", f"{EVIL}.row=three"],
    [EVIL], ["check", f"--{EVIL}", "evil.yaml"], ["timeline", EVIL], ["resume", EVIL],
], ids=lambda words: ascii(" ".join(words)))  # fmt: skip
def test_no_name_reaches_a_terminal_raw(capsys, monkeypatch, words):
    """Neither a colour, nor a bell, nor the end of a line, nor a change of direction."""
    Path("evil.py").write_text(MODEL.format(name=EVIL))
    quoted = json.dumps(EVIL)
    Path("evil.yaml").write_text(
        f"jshard:\n  mesh: {{{quoted}: 8}}\n  train: {{model: evil:Model, data: evil:data, batch: 8}}\n"
        f"{quoted}: {{column: {quoted}, match: ['**']}}\n"
    )
    monkeypatch.setattr("jshard.cli.experiment.pretend", lambda count, platforms: None)
    main(words)
    said = "".join(capsys.readouterr())
    assert ascii("".join(c for c in said if not c.isprintable() and c != "\n")) == "''"
    assert SHOWN in said or r"a\\x1b[31m" in said
    sys.modules.pop("evil", None)
