"""The README's files, commands and picture, as a visitor would use them."""

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
README = (ROOT / "README.md").read_text()
FILES = {"python": ["model.py", "train.py"], "yaml": ["tensor.yaml", "fsdp.yaml"]}
SHOWN = [
    tuple(command.split("\n", 1))
    for block in re.findall(r"^```console\n\$ (.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for command in re.split(r"^\$ ", block, flags=re.MULTILINE)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("readme")
    for kind, names in FILES.items():
        texts = re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
        for name, text in zip(names, texts, strict=True):
            (path / name).write_text(text)
    return path


def run(line: str, folder: Path) -> str:
    """Type a line; a word `NAME=value` before the command is a variable of its environment."""
    words = shlex.split(line)
    variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    command, *rest = words[len(variables) :]
    words = [sys.executable, "-W", "error", *(["-m", "jshard"] if command == "jshard" else []), *rest]
    environment = users_environment(PYTHONPATH=str(ROOT), **variables)
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240).stdout


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("command", "says"),
    [shown for shown in SHOWN if shown[0] != "make demo" and "--topology" not in shown[0]],
    ids=lambda text: " ".join(text.split()[:2]),
)
def test_readme_command_prints_what_is_shown(folder, command, says):
    printed = run(command, folder)
    assert doctest.OutputChecker().check_output(says, printed, doctest.ELLIPSIS), printed


@pytest.mark.slow
def test_readme_plan_prints_what_is_shown(folder, extra):
    extra("v5e:2x4")
    ((command, says),) = [shown for shown in SHOWN if "--topology" in shown[0]]
    printed = run(command, folder)
    assert doctest.OutputChecker().check_output(says, printed, doctest.ELLIPSIS), printed


@pytest.mark.slow
def test_readme_demo_prints_what_is_shown(tmp_path):
    (says,) = [says for command, says in SHOWN if command == "make demo"]
    printed = run(f"jshard train configs/digits.yaml output={tmp_path / 'digits'}", ROOT)
    assert doctest.OutputChecker().check_output(says, printed, doctest.ELLIPSIS), printed


@pytest.mark.seconds
def test_readme_fsdp_has_the_losses_of_tensor(folder):
    losses = [run(f"JSHARD_CONFIG={name} python train.py", folder) for name in FILES["yaml"]]
    assert losses[0] == losses[1] != ""


@pytest.mark.seconds
@pytest.mark.parametrize("name", FILES["yaml"])
def test_readme_picture_shows_the_shards_of_explain(folder, name):
    picture = (ROOT / "docs/pictures/block.svg").read_text()
    (panel,) = [part for part in picture.split('class="title"') if f">{name}: " in part]
    shown = re.findall(r">(\w+/kernel)<.*\n<.*>(\[\d+, \d+\] each)<", panel)
    assert shown
    printed = run(f"jshard explain train:step --config {name} --args train:model train:optimizer train:batch", folder)
    for parameter, shard in shown:
        assert re.search(rf" {parameter} .* {re.escape(shard)}", printed), (parameter, shard)
    for collective in re.findall(r"\b(all_reduce|all_gather|reduce_scatter)<", panel):
        assert collective in printed


def test_readme_names_only_targets_and_files_that_are_there():
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([a-z-]+)`", text))
    assert targets >= {"demo", "test", "check"}
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    assert [path for path in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", text) if not (ROOT / path).exists()] == []


def test_readme_fits_on_a_few_screens():
    assert len(README.encode()) <= 7000
