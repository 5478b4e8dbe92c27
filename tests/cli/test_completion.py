"""At Tab a shell asks jshard: each of them in a terminal, as a user types."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jshard.cli import main

ROOT = Path(__file__).parents[2]
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
LOAD = {
    "bash": 'eval "$(jshard completion bash)"',
    "zsh": 'autoload -U compinit; compinit -D; eval "$(jshard completion zsh)"',
    "fish": "jshard completion fish | source",
}


def completed(capsys, *words: str) -> list[str]:
    assert main(["completion", "bash", *words]) == 0
    return capsys.readouterr().out.split()


def test_completion_knows_commands_options_and_choices(capsys):
    assert completed(capsys, "tr") == ["trace", "train"]
    assert {"explain", "new", "--help", "--version"} <= {*completed(capsys, ""), *completed(capsys, "--")}
    assert completed(capsys, "explain", "configs/digits.yaml", "--p") == ["--phase", "--program"]
    assert completed(capsys, "explain", "--phase", "") == ["backward", "forward", "update"]
    assert completed(capsys, "schedule", "gpipe", "") == ["1f1b", "gpipe", "interleaved", "zero_bubble"]
    assert completed(capsys, "schedule", "gpipe", "--st") == ["--stages"]
    assert completed(capsys, "schedule", "tables/m") == []  # a file
    assert completed(capsys, "completion", "") == ["bash", "fish", "zsh"]
    assert completed(capsys, "train", "conf") == []  # a file, which the shell completes


def typed(shell: str, folder: Path, *, until: dict[str, str]) -> str:
    """What stands on a terminal of this shell: each line of `until` is typed, then its words are waited for."""
    terminal, its = pty.openpty()
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TERM": "xterm",
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    started = subprocess.Popen(
        START[shell], stdin=its, stdout=its, stderr=its, cwd=folder, env=environment, start_new_session=True
    )
    os.close(its)
    seen = ""
    try:
        for line, words in until.items():
            os.write(terminal, line.encode())
            end, start = time.monotonic() + 60, len(seen)
            while words not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>()][0B]?|\r", "", seen[start:]):
                assert time.monotonic() < end, seen
                if select.select([terminal], [], [], 1)[0]:
                    seen += os.read(terminal, 4096).decode(errors="replace")
        return seen
    finally:
        started.kill()
        started.wait()
        os.close(terminal)


@pytest.mark.quick("zsh")
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_in_a_terminal(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here; type: apt-get install {shell}")
    command = tmp_path / "jshard"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m jshard "$@"\n')
    command.chmod(0o755)
    (tmp_path / "mine.yaml").write_text("{}")
    typed(shell, tmp_path, until={
        f"{LOAD[shell]}; echo rea''dy\n": "ready\n",
        "jshard expl\t": "explain ",
        "mi\t": "mine.yaml",
        " --pro\t": "--program",
    })  # fmt: skip


def test_completion_in_fish(tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("no fish here; type: apt-get install fish")
    (tmp_path / "jshard").write_text(f'#!/bin/sh\nexec {sys.executable} -m jshard "$@"\n')
    (tmp_path / "jshard").chmod(0o755)
    told = subprocess.run(
        ["fish", "--no-config", "-c", f"{LOAD['fish']}; complete -C 'jshard tra'; complete -C 'jshard explain --phase '"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert {"trace", "train", "backward", "forward", "update"} <= set(told.stdout.split()), told.stderr
