"""The house has floors: a room imports lower floors only. Every import in `jshard/` is parsed, those inside functions
and under TYPE_CHECKING too."""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "jshard"
FLOORS = {
    "errors": -1,  # the cellar, which the floor above stands on
    "version": -1,
    "algorithms": -1,
    "hardware": 0,
    "printing": 0,
    "programs": 0,
    "runs": 0,
    "schedules": 1,
    "layouts": 1,
    "kernels": 1,
    "collectives": 2,
    "signals": 2,
    "layers": 3,
    "inspect": 4,
    "launch": 5,
    "testing": 5,
    "training": 5,
    "cli": 6,
    "__main__": 7,
    "__init__": 7,
}
# The rooms inside a room, as they build on each other.
INSIDE = {
    "printing": {"markup": 0, "units": 0, "table": 1, "pages": 1},
    "programs": {"protobuf": 0, "jaxprs": 0, "provenance": 1, "flops": 2},
    "inspect": {"compiled": 1, "ledger": 1, "verify": 2, "plan": 2, "report": 3, "timeline": 4},
    "training": {
        "preemption": 0,
        "settings": 0,
        "components": 1,
        "log_reader": 1,
        "telemetry": 2,
        "data": 3,
        "checkpoints": 4,
        "optimizers": 4,
        "experiments": 5,
        "diff": 6,
        "function": 6,
        "generation": 6,
        "trainer": 6,
    },
}
WITHOUT = {
    "algorithms": "jax flax",
    "errors": "jax flax",
    "hardware": "jax flax",
    "printing": "jax flax",
    "programs": "flax",
    "programs.protobuf": "jax flax",
    "runs": "jax flax",
    "schedules": "jax flax",
    "collectives": "flax",
    "kernels": "flax",
    "layouts": "flax",
    "signals": "flax",
}
WITHOUT_JAX = (
    "algorithms",
    "errors",
    "version",
    "hardware.chips",
    "hardware.host",
    "printing.units",
    "printing.table",
    "printing.pages.shell",
    "printing.pages.words",
    "programs.protobuf",
    "runs.events",
    "runs.names",
    "schedules.drawing",
    "signals.signal",
    "signals.config",
    "signals.schema",
    "signals.source",
    "launch.supervisor",
    "training.settings",
    "cli",
)


def imports(module: Path) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of each import; `from a import b` is `a.b`, as `b` may be a module."""
    return _imports(module.read_text(), str(module))


@functools.cache
def _imports(text: str, module: str) -> tuple[tuple[int, str], ...]:
    return tuple(_found(ast.parse(text, module)))


def _found(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(level=0):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            case ast.ImportFrom():
                yield node.lineno, "." * node.level + (node.module or "")
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(str(name)), *_]):
                if called in ("import_module", "__import__"):
                    yield node.lineno, name


def faults(package: Path) -> list[str]:
    """One line for each import that doesn't go down."""
    found = []
    for module in sorted(package.rglob("*.py")):
        room, *inside = module.relative_to(package).with_suffix("").parts
        if room not in FLOORS:
            found.append(f"{module}: the room {room!r} is on no floor")
            continue
        for line, name in imports(module):
            first, *rest = name.split(".")
            without = WITHOUT.get(".".join([room, *inside[:1]]), WITHOUT.get(room, ""))
            at = f"{module}:{line}: {room} (floor {FLOORS[room]}) imports {name}"
            if not first:
                found.append(f"{at}, which is relative")
            elif first in without.split():
                found.append(f"{at}, and has to stand without {first}")
            elif first == "jshard":
                other = rest[0] if rest else "__init__"
                if other not in FLOORS:
                    found.append(f"{at}, which is the façade or unknown")
                elif other != room and FLOORS[other] >= FLOORS[room]:
                    found.append(f"{at} (floor {FLOORS[other]})")
    return found


def graph(package: Path) -> dict[str, set[str]]:
    """For each module of the package the modules that it imports."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def module_of(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {
        name: {module_of(to) for _, to in imports(path) if to.startswith("jshard")} - {"", name}
        for name, path in modules.items()
    }


def circles(edges: dict[str, set[str]]) -> set[str]:
    """The modules that import themselves by way of others."""
    left = dict(edges)
    while free := [name for name, to in left.items() if not to & left.keys()]:
        for name in free:
            del left[name]
    while free := [name for name in left if not any(name in to for to in left.values())]:
        for name in free:
            del left[name]
    return set(left)


def test_floors_imports_go_down_only():
    assert faults(PACKAGE) == []


def test_floors_no_circle_between_files():
    assert circles(graph(PACKAGE)) == set()


def test_floors_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}


@pytest.mark.parametrize("room", INSIDE)
def test_floors_rooms_inside_a_room_build_on_lower_ones(room):
    floors, wrong = INSIDE[room], []
    for name, to in graph(PACKAGE).items():
        for other in to:
            rooms = [each.split(".")[2] for each in (name, other) if each.startswith(f"jshard.{room}.")]
            if len(rooms) == 2 and rooms[0] != rooms[1] and floors[rooms[0]] <= floors[rooms[1]]:
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_floors_no_room_exports_the_name_of_its_own_module():
    """`from jshard.kernels import matmul` would be a function or a module, by what was imported before."""
    shadowed = []
    for init in PACKAGE.rglob("__init__.py"):
        room = ".".join(init.parent.relative_to(PACKAGE.parent).parts)
        exported = {
            alias.asname
            for node in ast.walk(ast.parse(init.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module != room  # else it is the module
            for alias in node.names
        }
        shadowed += [path for path in init.parent.iterdir() if path.stem in exported]
    assert shadowed == []


def test_floors_no_two_classes_have_one_name():
    """A reader who has met a class knows every class of that name."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    names = collections.Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []


def test_floors_no_two_files_of_tests_have_one_name():
    """pytest would import one of them in place of the other, and stop; alone, each is found."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert [name for name in {*names} if names.count(name) > 1] == []


@pytest.mark.parametrize(
    ("room", "text", "fault"),
    [
        (
            "layouts",
            "from jshard.kernels import local_matmul",
            "layouts (floor 1) imports jshard.kernels.local_matmul (floor 1)",
        ),
        ("kernels", "import jshard.layouts.mesh", "kernels (floor 1) imports jshard.layouts.mesh (floor 1)"),
        ("signals", "def f():\n    from jshard import layers", "signals (floor 2) imports jshard.layers (floor 3)"),
        (
            "layers",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jshard.inspect",
            "layers (floor 3) imports jshard.inspect (floor 4)",
        ),
        (
            "inspect",
            "import jshard.training.experiments",
            "inspect (floor 4) imports jshard.training.experiments (floor 5)",
        ),
        ("training", "import jshard", "training (floor 5) imports jshard (floor 7)"),
        ("training", "from jshard import Linear", "imports jshard.Linear, which is the façade or unknown"),
        ("training", "from . import data", "imports ., which is relative"),
        ("layers", "import importlib\nimportlib.import_module('jshard.cli')", "imports jshard.cli (floor 6)"),
        ("kernels", "def f():\n    from flax import nnx", "imports flax.nnx, and has to stand without flax"),
        ("programs/protobuf", "import jax", "imports jax, and has to stand without jax"),
        ("utils", "", "the room 'utils' is on no floor"),
    ],
)
def test_floors_planted_import_is_found(tmp_path, room, text, fault):
    planted = tmp_path / "jshard" / room / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    (found,) = faults(tmp_path / "jshard")
    assert fault in found
    assert "planted.py" in found


def test_floors_lower_imports_are_allowed(tmp_path):
    planted = tmp_path / "jshard" / "layers" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text(
        "from jshard import errors, kernels\nimport jshard.printing.pages\nfrom jshard.signals import signal\nimport jax, jshard.layers.linear"
    )
    assert faults(tmp_path / "jshard") == []


@pytest.mark.parametrize("name", WITHOUT_JAX)
@pytest.mark.usefixtures("fresh")
def test_floors_configuration_needs_no_jax(name):
    program = f"import sys, jshard.{name}; print(sorted({{'jax', 'jaxlib', 'flax', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


CHECKOUT = runpy.run_path(str(PACKAGE.parent / ".ci" / "changed.py"))["Checkout"]


@pytest.mark.seconds
def test_every_module_is_near_to_a_test():
    checkout = CHECKOUT(PACKAGE.parent)
    modules = [path for path in checkout.paths if path.startswith("jshard/") and path.endswith(".py")]
    assert len(modules) > 100
    assert [path for path in modules if not checkout.tests_of(path)] == []


SMALL = {
    "jshard/__init__.py": "from jshard.room import thing as thing",
    "jshard/room/__init__.py": "from jshard.room.inner import thing as thing",
    "jshard/room/inner.py": "from jshard.room.below import deed\ndef thing(): deed()",
    "jshard/room/below.py": "def deed(): ...",
    "jshard/room/forgotten.py": "import jshard.room.inner",
    "jshard/cli/__init__.py": "import importlib\ndef main(word): importlib.import_module(f'jshard.cli.{word}')",
    "jshard/cli/explain.py": "from jshard.room.below import deed",
    "configs/small.yaml": "row: data",
    "tests/support/cases.py": "import jshard\ndef case(): return jshard.thing()",
    "tests/test_by_facade.py": "import jshard\ndef test_it(): jshard.thing()",
    "tests/test_by_cases.py": "import cases, os\ndef test_it(): cases.case(), os.getcwd()",
    "tests/test_by_words.py": "from jshard.cli import main\ndef test_it(): main('explain')",
    "tests/test_by_child.py": "import subprocess\nPROGRAM = 'from jshard.room.below import deed'",
    "tests/test_by_path.py": "PATH = 'configs/small.yaml'",
    "tests/sub/test_below.py": "from jshard.cli import main",
}


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("jshard/room/inner.py", ["by_facade", "by_cases"]),
        ("jshard/room/below.py", ["by_child", "below", "by_facade", "by_words", "by_cases"]),
        ("jshard/cli/explain.py", ["by_words"]),
        ("configs/small.yaml", ["by_path"]),
        ("tests/support/cases.py", ["by_cases"]),
        ("tests/test_by_path.py", ["by_path"]),
        ("jshard/room/forgotten.py", []),
    ],
)
def test_tests_of_a_file_are_those_whose_names_lead_to_it(small, path, tests):
    found = [Path(test).stem.removeprefix("test_") for _, test in small.tests_of(path)]
    assert sorted(found) == sorted(tests)
    assert found[:1] == tests[:1]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkout")
    for path, text in SMALL.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    subprocess.run(["git", "init", "--quiet", "."], cwd=root, check=True)
    return CHECKOUT(root)


# -- functions --


class Function(NamedTuple):
    file: Path
    name: str
    lines: int
    annotations: tuple[str, ...]  # of its parameters


@functools.cache
def functions() -> list[Function]:
    """Return every function of the package."""
    return [
        Function(module, node.name, (node.end_lineno or 0) - node.lineno + 1, tuple(annotated(node.args)))
        for module in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def annotated(of: ast.arguments) -> Iterator[str]:
    every = *of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, (of.vararg, of.kwarg))
    yield from (ast.unparse(each.annotation) for each in every if each.annotation is not None)


# -- names in types that are quoted --


def types_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each type that is a string or a comment: in an annotation, in a `Callable`, in a cast."""
    for node in ast.walk(tree):
        if (comment := getattr(node, "type_comment", None)) is not None:
            yield node.lineno, comment.replace("->", ",")
        match node:
            case ast.arg() | ast.AnnAssign():
                types = [node.annotation]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                types = [node.returns]
            case ast.Subscript(value=ast.Name(id="Callable")):
                types = [node.slice]
            case ast.Call(func=ast.Name(id="cast")):
                types = node.args[:1]
            case ast.Call(func=ast.Name(id="TypeVar")):
                types = [each.value for each in node.keywords]
            case _:
                continue
        yield from (found for each in types if each is not None for found in strings_in(each))


def strings_in(kind: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string of a type, but for the words of a `Literal`."""
    match kind:
        case ast.Constant(str(text)):
            yield kind.lineno, text
        case ast.Subscript(value=ast.Name(id="Literal")):
            return
        case _:
            yield from (found for each in ast.iter_child_nodes(kind) for found in strings_in(each))


def hidden_imports(text: str) -> list[str]:
    """Return the names in quoted types that the file neither imports nor has: each may hide a circle."""
    tree = ast.parse(text, type_comments=True)
    has = {*dir(builtins)}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                has.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                has.add(name)
            case ast.alias():
                has.add((node.asname or node.name).partition(".")[0])
    return [
        f"{line}: {name.id}"
        for line, quoted in types_in(tree)
        for name in ast.walk(ast.parse(quoted.strip(), mode="eval"))
        if isinstance(name, ast.Name) and name.id not in has
    ]


def test_floors_no_quoted_type_hides_an_import():
    found = {str(path): hidden_imports(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(program: 'Partition'): ...", ["1: Partition"]),
        ("class A:\n    program: list['Partition | None']", ["2: Partition"]),
        ("def f() -> 'partition.Program': ...", ["1: partition"]),
        ("from collections.abc import Callable\nRule = Callable[['Run', int], str]", ["2: Run"]),
        ("from typing import cast\nx = cast('Run', 1)", ["2: Run"]),
        ("from typing import TypeVar\nT = TypeVar('T', bound='Run')", ["2: Run"]),
        ("x = None  # type: Run", ["1: Run"]),
        ("def f(run):\n    # type: (Run) -> None\n    ...", ["1: Run"]),
        ("from jshard.runs import Run\ndef f(run: 'Run') -> 'list[int]': ...", []),
        ("class Run:\n    def f(self) -> 'Run': ...", []),
        ("from typing import Literal\ndef f(word: Literal['Run']): ...", []),
        ("x = {}['Run']  # type: ignore[name]", []),
    ],
)
def test_floors_planted_quoted_type_is_found(text, names):
    assert hidden_imports(text) == names


# -- limits --


def test_floors_a_run_has_at_most_six_attributes_which_stay_and_takes_no_bool():
    tree = ast.parse((PACKAGE / "layers" / "partition" / "run.py").read_text())
    (run,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run")
    assert len(assigned(run)["__init__"]) <= 6
    assert {name: found for name, found in assigned(run).items() if found and name != "__init__"} == {}
    of_functions = [
        each.annotation for node in ast.walk(run) if isinstance(node, ast.arguments)
        for each in (*node.posonlyargs, *node.args, *node.kwonlyargs) if each.annotation is not None
    ]  # fmt: skip
    assert [ast.unparse(each) for each in of_functions if "bool" in ast.unparse(each)] == []


def assigned(kind: ast.ClassDef) -> dict[str, set[str]]:
    """Return the attributes of `self` that each method of a class assigns."""
    return {
        method.name: {
            node.attr for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and ast.unparse(node.value) == "self"
        }
        for method in kind.body if isinstance(method, ast.FunctionDef)
    }  # fmt: skip


def test_floors_no_function_has_more_than_60_lines():
    assert {f"{each.file}: {each.name}": each.lines for each in functions() if each.lines > 60} == {}


def test_floors_no_file_has_more_than_400_lines():
    lines = {str(file): len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    assert {file: count for file, count in lines.items() if count > 400} == {}


@pytest.mark.parametrize(("rooms", "most"), [((), 0.1), (("layers", "layouts"), 0.08)])
def test_floors_parameters_have_types(rooms, most):
    """`Any` alone is said of few."""
    every = [
        annotation
        for function in functions()
        if not rooms or function.file.relative_to(PACKAGE).parts[0] in rooms
        for annotation in function.annotations
    ]
    assert every.count("Any") / len(every) <= most


def test_floors_the_list_of_mutants_names_files():
    named = [line[1:-1] for line in Path(".ci/mutants.txt").read_text().splitlines() if line.startswith("[")]
    assert [name for name, times in collections.Counter(named).items() if times > 1 or not Path(name).is_file()] == []


# Files outside of programs/jaxprs.py that read the equations of a jaxpr themselves, each with its reason: at most five.
READS_EQUATIONS: tuple[str, ...] = ()


def equations_read(package: Path) -> list[str]:
    """The places where the field `eqns` of a jaxpr is read, or replaced."""
    found = []
    for module in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Attribute(attr="eqns") | ast.keyword(arg="eqns"):
                    found.append(f"{module.relative_to(package)}:{node.lineno}")
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant("eqns"), *_]):
                    found.append(f"{module.relative_to(package)}:{node.lineno}")
    return found


def test_floors_jaxprs_alone_read_the_equations_of_a_jaxpr():
    """Others evaluate, follow and cut programs by its words."""
    allowed = ("programs/jaxprs.py", *READS_EQUATIONS)
    assert [place for place in equations_read(PACKAGE) if place.rpartition(":")[0] not in allowed] == []
    assert len(READS_EQUATIONS) <= 5


@pytest.mark.parametrize(
    "text", ["jaxpr.eqns", "getattr(jaxpr, 'eqns', ())", "hasattr(jaxpr, 'eqns')", "jaxpr.replace(eqns=[])"]
)
def test_floors_planted_reader_of_equations_is_found(tmp_path, text):
    (tmp_path / "planted.py").write_text(text)
    assert equations_read(tmp_path) == ["planted.py:1"]
