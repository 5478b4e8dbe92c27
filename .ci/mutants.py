"""Change one thing in a module at a time and run the tests that execute its line: a change that no test notices is printed.

    make mutants                                                            a tenth of all changes, another tenth each day
    JSHARD_MUTANTS=jshard/layouts/layout.py JSHARD_MUTANTS_OF=1 make mutants    every change of one module

cosmic-ray makes the changes, and coverage.py records which test executes which line. `.ci/mutants.txt` lists the changes that
can make no difference.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import difflib
import json
import os
import queue
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
# Nothing evaluates `int | None`, an annotation. One replacement of any other operator is enough. A test that notices `<` and
# `!=` in the place of `<=` holds both ends; an `is` in the place of `==` depends on what Python keeps twice.
LEFT_OUT = re.compile(
    r"core/Replace(BinaryOperator_(BitOr|LShift|RShift|BitXor|BitAnd|Pow|Mod|Div)_\w+"
    r"|BinaryOperator_\w+_(BitOr|LShift|RShift|BitXor|BitAnd|Pow|Mod|Div|FloorDiv)|UnaryOperator_\w+"
    r"|ComparisonOperator_(?!Eq_(NotEq|LtE|GtE)$|NotEq_(Eq|Lt|Gt)$|LtE?_(Lt|LtE|NotEq)$|GtE?_(Gt|GtE|NotEq)$|Is_IsNot$|IsNot_Is$)\w+)"
)
# `not a == b` is `a != b`, and cosmic-ray fails at an exception with a dot in its name.
ONCE = {"core/AddNot": " (==|!=|is) ", "core/ExceptionReplacer": r"\."}
# A cache saves time alone; the options of a dataclass are for readers, an overload for type checkers.
DECORATOR = re.compile(r"\w+ = functools\.lru_cache\(|\s*@(functools\.(lru_)?cache|dataclasses\.dataclass|overload)\b")
LIMIT = 300  # seconds; a change that makes a test wait for ever is noticed
COVERAGE = (
    "[run]\nsource = {0}/jshard\nparallel = true\ndata_file = {0}/seen/lines\ncontext = ${{PYTEST_CURRENT_TEST-}}\n"
)
PYTEST = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]


class Change(NamedTuple):
    text: str
    lines: set[int]  # of the statement, without its body


def changes(file: Path, of: int) -> list[Change]:
    """Return a module's texts with one thing changed: one in `of` of all changes, others each day."""
    from cosmic_ray.commands import init
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator
    from cosmic_ray.work_db import WorkDB, use_db

    with tempfile.TemporaryDirectory() as folder, use_db(Path(folder, "all.sqlite"), WorkDB.Mode.create) as work:
        init([file], work, {})
        found = sorted((item.mutations[0] for item in work.work_items), key=lambda each: each.start_pos)
    text = file.read_text()
    seen, kept = {ast.dump(ast.parse(text))}, []
    for each in found:
        line, column = each.start_pos
        said = text.splitlines()[line - 1]
        if LEFT_OUT.match(each.operator_name) or DECORATOR.match(said) or said[:column].endswith(("strict=", "init=")):
            continue
        if (word := ONCE.get(each.operator_name)) and re.search(word, said):
            continue
        changed = mutate_code(text, get_operator(each.operator_name)(**each.operator_args), each.occurrence) or text
        if said[column - 1 :].startswith("[0]") and "-" in changed.splitlines()[line - 1][column : column + 2]:
            continue  # `[1]` is tried; the last of one is the first
        with contextlib.suppress(SyntaxError):  # `if not found := ...`
            meaning = ast.dump(ast.parse(changed))
            if meaning not in seen and (lines := _statement(text, line)):
                seen.add(meaning)
                kept.append(Change(changed, lines))
    return kept[datetime.date.today().toordinal() % of :: of]


def _statement(text: str, line: int) -> set[int]:
    """Return the lines of the innermost statement around a line; none for an assertion."""
    around: list[Any] = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt | ast.excepthandler) and node.lineno <= line <= (node.end_lineno or line)
    ]
    if not around or isinstance(around[-1], ast.Assert):
        return set()
    body = getattr(around[-1], "body", None)
    return {line, *range(around[-1].lineno, body[0].lineno if body else around[-1].end_lineno + 1)}


# Hooks of pytest, for which this file is a plugin while lines are recorded.
def pytest_runtest_logstart(nodeid: str) -> None:
    import coverage

    coverage.Coverage.current().switch_context(nodeid)  # type: ignore[union-attr]


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.failed:
        with (ROOT / "seen" / "seconds").open("a") as file:
            file.write(json.dumps([report.nodeid, report.duration if report.passed else None]) + "\n")


class Copy:
    """A copy of the checkout in which one change is tried at a time."""

    def __init__(self, folder: Path, paths: list[str]):
        self.folder = folder
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
        subprocess.run(["git", "init", "--quiet", folder], check=True)  # the floors ask git for the files
        (folder / "seen").mkdir()
        (folder / "seen" / "seconds").touch()
        (folder / "coveragerc").write_text(COVERAGE.format(folder))

    def record(self, file: str) -> None:
        """Run a file of tests, and record the lines of jshard/ that each executes, in processes that it starts too."""
        path = os.pathsep.join([str(self.folder), str(self.folder / ".ci")])
        variables = {
            "COVERAGE_PROCESS_START": f"{self.folder}/coveragerc",
            "JSHARD_TESTS_FRESH": "1",
            "PYTHONPATH": path,
        }
        words = [*PYTEST, "-p", "mutants", "--timeout", "3000", "-m", "not slow or quick or seconds", file]
        done = subprocess.run(words, cwd=self.folder, env={**os.environ, **variables}, capture_output=True, text=True)
        assert done.returncode in (0, 1, 5), done.stdout  # 5: each test of the file is slow

    def notices(self, module: str, text: str, tests: list[str], within: float) -> str | None:
        """Return the test that notices a module's other text."""
        original = (self.folder / module).read_text()
        (self.folder / module).write_text(text)
        words = [*PYTEST, "-x", "-rfE", "--within", str(within), *tests]
        try:  # by a fork of a process that has imported JAX
            done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return "a test that waits for ever"
        finally:
            (self.folder / module).write_text(original)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return (failed[1] if failed else "at import") if done.returncode else None


class Tests:
    """The tests near to each module: how long each takes, None for one that fails, and the lines that it executes."""

    def __init__(self, copies: list[Copy], near: dict[str, list[str]]):
        from coverage import CoverageData

        self.near, self.copies = near, queue.SimpleQueue[Copy]()
        self.seconds: dict[str, float | None] = {}
        self.of_line: dict[str, dict[int, set[str]]] = {module: {} for module in near}
        for copy in copies:
            self.copies.put(copy)
        files = {test for tests in near.values() for test in tests} - {"tests/test_floors.py"}
        with ThreadPoolExecutor(len(copies)) as pool:
            [*pool.map(lambda file: self.within(Copy.record, file), sorted(files))]
        for copy in copies:
            lines = (copy.folder / "seen" / "seconds").read_text().splitlines()
            self.seconds |= dict(json.loads(line) for line in lines)
            for path in (copy.folder / "seen").glob("lines.*"):
                data = CoverageData(str(path))
                data.read()
                for module, found in self.of_line.items():
                    for line, tests in data.contexts_by_lineno(str(copy.folder / module)).items():
                        found.setdefault(line, set()).update(re.sub(r" \(\w+\)$", "", test) for test in tests)

    def within(self, method: Any, *arguments: Any) -> Any:
        """Call a method of a copy that is free."""
        copy = self.copies.get()
        try:
            return method(copy, *arguments)
        finally:
            self.copies.put(copy)

    def able(self, module: str, lines: set[int], noticed: Counter[str]) -> list[str]:
        """Return the tests that execute a line, the most promising first; of a line of an import, those of the module."""
        executed = self.of_line[module]
        tests = set[str]().union(*(executed.get(line, ()) for line in lines))
        tests = tests.union(*executed.values()) if "" in tests else tests
        near = {test: self.seconds.get(test) for test in tests if test.split("::")[0] in self.near[module]}
        return sorted(filter(near.get, near), key=lambda test: (near[test] or 0) / (1 + noticed[test]))


def listed() -> dict[str, set[str]]:
    """Return the changes that make no difference, by module: the new line of each."""
    found: dict[str, set[str]] = {}
    for part in (ROOT / ".ci" / "mutants.txt").read_text().split("\n[")[1:]:
        module, *lines = part.splitlines()
        found[module.rstrip("]")] = {line.strip() for line in lines if line.startswith("    ")}
    return found


def tried(module: str, tests: Tests, of: int, within: float) -> Counter[str]:
    """Try changes of a module, print those that no test notices, and count how they end."""
    text, equal, met = (ROOT / module).read_text(), listed().get(module, set()), set[str]()
    noticed = Counter[str]()

    def attempt(change: Change) -> str:
        told = [*difflib.unified_diff(text.splitlines(), change.text.splitlines(), lineterm="", n=0)][2:]
        as_listed = equal & {line[1:].strip() for line in told if line[:1] == "+"}
        able = tests.able(module, change.lines, noticed)
        for some, seconds in (able[:12], within), (able[12:400], within if as_listed else 10 * within):
            if some and (by := tests.within(Copy.notices, module, change.text, some, seconds)):
                noticed[by] += 1
                return "killed"
        met.update(as_listed)
        if not as_listed:
            print(*told, sep="\n", flush=True)
        return "equal" if as_listed else "surviving"

    with ThreadPoolExecutor(tests.copies.qsize()) as pool:
        ends = Counter(pool.map(attempt, changes(ROOT / module, of)))
    if of == 1 and (gone := equal - met):
        ends["wrongly listed"] = len(gone)
        print(f".ci/mutants.txt lists for {module} what is noticed, or no change of it:", *gone, sep="\n", flush=True)
    print(f"{module}: {dict(ends)}", flush=True)
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", type=int, default=1, metavar="N", help="one in N of the changes, others each day")
    parser.add_argument("--files", type=int, default=8, metavar="N", help="files of tests for each module, the nearest")
    parser.add_argument("--tests", nargs="*", default=[], metavar="FILE", help="further files of tests")
    parser.add_argument(
        "--within", type=float, default=12, metavar="S", help="seconds of tests for a change, then 10 S"
    )
    parser.add_argument("paths", nargs="*", help="modules or folders of jshard/")
    asked = parser.parse_args()
    checkout: Any = runpy.run_path(str(ROOT / ".ci" / "changed.py"))["Checkout"](ROOT)
    forked: Any = runpy.run_path(str(ROOT / "tests" / "support" / "forked.py"), run_name="forked")
    modules = [path for path in checkout.paths if path.endswith(".py")]
    modules = [path for path in modules if any(Path(path).is_relative_to(each) for each in asked.paths)]
    near = {module: asked.tests + [test for _, test in checkout.tests_of(module)[: asked.files]] for module in modules}
    with tempfile.TemporaryDirectory() as folder:
        tests = Tests([Copy(Path(folder, f"{n}"), checkout.paths) for n in range(os.cpu_count() or 1)], near)
        failing = [test for test, time in tests.seconds.items() if time is None]
        print(*(f"{test} fails without a change" for test in failing), sep="\n", flush=True)
        subprocess.Popen = forked["Popen"]
        total = sum((tried(module, tests, asked.of, asked.within) for module in modules), Counter[str]())
    print(f"{len(modules)} modules, {total.total()} changes: {dict(total)}")
    return int(bool(failing or total.keys() - {"killed", "equal"}))


if __name__ == "__main__":
    sys.exit(main())
