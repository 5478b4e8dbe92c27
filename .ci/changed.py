"""Prints the tests of what changed since origin/main, or since the last commit where there is no origin: always the
floors, `tests/test_x.py` itself, and for `jshard/room/x.py` the files `test_x.py` and `test_x_*.py` anywhere in tests/."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


since = (git("merge-base", "origin/main", "HEAD") or ["HEAD"])[0]
changed = {Path(name) for name in git("diff", "--name-only", since) + git("ls-files", "--others", "--exclude-standard")}
tests = {Path("tests/test_floors.py")}
for path in changed:
    if path.parts[0] == "tests" and path.stem.startswith("test_"):
        tests.add(path)
    elif path.suffix == ".py":
        name = path.parent.name if path.stem == "__init__" else path.stem
        tests |= {*Path("tests").rglob(f"test_{name}.py"), *Path("tests").rglob(f"test_{name}_*.py")}
print(*sorted(str(test) for test in tests if test.exists()))
