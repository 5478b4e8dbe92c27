"""docs/walk.md prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.outside import users_environment

ROOT = Path(__file__).parent.parent


def test_walk_prints_what_it_shows():
    """In a process of its own: the page pretends its devices itself."""
    words = [sys.executable, "-m", "doctest", "docs/walk.md"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=users_environment(PYTHONPATH=str(ROOT)))
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_walk_names_files_that_are_there():
    """In its tables a file stands by its path, or by its name below the heading's folder."""
    page = (ROOT / "docs/walk.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", "\n".join(rows))
    folder = ROOT / "jshard/layers/partition"
    assert len(named) >= 20
    assert [name for name in named if not (ROOT / name).exists() and not (folder / name).exists()] == []
