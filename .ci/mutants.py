"""Change one thing in a module at a time and run the tests nearest to it: a change that no test notices is told.

    make mutants                                                            a tenth of all changes, another tenth each day
    JSHARD_MUTANTS=jshard/layouts/layout.py JSHARD_MUTANTS_OF=1 make mutants    every change of one module

cosmic-ray makes the changes. Each test is run once without a change, to see which lines it executes; a change is then tried
by those that execute its line. One that can make no difference is listed in docs/mutants.md by its new line, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import difflib
import fcntl
import gc
import hashlib
import importlib
import inspect
import json
import os
import queue
import random
import re
import resource
import runpy
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
EQUAL = ROOT / "docs" / "mutants.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jshard-mutants")
# `int | None` is an annotation, which nothing evaluates; of other operators one replacement each is enough. A test that
# notices `<` and `!=` in the place of `<=` has both of its ends; an `is` in the place of `==` asks what Python keeps twice;
# `[1]` in the place of `[0]` is the last of two, and of one there is no other.
LEFT_OUT = re.compile(
    r"core/Replace(BinaryOperator_(BitOr|LShift|RShift|BitXor|BitAnd|Pow|Mod|Div)_\w+"
    r"|BinaryOperator_\w+_(BitOr|LShift|RShift|BitXor|BitAnd|Pow|Mod|Div|FloorDiv)|UnaryOperator_\w+"
    r"|ComparisonOperator_(?!Eq_(NotEq|LtE|GtE)$|NotEq_(Eq|Lt|Gt)$|LtE?_(Lt|LtE|NotEq)$|GtE?_(Gt|GtE|NotEq)$|Is_IsNot$|IsNot_Is$)\w+)"
)
# Without a cache a program takes longer. That nobody assigns to a field, or gives it to `__init__`, and that two are as long as
# each other (`strict=True`), is said to the reader, as by an assertion; an overload, to type checkers.
DECORATOR = re.compile(r"\w+ = functools\.lru_cache\(|\s*@(functools\.(lru_)?cache|dataclasses\.dataclass|overload)\b")
LIMIT = 300.0  # seconds; a change that makes a test wait for ever is noticed
LONGER = 10  # times as long for what the quick have not noticed, before it is told
ELSEWHERE = 77  # the status of a process that can't make the change in place


class Change(NamedTuple):
    module: str
    text: str
    at: int  # the lines of the statement that was changed, and those that use the name that it gives a value, each a bit


def changes(module: str, text: str, of: int) -> Iterator[Change]:
    """Yield a module with one thing changed: one in `of` of all changes, others each day."""
    from cosmic_ray.commands import init
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator
    from cosmic_ray.work_db import WorkDB, use_db

    with tempfile.TemporaryDirectory() as folder, use_db(Path(folder, "all.sqlite"), WorkDB.Mode.create) as work:
        file = Path(folder, Path(module).name)
        file.write_text(text)  # the checkout may change meanwhile
        init([file], work, {})
        found = sorted((item.mutations[0] for item in work.work_items), key=lambda each: each.start_pos)
    tree = ast.parse(text)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.excepthandler)]
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    seen, kept = {_meaning(text)}, []
    for each in found:
        line, column = each.start_pos
        said = text.splitlines()[line - 1]
        if LEFT_OUT.match(each.operator_name) or DECORATOR.match(said) or said[:column].endswith(("strict=", "init=")):
            continue
        if each.operator_name == "core/ExceptionReplacer" and "." in said:  # cosmic-ray fails at a name with a dot
            continue
        changed = mutate_code(text, get_operator(each.operator_name)(**each.operator_args), each.occurrence)
        if (
            said[column - 1 :].startswith("[0]")
            and "-" in (changed or text).splitlines()[line - 1][column : column + 2]
        ):
            continue
        try:
            meaning = _meaning(changed or text)
        except SyntaxError:  # `if not found := ...`
            continue
        if changed is not None and meaning not in seen:
            seen.add(meaning)
            around = [node for node in statements if node.lineno <= line <= (node.end_lineno or line)]
            around.sort(key=lambda node: (node.lineno, node.col_offset))
            bases = [base for node in around if isinstance(node, ast.ClassDef) for base in node.bases]
            if any("Protocol" in ast.unparse(base) for base in bases) or isinstance((around or [None])[-1], ast.Assert):
                continue  # for type checkers; and what always holds
            lines = {*(_head(around[-1]) if around else [line])}
            given = {node.id for node in names if node.lineno in lines and around[-1:] == around[:1]}
            lines |= {node.lineno for node in names if node.id in given}
            kept.append(Change(module, changed, _bits(lines)))
    yield from kept[datetime.date.today().toordinal() % of :: of]


def _head(statement: Any) -> range:
    """The lines of a statement, without those of its body."""
    body = getattr(statement, "body", None)
    return range(statement.lineno, max(body[0].lineno if body else statement.end_lineno + 1, statement.lineno + 1))


def _meaning(text: str) -> str:
    """The program of a text, in which `not a == b` is `a != b`: those of texts that mean the same are equal."""
    opposite = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn}

    class Plain(ast.NodeTransformer):
        def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
            of = self.generic_visit(node.operand)
            if isinstance(node.op, ast.Not) and isinstance(of, ast.Compare) and type(of.ops[0]) in opposite:
                return ast.Compare(of.left, [opposite[type(of.ops[0])](), *of.ops[1:]], of.comparators)
            return node

    return ast.dump(Plain().visit(ast.parse(text)))


class Copy:
    """A copy of the checkout, where it was the last time too: what is compiled there is found by the names of its files."""

    def __init__(self, number: int, paths: list[str], files: list[str]):
        self.folder, self.written = CACHE / str(number), random.randrange(2**30)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = (CACHE / f"{number}.lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        for path in {path.relative_to(self.folder) for path in self.folder.rglob("*.*")} - {*map(Path, paths)}:
            if path.suffix == ".py":
                (self.folder / path).unlink()
        for path in paths:
            there = self.folder / path
            if not there.exists() or there.read_bytes() != (ROOT / path).read_bytes():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, there)
        (self.folder / "sitecustomize.py").write_text(
            "import os, runpy\nif 'JSHARD_LINES' in os.environ:\n"
            f"    runpy.run_path({str(self.folder / '.ci' / 'mutants.py')!r})['trace'](os.environ['JSHARD_LINES'])\n"
        )
        subprocess.run(["git", "init", "--quiet", self.folder], check=True)  # the floors ask git for the files
        self.collected, self.bare = self._server(files), self._server([])
        self.at_import = self.lines(Path(f"{self.folder}.import")).get("", {})

    def _server(self, files: list[str]) -> subprocess.Popen[str]:
        variables = {
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(self.folder / "tests")]),
            "XDG_CACHE_HOME": str(CACHE),
        }
        server = subprocess.Popen(
            [sys.executable, ".ci/mutants.py", "--serve", f"{self.folder}.import", *files],
            cwd=self.folder, env={**os.environ, **variables}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert server.stdout is not None
        self.tests = json.loads(server.stdout.readline()) or self.__dict__.get("tests", [])
        return server

    def lines(self, path: Path) -> dict[str, dict[str, int]]:
        """By test and module, the lines that were executed, each a bit; and under "seconds" the milliseconds it took."""
        found: dict[str, dict[str, int]] = {}
        test = ""
        for place in path.read_text().splitlines() if path.exists() else ():
            name, _, number = place.rpartition(":")
            if place.startswith("#"):
                test = place[1:]
            elif name in ("ms", "failed"):
                found.setdefault(test, {})[name] = int(number)
            else:
                module = str(Path(name).relative_to(self.folder))
                lines = found.setdefault(test, {})
                lines[module] = lines.get(module, 0) | 1 << int(number)
        return found

    def trace(self, file: str) -> dict[str, dict[str, int]]:
        path, tests = Path(f"{self.folder}.lines"), [test for test in self.tests if test.split("::")[0] == file]
        path.unlink(missing_ok=True)
        self._ask(self.collected, {"tests": tests, "lines": str(path), "limit": 3000, "within": 150})
        return self.lines(path)

    def notices(self, change: Change, tests: list[str], within: float) -> str | None:
        """The test that notices a change, which is made in place if it is within functions."""
        path = self.folder / change.module
        original = path.read_text()
        self._write(path, change.text)
        asked = {"limit": LIMIT, "within": within}
        changed = {"module": change.module, "original": original, "text": change.text}
        status, test = self._ask(self.collected, {"tests": tests, **asked, **changed})
        anew = status == ELSEWHERE or (status == 0 and change.at & self.at_import.get(change.module, 0))
        for some in [tests[:12], tests[12:400]] if anew else []:
            status, test = self._ask(self.bare, {"tests": some, **asked}) if some else (0, "")
            if status:
                break
        self._write(path, original)
        return (test or "at import") if status else None

    def _write(self, path: Path, text: str) -> None:
        """Bytecode is valid for a second and a size: each text has a second of its own."""
        self.written += 1
        path.write_text(text)
        os.utime(path, (self.written, self.written))

    def _ask(self, server: subprocess.Popen[str], command: dict[str, Any]) -> tuple[int, str]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(command) + "\n")
        server.stdin.flush()
        return tuple(json.loads(server.stdout.readline()))


def trace(path: str) -> Any:
    """Write each line of jshard/ that this process executes, once after each call of what is returned."""
    out, seen, inside = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), set(), str(ROOT / "jshard") + os.sep

    def line(frame: Any, event: str, _: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in seen:
            seen.add(place)
            os.write(out, f"{place[0]}:{place[1]}\n".encode())
        return line

    def call(frame: Any, event: str, _: Any) -> Any:
        return line(frame, event, _) if frame.f_code.co_filename.startswith(inside) else None

    def note(text: str) -> None:
        seen.clear()
        os.write(out, f"{text}\n".encode())

    sys.settrace(call)
    threading.settrace(call)
    return note


def swap(functions: dict[Any, list[types.FunctionType]], path: str, original: str, text: str) -> bool:
    """Give functions that were imported the code that they have in another text. Is that all that differs?"""

    def pairs(old: types.CodeType, new: types.CodeType, inside: bool = False) -> Iterator[tuple[Any, Any, bool]]:
        inner = [[each for each in code.co_consts if isinstance(each, types.CodeType)] for code in (old, new)]
        plain = [
            code.replace(co_consts=tuple(None if isinstance(each, types.CodeType) else each for each in code.co_consts))
            for code in (old, new)
        ]
        if not inside and (plain[0] != plain[1] or len(inner[0]) != len(inner[1])):
            raise LookupError
        for a, b in zip(*inner, strict=False):
            is_function = bool(a.co_flags & inspect.CO_NEWLOCALS)
            if a != b and is_function:
                yield a, b, inside
            if a != b:
                yield from pairs(a, b, inside or is_function)

    try:
        for old, new, inside in pairs(*(compile(each, path, "exec", dont_inherit=True) for each in (original, text))):
            for function in functions.get((path, old), []) if inside else functions[path, old]:
                function.__code__ = new
    except (LookupError, ValueError):  # outside of functions; or a closure, which takes no code with other variables
        return False
    return True


class Server:
    """Runs tests in a fork for each line on stdin; what is imported and collected is so once."""

    def __init__(self) -> None:
        self.asked, self.answers, self.running = os.fdopen(os.dup(0)), os.dup(1), -1
        self.note: Any = None
        self.within, self.first = 0.0, 0.0
        for stream in (0, 1):  # pytest's own
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)

    def tell(self, answer: Any) -> None:
        os.write(self.answers, (json.dumps(answer) + "\n").encode())

    def commands(self) -> Iterator[dict[str, Any]]:
        """Yield, each in a process of its own, what is asked for; end in the first process."""
        for text in self.asked:
            command = json.loads(text)
            running = tempfile.TemporaryFile()  # a pipe would be full after some hundred names
            self.running = running.fileno()
            child = os.fork()
            if not child:
                self.within = command["within"]
                os.setpgid(0, 0)
                os.dup2(os.open(os.devnull, os.O_RDWR), 2)
                yield command
                os._exit(1)
            until = time.monotonic() + command["limit"]
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
                time.sleep(0.005)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            status = ended[1] if ended[0] else os.waitpid(child, 0)[1]
            running.seek(0)
            self.tell([os.waitstatus_to_exitcode(status), running.read().decode().split("\n")[-1]])
            running.close()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.began = sum(os.times()[:4])
        if self.note:
            self.note("#" + nodeid)
        else:
            os.write(self.running, ("\n" + nodeid).encode())
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 30, -1))

    def pytest_runtest_setup(self) -> None:
        self.first = self.first or self.began
        if sum(os.times()[:4]) > self.first + self.within:
            importlib.import_module("pytest").skip("that was enough")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self.note and report.when == "call" and report.passed:
            self.note(f"ms:{1 + int(1000 * (sum(os.times()[:4]) - self.began))}")
        elif self.note and report.failed:
            self.note("failed:1")


def serve(place: str, files: list[str]) -> None:
    for name in ("compiled_before", "jax", "flax.nnx", "optax", "hypothesis"):  # the first tells JAX how to compile
        importlib.import_module(name)
    import jax
    import pytest
    from jax._src import xla_bridge

    class Collected(Server):
        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if xla_bridge._backends:
                os.write(2, f"{report.nodeid} makes an array while it is imported; make it by numpy\n".encode())
                os._exit(1)

        @pytest.hookimpl(wrapper=True)
        def pytest_runtestloop(self, session: pytest.Session) -> Any:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            jax.devices = devices
            session.items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
            items = {item.nodeid: item for item in session.items}
            functions: dict[Any, list[types.FunctionType]] = {}
            gc.unfreeze()
            for each in gc.get_objects():
                if type(each) is types.FunctionType:
                    functions.setdefault((each.__code__.co_filename, each.__code__), []).append(each)
            gc.freeze()
            self.tell(list(items))
            session.items = []
            for command in self.commands():
                path = str(ROOT / command.get("module", ""))
                if "text" in command and not swap(functions, path, command["original"], command["text"]):
                    os._exit(ELSEWHERE)
                if "lines" in command:
                    os.environ |= {"JSHARD_LINES": command["lines"], "JSHARD_TESTS_FRESH": "1"}  # forks aren't seen
                    self.note = trace(command["lines"])
                    session.config.option.maxfail = 0
                session.items = [items[test] for test in command["tests"]]
                session.testscollected = len(session.items)
                with contextlib.suppress(session.Failed, session.Interrupted):
                    yield
                os._exit(bool(session.testsfailed))
            return (yield)

    warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of a fork; it has not started here
    options = ["-qx", "--tb=no", "--within", "1e9", "-p", "no:cacheprovider", f"--basetemp={ROOT}.tmp"]
    if files:
        devices, jax.devices = jax.devices, lambda *_: range(8)  # a process in which devices are can't be forked
        trace(place)
        pytest.main([*options, "-m", "not slow or quick or seconds", *files], plugins=[Collected()])
        return
    server = Server()
    server.tell([])
    for command in server.commands():
        os._exit(pytest.main([*options, *command["tests"]], plugins=[server]))


def _bits(lines: Iterable[int]) -> int:
    return sum(1 << line for line in lines)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


class Memory:
    """What was found before: a run that was broken off goes on."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.file.execute("create table if not exists found (key text primary key, value text)")

    def get(self, key: str) -> Any:
        row = self.file.execute("select value from found where key = ?", (key,)).fetchone()
        return row and json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        self.file.execute("replace into found values (?, ?)", (key, json.dumps(value)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", type=int, default=1, metavar="N", help="one in N of the changes, others each day")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="how many at a time")
    parser.add_argument("--files", type=int, default=8, metavar="N", help="files of tests for each module, the nearest")
    parser.add_argument("--tests", nargs="*", default=[], metavar="FILE", help="further files of tests")
    parser.add_argument(
        "--within",
        type=float,
        default=8,
        metavar="S",
        help="seconds of tests for a change; ten times that if these pass",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help="modules or folders of jshard/")
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, asked.paths)
        return 0
    checkout: Any = runpy.run_path(str(ROOT / ".ci" / "changed.py"))["Checkout"](ROOT)
    modules = [
        path
        for path in checkout.paths
        if path.endswith(".py") and any(Path(path).is_relative_to(p) for p in asked.paths)
    ]
    product = [path for path in checkout.paths if Path(path).is_relative_to("jshard") and path.endswith(".py")]
    texts = {path: (ROOT / path).read_text() for path in [*product, *checkout.tests]}
    further = dict.fromkeys(asked.tests, 0.5)
    near = {
        module: further | {test: share for share, test in checkout.tests_of(module)[: asked.files]}
        for module in modules
    }
    equal = listed()
    memory = Memory(CACHE / "found.sqlite")
    files = sorted({test for module in modules for test in near[module]} - {"tests/test_floors.py"})

    def difference(change: Change) -> list[str]:
        old, new = texts[change.module].splitlines(), change.text.splitlines()
        return [*difflib.unified_diff(old, new, lineterm="", n=0)][2:]

    def added(change: Change) -> set[str]:
        return {line[1:].strip() for line in difference(change) if line[:1] == "+"}

    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    made = [Copy(number, checkout.paths, files) for number in range(asked.processes)]
    for copy in made:
        copies.put(copy)

    def within(method: Any, *arguments: Any) -> Any:
        copy = copies.get()
        try:
            return method(copy, *arguments)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(len(made)) as pool:
        # Which lines does each test execute, and in how many seconds?
        found: dict[str, dict[str, int]] = {}
        now, missing = {path: _digest(texts[path]) for path in product}, []
        for file in files:
            value = memory.get(_digest("lines", file, texts[file])) or {"then": {}, "tests": {}}
            found |= {
                test: {name: int(bits, 16) for name, bits in each.items()} for test, each in value["tests"].items()
            }
            if any(value["then"].get(module) != now[module] for module in modules if file in near[module]):
                missing.append(file)
        print(
            f"{len(modules)} modules, {len(files)} files of tests, of which {len(missing)} are seen first", flush=True
        )
        for file, seen in zip(missing, pool.map(lambda file: within(Copy.trace, file), missing), strict=True):
            kept = {test: {name: f"{bits:x}" for name, bits in each.items()} for test, each in seen.items()}
            memory.put(_digest("lines", file, texts[file]), {"then": now, "tests": kept})
            found |= seen
            print(f"{file}: {sum(each.get('ms', 0) for each in seen.values()) / 1000:.1f} s", flush=True)
        failing = [test for test, each in found.items() if "failed" in each]
        print(*(f"{test} fails without a change" for test in failing), sep="\n", flush=True)

        total, tests_text = Counter[str](), _digest(str(asked.within), *(texts[file] for file in files))
        for module in modules:
            noticed: Counter[str] = Counter()

            def tests_of(change: Change, module=module, noticed=noticed) -> list[str]:
                at = change.at
                anywhere = -1 if at & made[0].at_import.get(module, 0) else at
                files = {test.split("::")[0] for test, each in found.items() if each.get(module, 0) & anywhere}
                able = []
                for test, each in found.items():
                    file = test.split("::")[0]
                    if file in files and "ms" in each and "failed" not in each:
                        # Tests of one file share what is traced and compiled: the first alone has executed the line.
                        share = near[module].get(file, 0.03) * (1 if each.get(module, 0) & at else 0.1)
                        able.append((each["ms"] / share / (1 + noticed[test]), test))
                return [test for _, test in sorted(able)]

            def attempt(change: Change, noticed=noticed, tests_of=tests_of) -> str | None:
                key = _digest("change", change.module, change.text)
                by, then = memory.get(key) or (None, None)
                if then == (tests_text if by is None else _digest(texts.get((by or "").split("::")[0], ""))):
                    return by
                tests = tests_of(change)
                by = within(Copy.notices, change, tests, asked.within) if tests else None
                if tests and by is None and not added(change) & equal.get(change.module, set()):
                    by = within(Copy.notices, change, tests, LONGER * asked.within)
                noticed.update([by] if by else [])
                memory.put(key, [by, _digest(texts.get(by.split("::")[0], "")) if by else tests_text])
                return by

            began, all_changes = time.monotonic(), [*changes(module, texts[module], asked.of)]
            count: Counter[str] = Counter()
            met: set[str] = set()
            none = Change(module, texts[module], -1)
            if all_changes and (by := within(Copy.notices, none, tests_of(none), asked.within)):
                failing.append(by)
                print(f"{by} fails with {module} as it is", flush=True)
            for change, by in zip(all_changes, pool.map(attempt, all_changes), strict=True):
                is_equal = set() if by else added(change) & equal.get(module, set())
                met |= is_equal
                count["killed" if by else "equal" if is_equal else "surviving"] += 1
                if not by and not is_equal:
                    print(*difference(change), sep="\n", flush=True)
            total += count
            print(f"{module}: {_told(count)}, {time.monotonic() - began:.0f} s", flush=True)
            for line in equal.get(module, set()) - met if asked.of == 1 else ():
                failing.append(line)
                print(f"docs/mutants.md lists for {module} what is noticed, or no change of it: {line}", flush=True)
    for copy in made:
        copy.collected.kill()
        copy.bare.kill()
    print(f"{len(modules)} modules: {_told(total)}")
    return int(bool(total["surviving"] or failing))


def listed() -> dict[str, set[str]]:
    """The changes that make no difference, by module: the new line of each."""
    found: dict[str, set[str]] = {}
    for part in EQUAL.read_text().split("\n### ")[1:]:
        module, *lines = part.splitlines()
        found[module] = {line.strip("`") for line in lines if line.startswith("`")}
    return found


def _told(count: Counter[str]) -> str:
    return f"{count.total()} changes, {count['killed']} killed, {count['equal']} equal, {count['surviving']} surviving"


if __name__ == "__main__":
    sys.exit(main())
