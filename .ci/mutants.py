"""Change one thing in a module at a time and run the tests nearest to it: a change that no test notices is told.

    make mutants                                                            a tenth of all changes, another tenth each day
    JSHARD_MUTANTS=jshard/layouts/layout.py JSHARD_MUTANTS_OF=1 make mutants    every change of one module

cosmic-ray makes the changes. One that can make no difference is listed in docs/mutants.md by its new line, with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import importlib
import json
import os
import queue
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EQUAL = ROOT / "docs" / "mutants.md"
# `int | None` is an annotation, which nothing evaluates; of the other operators one replacement each is enough.
LEFT_OUT = re.compile(
    r"core/Replace(BinaryOperator_(BitOr|LShift|RShift|BitXor|BitAnd|Pow|Mod|Div)_\w+"
    r"|BinaryOperator_\w+_(BitOr|LShift|RShift|BitXor|BitAnd|Pow|Mod|Div|FloorDiv)|UnaryOperator_\w+)"
)
TIMEOUT = 300.0  # seconds; a change that makes a test wait for ever is noticed


def changes(module: str, of: int) -> Iterator[str]:
    """Yield the text of a module with one thing changed: one in `of` of all changes, others each day."""
    from cosmic_ray.commands import init
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator
    from cosmic_ray.work_db import WorkDB, use_db

    text = (ROOT / module).read_text()
    with tempfile.TemporaryDirectory() as folder, use_db(Path(folder, "all.sqlite"), WorkDB.Mode.create) as work:
        init([ROOT / module], work, {})
        all_of_them = [item.mutations[0] for item in work.work_items]
    kept = [each for each in all_of_them if not LEFT_OUT.match(each.operator_name)]
    for each in kept[datetime.date.today().toordinal() % of :: of]:
        changed = mutate_code(text, get_operator(each.operator_name)(**each.operator_args), each.occurrence)
        if changed is not None:
            yield changed


class Copy:
    """A copy of the checkout, and a process that runs its tests."""

    def __init__(self, folder: Path, paths: list[str]):
        self.folder = folder
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
        subprocess.run(["git", "init", "--quiet", folder], check=True)  # the floors ask git for the files
        variables = {
            "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "tests")]),
            # Two changes within a second can have one size: Python would take the bytecode of the first for the second.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.server = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            cwd=folder, env={**os.environ, **variables}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def passes(self, tests: list[str], module: str, text: str) -> bool:
        assert self.server.stdin is not None and self.server.stdout is not None
        path = self.folder / module
        original = path.read_text()
        path.write_text(text)
        self.server.stdin.write(json.dumps(["-qx", "-p", "no:cacheprovider", "--within", "120", *tests]) + "\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        path.write_text(original)
        return answer == "0\n"


def serve() -> None:
    """Run pytest in a fork for each line on stdin, and print its status: JAX, Flax and pytest are imported once."""
    for name in ("compiled_before", "jax", "flax.nnx", "optax", "hypothesis"):  # the first tells JAX how to compile
        importlib.import_module(name)
    import pytest

    warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of a fork; it has not started here
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nowhere, stream)
            os._exit(pytest.main(json.loads(line)))
        until = time.monotonic() + TIMEOUT
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL) if not ended[0] else None
        print(os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(child, 0)[1]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", type=int, default=1, metavar="N", help="one in N of the changes, others each day")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", type=Path, help="modules or folders of jshard/")
    asked = parser.parse_args()
    if asked.serve:
        serve()
        return 0
    checkout: Any = runpy.run_path(str(ROOT / ".ci" / "changed.py"))["Checkout"](ROOT)
    modules = [
        path
        for path in checkout.paths
        if path.endswith(".py") and any(Path(path).is_relative_to(p) for p in asked.paths)
    ]
    listed = {line.strip().strip("`") for line in EQUAL.read_text().splitlines()}
    waiting: queue.SimpleQueue[tuple[str, list[str], str]] = queue.SimpleQueue()
    originals = {module: (ROOT / module).read_text() for module in modules}  # the checkout may change meanwhile
    tried, lost, failed = dict.fromkeys(modules, 0), [], []

    def try_changes(copy: Copy) -> None:
        while not waiting.empty():
            try:
                module, tests, text = waiting.get_nowait()
            except queue.Empty:
                return
            original = originals[module]
            passes = copy.passes(tests, module, text)
            if text == original:
                failed.extend([] if passes else [module])
                continue
            diff = [*difflib.unified_diff(original.splitlines(), text.splitlines(), module, module, lineterm="", n=1)]
            tried[module] += 1
            if passes and not {line[1:].strip() for line in diff[2:] if line[:1] == "+"} & listed:
                lost.append(diff)
                print(*diff, sep="\n", flush=True)

    for module in modules:
        tests = [test for _, test in checkout.tests_of(module)]
        for text in [originals[module], *changes(module, asked.of)]:
            waiting.put((module, tests, text))
    print(f"{waiting.qsize() - len(modules)} changes of {len(modules)} modules", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copies = [Copy(Path(folder, str(number)), checkout.paths) for number in range(os.cpu_count() or 1)]
        threads = [threading.Thread(target=try_changes, args=(copy,)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for copy in copies:
            copy.server.kill()
            copy.server.wait()
    for module in failed:
        print(f"the tests of {module} fail without a change")
    print(f"{sum(tried.values())} changes of {len(modules)} modules, {len(lost)} unnoticed")
    return int(bool(lost or failed))


if __name__ == "__main__":
    sys.exit(main())
