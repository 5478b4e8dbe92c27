"""docs/walk.md prints what it says."""

from __future__ import annotations

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
