"""Every example runs, in a process of its own and as its first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outside import users_environment

ROOT = Path(__file__).parent.parent
COMMANDS = [
    command for path in sorted((ROOT / "examples").glob("*.py"))
    for command in re.findall(r"^python -m (.*)$", path.read_text(), re.MULTILINE)
]  # fmt: skip


def printed(*words: str) -> str:
    environment = users_environment()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_each_say_how_they_are_run():
    named = {command.split()[0].removeprefix("examples.") for command in COMMANDS}
    elsewhere = {"digits", "pod", "adopted"}  # tests/training/experiments/test_train.py, docs/see-it-before-it-runs.md,
    # tests/test_adopt.py
    assert named | elsewhere == {path.stem for path in (ROOT / "examples").glob("*.py")}


def test_examples_are_short():
    assert all(len(path.read_text().splitlines()) <= 100 for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.slow
def test_quickstart_shows_what_a_device_holds_costs_and_learns():
    lines = printed("examples.quickstart").splitlines()
    assert lines[0] == "one device holds (784, 256) of (784, 1024)"
    assert any(line.startswith("configs/mlp.yaml:7  layer2") for line in lines)
    before, after = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)", lines[-1]).groups()
    assert float(after) < float(before) / 2


@pytest.mark.slow
def test_xor_is_learned_on_one_device_and_on_four():
    one, four = printed("examples.xor").splitlines()
    assert re.fullmatch(r"1 device: loss 0\.00\d\d, 0\^0 0\^1 1\^0 1\^1 = \[0, 1, 1, 0\]", one)
    assert four == one.replace("1 device:", "4 devices:")


@pytest.mark.slow
@pytest.mark.parametrize("configuration", [(), ("configs/digits.yaml",)])
def test_plain_flax_trains_on_one_device_and_on_a_mesh(configuration):
    (line,) = printed("examples.plain_flax", *configuration).splitlines()
    percent = re.fullmatch(r"test accuracy ([\d.]+) %", line).group(1)
    assert float(percent) > 96


@pytest.mark.seconds
def test_a_batch_in_parts_moves_its_gradients_once():
    layers, once = (
        re.fullmatch(r"\S+: ([\d,]+) B on .*, loss (\S+) -> (\S+)", line)
        for line in printed("examples.in_parts").splitlines()
    )
    assert int(layers[1].replace(",", "")) == 4 * int(once[1].replace(",", ""))
    assert layers.groups()[1:] == once.groups()[1:] and float(once[3]) < float(once[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nnx", "linen", "dict", "equinox"])
def test_first_steps_lose_the_same_on_one_device_and_on_two_meshes_one_after_the_other(kind, extra):
    if kind == "equinox":
        extra("equinox")
    shown = printed(f"examples.first_steps_{kind}")
    assert "\nconfigs/first-steps/tensor.yaml:4  down  forward   all_reduce  over tensor (4) " in shown
    assert "\nEQUAL on {data: 2, tensor: 4} and on one device: " in shown
    found = re.findall(r"^(.*): losses ([\d., ]+); a device holds \((\d+), (\d+)\) of ", shown, re.MULTILINE)
    assert [(what, 64 * 256 // (int(rows) * int(columns))) for what, _, rows, columns in found] == [
        ("one device", 1), ("tensor", 4), ("then FSDP", 8)]  # fmt: skip
    one, *rest = ([float(loss) for loss in losses.split(", ")] for _, losses, _, _ in found)
    assert sum(rest, []) == pytest.approx(one, abs=2e-3)


def test_gt_signals_place_as_gt_means():
    assert printed("examples.gt_signals").splitlines() == [
        "batch    (1, 8) on workers [0, 1, 2, 3, 4, 5, 6, 7]",
        "features (8, 4) on workers [0, 1]",
        "weights  (8, 8) on workers [0, 1, 2, 3, 4, 5, 6, 7]",
        "product  (2, 8) on workers [0, 1, 2, 3]",
    ]
