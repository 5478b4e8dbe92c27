"""Change one thing in a module at a time and run the tests nearest to it: a change that no test notices is told.

    python .ci/mutants.py jshard/layouts/layout.py     every change of one module
    python .ci/mutants.py --of 10 jshard/layers ...    a tenth of the changes of each module, another tenth each day

A change that can make no difference is listed in docs/mutants.md by its new line, with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult

ROOT = Path(__file__).parent.parent
EQUAL = ROOT / "docs" / "mutants.md"
# `int | None` is an annotation, which nothing evaluates; of the other operators one replacement each is enough.
LEFT_OUT = re.compile(
    r"core/Replace(BinaryOperator_(BitOr|LShift|RShift|BitXor|BitAnd|Pow|Mod|Div)_\w+"
    r"|BinaryOperator_\w+_(BitOr|LShift|RShift|BitXor|BitAnd|Pow|Mod|Div|FloorDiv)|UnaryOperator_\w+)"
)
CONFIGURATION = """
    [cosmic-ray]
    module-path = "{module}"
    timeout = 300.0
    excluded-modules = []
    test-command = "{python} -m pytest -qx -p no:cacheprovider --within 120 {tests}"
    [cosmic-ray.distributor]
    name = "local"
"""


def survivors(module: str, copy: Path, of: int) -> tuple[int, list[str]]:
    """How many changes of a module were tried, and the differences that no test noticed. Raises if a test fails without."""
    checkout = runpy.run_path(str(copy / ".ci" / "changed.py"))["Checkout"](ROOT)
    tests = " ".join(test for _, test in checkout.tests_of(module))
    words = {"module": module, "python": sys.executable, "tests": tests}
    (copy / "mutants.toml").write_text(textwrap.dedent(CONFIGURATION).format(**words))
    (copy / "mutants.sqlite").unlink(missing_ok=True)
    run(copy, "cosmic-ray", "baseline", "mutants.toml")
    run(copy, "cosmic-ray", "init", "mutants.toml", "mutants.sqlite", "--force")
    with use_db(copy / "mutants.sqlite", WorkDB.Mode.open) as work:
        today = datetime.date.today().toordinal() % of
        kept = [item for item in work.pending_work_items if not LEFT_OUT.match(item.mutations[0].operator_name)][
            today::of
        ]
        left_out = {item.job_id for item in work.pending_work_items} - {item.job_id for item in kept}
        for job in left_out:
            work.set_result(job, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
    run(copy, "cosmic-ray", "exec", "mutants.toml", "mutants.sqlite")
    with use_db(copy / "mutants.sqlite", WorkDB.Mode.open) as work:
        tried = [result for _, result in work.results if result.worker_outcome != WorkerOutcome.SKIPPED]
    return len(tried), [result.diff for result in tried if not result.is_killed]


def run(folder: Path, command: str, *words: str) -> None:
    path = os.pathsep.join([str(folder), str(folder / "tests")])
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": path}
    subprocess.run([Path(sys.executable).with_name(command), *words], cwd=folder, env=environment, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", type=int, default=1, metavar="N", help="one in N of the changes, others each day")
    parser.add_argument("paths", nargs="+", type=Path, help="modules or folders of jshard/")
    asked = parser.parse_args()
    checkout = runpy.run_path(str(ROOT / ".ci" / "changed.py"))["Checkout"](ROOT)
    modules = [
        path
        for path in checkout.paths
        if path.endswith(".py") and any(Path(path).is_relative_to(p) for p in asked.paths)
    ]
    listed = {line.strip().strip("`") for line in EQUAL.read_text().splitlines()}
    count, lost = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for path in checkout.paths:
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, Path(folder) / path)
        subprocess.run(["git", "init", "--quiet", folder], check=True)  # the floors ask git for the files
        for module in modules:
            tried, found = survivors(module, Path(folder), asked.of)
            found = [
                diff
                for diff in found
                if not {line[1:].strip() for line in diff.splitlines() if line[:1] == "+"} & listed
            ]
            print(f"{module}: {tried} changes, {len(found)} unnoticed", *found, sep="\n", flush=True)
            count, lost = count + tried, lost + found
    print(f"{count} changes of {len(modules)} modules, {len(lost)} unnoticed")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
