"""docs/first-steps.md: its files and commands, typed in the order of the page in one folder, print what it shows."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outside import users_environment

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/first-steps.md").read_text()
FILES = ["model.py", "train.py", "tensor.yaml", "fsdp.yaml", "resume.py"]


def run(line: str, folder: Path) -> str:
    """Type a line; a word `NAME=value` before the command is a variable of its environment."""
    words = shlex.split(line)
    variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    command, *rest = words[len(variables) :]
    environment = users_environment(PYTHONPATH=str(ROOT), **variables)
    module = ["-m", "jshard"] if command == "jshard" else []
    assert module or command == "python"
    done = subprocess.run(
        [sys.executable, "-W", "error", *module, *rest], cwd=folder, env=environment, capture_output=True, text=True
    )
    return re.sub("^.*: pretending 8 CPU devices for mesh .*\n", "", done.stderr) + done.stdout


@pytest.mark.slow
def test_first_steps_print_what_the_page_shows(tmp_path):
    texts = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for name, text in zip(FILES, texts, strict=True):
        (tmp_path / name).write_text(text)
    shown = re.findall(r"^```console\n\$ ([^\n]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(shown) == 7
    printed = [run(line, tmp_path) for line, _ in shown]
    for (line, says), out in zip(shown, printed, strict=True):
        assert doctest.OutputChecker().check_output(says, out, doctest.ELLIPSIS), f"{line}\n{out}"
    alone, split, resumed = ([float(x) for x in re.findall("loss ([0-9.]+)", out)] for out in printed if "loss" in out)
    assert split + resumed == pytest.approx(alone, abs=2e-3)


def test_first_steps_shows_the_files_that_the_examples_load():
    for name in ("tensor", "fsdp"):
        assert f"```yaml\n{(ROOT / f'configs/first-steps/{name}.yaml').read_text()}```" in PAGE
