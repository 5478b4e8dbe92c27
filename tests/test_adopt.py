"""`configs/adopt/`: each file is one that a user can start from."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", ["transformer", "cnn"])
@pytest.mark.usefixtures("in_the_root")
def test_models_of_our_own_are_checked(name, capsys):
    from jshard.cli import main

    assert main(["check", f"configs/adopt/{name}.yaml"]) == 0
    assert "parameters are claimed: " in capsys.readouterr().out
