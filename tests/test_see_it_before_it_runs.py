"""The pages on seeing, planning and checking a layout print what the commands print, and the recipes for CI run."""

from __future__ import annotations

import doctest
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml

from jshard.cli import main

ROOT = Path(__file__).parent.parent
PAGES = ("see-it-before-it-runs", "plan-a-pod", "check-in-ci")
PAGE = "".join((ROOT / f"docs/{name}.md").read_text() for name in PAGES)
SHOWN = re.findall(r"^```console\n\$ ([^\n]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMPILERS = re.findall(r"compiled by jax ([\d.]+), libtpu (\d+(?:\.\d+)*)", PAGE)
RECIPES = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
CHECK = [sys.executable, "-m", "jshard", "check"]
pytestmark = pytest.mark.usefixtures("in_the_root")


def test_page_shows_every_command():
    assert [command.split()[1] for command, _ in SHOWN] == [
        "explain", "explain", "explain", "diff", "diff", "diff", "verify", "report", "explain", "plan", "diff", "check", "check",
    ]  # fmt: skip


def needs(extra, command: str) -> None:
    """Skips what is compiled for chips by a compiler that is not here, or that is not the one of the page."""
    name = re.search(r"--topology (\S+)", command)
    if name is None:
        return
    extra(name[1])
    shown, here = COMPILERS[0], (jax.__version__, importlib.metadata.version("libtpu"))
    if shown != here:
        pytest.skip(f"the page shows jax {shown[0]} and libtpu {shown[1]}, and here are {here[0]} and {here[1]}")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "says"), SHOWN, ids=[command[:60] for command, _ in SHOWN])
def test_page_prints_what_the_command_prints(capsys, tmp_path, extra, command, says):
    needs(extra, command)
    name, *words = shlex.split(command)
    assert name == "jshard"
    if "-o" in words:  # the page is not left here
        words[words.index("-o") + 1] = str(tmp_path / words[words.index("-o") + 1])
    main(words)
    out, err = capsys.readouterr()
    told = [line for line in f"{out}{err}".replace(f"{tmp_path}/", "").splitlines() if "pretending" not in line]
    told = "\n".join([*told, ""])
    assert doctest.OutputChecker().check_output(says, told, doctest.ELLIPSIS), told


def test_page_has_a_hook_for_pre_commit_that_is_the_one_of_this_repository():
    ((hook,),) = [repo["hooks"] for repo in RECIPES[0]["repos"]]
    (ours,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert {key: hook[key] for key in ("id", "entry", "language")} == {
        key: ours[key] for key in ("id", "entry", "language")
    }
    assert hook["entry"].split()[1:] == ["check", "--trust"]


@pytest.mark.slow
def test_page_steps_for_github_actions_pass_here(tmp_path):
    steps = [step["run"] for step in RECIPES[1]["jobs"]["check"]["steps"] if "run" in step]
    assert steps[0].startswith("pip install")
    jshard = tmp_path / "jshard"
    jshard.write_text(f'#!/bin/sh\nexec {sys.executable} -m jshard "$@"\n')
    jshard.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_NUM_CPU_DEVICES")
    done = subprocess.run(["bash", "-ec", steps[1]], env=environment, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    assert "as configs/pod-tensor.baseline holds" in done.stdout.splitlines()
    assert re.fullmatch(
        r'jshard diff "git:origin/\$\{\{ github\.base_ref \}\}:(\S+)" \1 --trust \|\| \[ \$\? = 1 \]', steps[2]
    )
