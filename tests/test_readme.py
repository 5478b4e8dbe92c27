"""What the README shows is run: its Python, its YAML, and its commands with what they print."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jshard.signals.config import load_configuration
from tests.support.outside import users_environment

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
AS_COMMAND = {"make demo": "jshard train configs/digits.yaml"}  # what make runs when the environment is there


def blocks(kind: str) -> list[str]:
    return [text for language, text in BLOCKS if language == kind]


def shown() -> list[tuple[str, str]]:
    """Each command of the console blocks, and what the README says it prints."""
    found = []
    for block in blocks("console"):
        _, *parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
        found += [tuple(part.split("\n", 1)) for part in parts]
    return found


def run(*words: str) -> str:
    out = subprocess.STDOUT
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=out, text=True, cwd=ROOT, env=users_environment(), timeout=120
    )
    return done.stdout


def test_readme_has_what_is_promised():
    assert {command for command, _ in shown()} >= {"make demo", "jshard check configs/digits.yaml --trust"}
    assert len(blocks("python")) == len(blocks("yaml")) == 1


@pytest.mark.seconds
def test_readme_python_runs():
    printed = run(sys.executable, "-W", "error", "-c", blocks("python")[0])
    assert "Traceback" not in printed
    assert "configs/mlp.yaml:7  layer2" in printed
    assert not any(
        warning in printed for warning in ("unused", "unsplit", "no signal asked", "decided by the compiler")
    )


def test_readme_yaml_is_the_file_it_names(tmp_path):
    path = tmp_path / "mlp.yaml"
    path.write_text(blocks("yaml")[0])
    assert load_configuration(str(path)).fingerprint == load_configuration(str(ROOT / "configs/mlp.yaml")).fingerprint


@pytest.mark.quick(*({command for command, _ in shown()} - {"make demo", "jshard verify configs/digits.yaml --trust"}))
@pytest.mark.parametrize(("command", "says"), shown(), ids=[command for command, _ in shown()])
def test_readme_command_prints_what_is_shown(command, says):
    name, *words = AS_COMMAND.get(command, command).split()
    assert name == "jshard"
    words = [*words, "output=runs/readme"] if words[0] == "train" else words
    printed = run(sys.executable, "-m", "jshard", *words)
    assert doctest.OutputChecker().check_output(says, printed, doctest.ELLIPSIS), printed


def test_readme_names_only_targets_and_files_that_are_there():
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([a-z-]+)`", text))
    assert targets >= {"demo", "test", "check"}
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    assert [path for path in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", text) if not (ROOT / path).exists()] == []
