"""The page on training: what it shows is written to files and run, and prints what the page says."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outside import users_environment

PAGE = (Path(__file__).parent.parent / "docs/training.md").read_text()
SHOWN = re.findall(r"^```console\n\$ (python|jshard) ([^\n]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "words", "says"), SHOWN, ids=[words for _, words, _ in SHOWN])
def test_page_prints_what_its_program_prints(tmp_path, command, words, says):
    texts = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for name, text in zip(("words.py", "train.yaml", "train.py"), texts, strict=True):
        (tmp_path / name).write_text(text)
    module = ["-m", "jshard"] if command == "jshard" else []
    done = subprocess.run(
        [sys.executable, *module, *words.split()],
        cwd=tmp_path,
        env=users_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert doctest.OutputChecker().check_output(says, done.stdout, doctest.ELLIPSIS), done.stdout
