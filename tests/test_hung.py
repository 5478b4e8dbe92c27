"""What hangs or dies in a worker of pytest-xdist: planted tests, run as `make test` runs ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = """
import os, time
from pathlib import Path

def dies(name, times):
    ran = Path(os.environ["RAN"], name)
    count = int(ran.read_text()) + 1 if ran.exists() else 1
    ran.write_text(str(count))
    if count <= times:
        os._exit(3)

def test_kernels(): dies("kernels", 9)
def test_launch(): Path(os.environ["RAN"], "hangs").write_text("1"); time.sleep(60)
def test_once(): dies("once", 1)
def test_twice(): dies("twice", 2)
"""


@pytest.mark.slow
def test_hang_of_a_kernel_or_a_launch_and_a_second_one_of_any_test_end_red(tmp_path):
    names = []
    for test in ("test_kernels", "test_launch", "test_once", "test_twice"):
        folder = test.removeprefix("test_")
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(PLANTED)
        names.append(f"tests/{folder}/test_{folder}.py::{test}")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 2\ntimeout_method = thread\n")
    (ran := tmp_path / "ran").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "hung", "-p", "no:cacheprovider", *names],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "RAN": str(ran), "PYTHONPATH": str(Path(__file__).parent / "support")},
    )  # fmt: skip
    counted = {path.name: int(path.read_text()) for path in ran.iterdir()}
    assert (done.returncode, counted) == (1, {"kernels": 1, "hangs": 1, "once": 2, "twice": 2}), done.stdout
    kernels, launch, once, twice = names
    assert sorted(re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)) == [kernels, launch, twice]
    again = re.findall(r"^ran again, as its process hung or died: (\S+)", done.stdout, re.MULTILINE)
    assert sorted(again) == [once, twice]
