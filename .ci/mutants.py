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
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
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
    seen, kept = {_meaning(text)}, []
    for each in found:
        line, column = each.start_pos
        said = text.splitlines()[line - 1]
        if LEFT_OUT.match(each.operator_name) or DECORATOR.match(said) or said[:column].endswith(("strict=", "init=")):
            continue
        if each.operator_name == "core/ExceptionReplacer" and "." in said:  # cosmic-ray fails at a name with a dot
            continue
        changed = mutate_code(text, get_operator(each.operator_name)(**each.operator_args), each.occurrence) or text
        if said[column - 1 :].startswith("[0]") and "-" in changed.splitlines()[line - 1][column : column + 2]:
            continue  # `[1]` is tried; the last of one is the first
        with contextlib.suppress(SyntaxError):  # `if not found := ...`
            if (meaning := _meaning(changed)) not in seen and (lines := _statement(text, line)):
                seen.add(meaning)
                kept.append(Change(changed, lines))
    return kept[datetime.date.today().toordinal() % of :: of]


def _statement(text: str, line: int) -> set[int]:
    """Return the lines of the innermost statement around a line; none for an assertion, or in a Protocol."""
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt | ast.excepthandler) and node.lineno <= line <= (node.end_lineno or line)
    ]
    bases = [ast.unparse(base) for node in around if isinstance(node, ast.ClassDef) for base in node.bases]
    last: Any = around[-1] if around else None
    if any("Protocol" in base for base in bases) or isinstance(last, ast.Assert):
        return set()
    body = getattr(last, "body", None)
    return {line, *range(last.lineno, body[0].lineno if body else last.end_lineno + 1)} if last else {line}


def _meaning(text: str) -> str:
    """Return the program of a text, in which `not a == b` is `a != b`."""
    opposite = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn}

    class Plain(ast.NodeTransformer):
        def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
            of = self.generic_visit(node.operand)
            if isinstance(node.op, ast.Not) and isinstance(of, ast.Compare) and type(of.ops[0]) in opposite:
                return ast.Compare(of.left, [opposite[type(of.ops[0])](), *of.ops[1:]], of.comparators)
            return node

    return ast.dump(Plain().visit(ast.parse(text)))


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
        (folder / "coveragerc").write_text(COVERAGE.format(folder))

    def record(self, file: str) -> None:
        """Run a file of tests, and record the lines of jshard/ that each executes, in processes that it starts too."""
        variables = {"COVERAGE_PROCESS_START": f"{self.folder}/coveragerc", "JSHARD_TESTS_FRESH": "1"}
        path = os.pathsep.join([str(self.folder), str(self.folder / ".ci")])
        words = [*PYTEST, "-p", "mutants", "--timeout", "3000", "-m", "not slow or quick or seconds", file]
        environment = {**os.environ, **variables, "PYTHONPATH": path}
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 1, 5), done.stdout  # 5: each test of the file is slow

    def seconds(self) -> dict[str, float | None]:
        """Return how long each test took; None for one that failed."""
        seen = self.folder / "seen" / "seconds"
        return dict(json.loads(line) for line in seen.read_text().splitlines()) if seen.exists() else {}

    def lines(self, modules: list[str]) -> dict[str, dict[int, set[str]]]:
        """Return, by module and line, the tests that execute the line; `""` is an import."""
        from coverage import CoverageData

        found: dict[str, dict[int, set[str]]] = {module: {} for module in modules}
        for path in (self.folder / "seen").glob("lines.*"):
            data = CoverageData(str(path))
            data.read()
            for module in modules:
                for line, tests in data.contexts_by_lineno(str(self.folder / module)).items():
                    found[module].setdefault(line, set()).update(re.sub(r" \(\w+\)$", "", test) for test in tests)
        return found

    def notices(self, module: str, text: str, tests: list[str], within: float) -> str | None:
        """Return the test that notices a module's other text."""
        original = (self.folder / module).read_text()
        (self.folder / module).write_text(text)
        try:
            groups = [group for group in (tests[:12], tests[12:400]) if group]
            return next(filter(None, (self._try(group, within) for group in groups)), None)
        finally:
            (self.folder / module).write_text(original)

    def _try(self, tests: list[str], within: float) -> str | None:
        words = [*PYTEST, "-x", "-rfE", "--within", str(within), *tests]
        try:  # by a fork of a process that has imported JAX
            done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return "a test that waits for ever"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return (failed[1] if failed else "at import") if done.returncode else None


def listed() -> dict[str, set[str]]:
    """Return the changes that make no difference, by module: the new line of each."""
    found: dict[str, set[str]] = {}
    for part in (ROOT / ".ci" / "mutants.txt").read_text().split("\n[")[1:]:
        module, *lines = part.splitlines()
        found[module.rstrip("]")] = {line.strip() for line in lines if line.startswith("    ")}
    return found


def difference(old: str, new: str) -> list[str]:
    return [*difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)][2:]


def tried(module: str, near: list[str], asked: argparse.Namespace, copies: list[Copy]) -> Iterator[tuple[str, str]]:
    """Yield, of each change of a module, how it ended and its difference."""
    text, equal = (ROOT / module).read_text(), listed().get(module, set())
    seconds = {test: time for copy in copies for test, time in copy.seconds().items()}
    executed: dict[int, set[str]] = {}
    for copy in copies:
        for line, tests in copy.lines([module])[module].items():
            executed.setdefault(line, set()).update(tests)
    noticed, own = Counter[str](), threading.local()
    free = iter(copies)

    def attempt(change: Change) -> tuple[str, str]:
        own.copy = getattr(own, "copy", None) or next(free)
        tests = set().union(*(executed.get(line, ()) for line in change.lines))
        if "" in tests:
            tests.update(*executed.values())
        able = [test for test in tests if seconds.get(test) is not None and test.split("::")[0] in near]
        able.sort(key=lambda test: (seconds[test] or 0) / (1 + noticed[test]))
        told = difference(text, change.text)
        is_equal = not equal.isdisjoint(line[1:].strip() for line in told if line[:1] == "+")
        for within in (asked.within,) if is_equal else (asked.within, 10 * asked.within):
            if able and (by := own.copy.notices(module, change.text, able, within)):
                noticed[by] += 1
                return "killed", "\n".join(told)
        return "equal" if is_equal else "surviving", "\n".join(told)

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(attempt, changes(ROOT / module, asked.of))


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
    modules = [path for path in checkout.paths if path.endswith(".py")]
    modules = [path for path in modules if any(Path(path).is_relative_to(each) for each in asked.paths)]
    near = {module: asked.tests + [test for _, test in checkout.tests_of(module)[: asked.files]] for module in modules}
    forked: Any = runpy.run_path(str(ROOT / "tests" / "forked.py"), run_name="forked")
    subprocess.Popen = forked["Popen"]
    total, failing = Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        copies = [Copy(Path(folder, str(number)), checkout.paths) for number in range(os.cpu_count() or 1)]
        with ThreadPoolExecutor(len(copies)) as pool:
            files = sorted({test for tests in near.values() for test in tests} - {"tests/test_floors.py"})
            [*pool.map(lambda at: copies[at[0] % len(copies)].record(at[1]), enumerate(files))]
        for copy in copies:
            for test in [test for test, time in copy.seconds().items() if time is None]:
                failing += print(f"{test} fails without a change", flush=True) is None
        for module in modules:
            ends: Counter[str] = Counter()
            listed_here = set(listed().get(module, ()))
            for end, told in tried(module, near[module], asked, copies):
                ends[end] += 1
                if end == "equal":
                    listed_here -= {line[1:].strip() for line in told.splitlines()}
                if end == "surviving":
                    print(told, flush=True)
            total += ends
            print(f"{module}: {dict(ends)}", flush=True)
            for line in listed_here if asked.of == 1 else ():
                failing += 1
                print(f".ci/mutants.txt lists for {module} what is noticed, or no change of it: {line}", flush=True)
    print(f"{len(modules)} modules, {total.total()} changes: {dict(total)}")
    return int(bool(total["surviving"] or failing))


if __name__ == "__main__":
    sys.exit(main())
