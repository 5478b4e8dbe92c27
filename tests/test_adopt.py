"""`configs/adopt/`: each file is one that a user can start from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jshard.cli import main
from jshard.signals.config import load_configuration
from jshard.signals.globs import OTHERS, narrowed

FILES = sorted((Path(__file__).parents[1] / "configs" / "adopt").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_file_to_start_from_claims_every_parameter(path):
    found = load_configuration(path)
    assert found.has_claims and found.devices == 8
    globs = [glob for signal in found.signals.values() for glob in signal.match]
    assert globs.count(OTHERS) == 1
    assert all(signal.match for signal in found.signals.values())
    assert len(set(globs)) == len(globs)
    assert not any(one == "" for glob in globs for one, _ in narrowed(glob))
    row = {signal.row for signal in found.signals.values() if signal.shard is None}
    assert row == {("data",)}
    assert all(signal.store == ("data",) for signal in found.signals.values())


@pytest.mark.usefixtures("in_the_root")
def test_a_model_of_our_own_is_checked(capsys):
    assert main(["check", "configs/adopt/transformer.yaml"]) == 0
    assert "parameters are claimed: " in capsys.readouterr().out


@pytest.mark.usefixtures("in_the_root")
def test_a_small_cnn_learns_the_same_under_three_files(tmp_path, capsys):
    found = {}
    for name in ("data", "fsdp", "tensor"):
        output = tmp_path / name
        assert main(["train", f"configs/cnn/{name}.yaml", "steps=6", "log.every=2", f"output={output}"]) == 0
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        found[name] = [line["loss"] for line in lines if "loss" in line]
    capsys.readouterr()
    assert len(found["data"]) == 3
    np.testing.assert_allclose(found["fsdp"], found["data"], rtol=1e-4)
    np.testing.assert_allclose(found["tensor"], found["data"], rtol=1e-4)
