"""The page for users of GT: its program runs with its configuration, and prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outside import users_environment

PAGE = (Path(__file__).parent.parent / "docs/from-gt.md").read_text()


def block(kind: str) -> str:
    [found] = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.slow
def test_page_prints_what_its_program_prints(tmp_path):
    (tmp_path / "sharding.yaml").write_text(block("yaml"))
    (tmp_path / "train.py").write_text(block("python"))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=users_environment(), capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == block("console").partition("\n")[2]
