"""`jshard check`: what is promised is held, a change fails with the line to blame and the command that accepts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jshard.cli import main
from jshard.errors import Location
from jshard.inspect.ledger import Ledger, Line
from jshard.inspect.ledger.entries import Left
from jshard.inspect.ledger.memory import Resident
from jshard.inspect.ledger.promises import Baseline, added
from jshard.programs.provenance import Cause
from jshard.signals.active_config import unload

ROOT = Path(__file__).parents[3]
TEXT = """\
# What each device sends and holds in one training step. Held by: jshard check digits.yaml --trust
# A change is accepted by: jshard check digits.yaml --trust --update
baseline 1
mesh data: 2, tensor: 4
layer1     backward  all_reduce  over data    x 2  16,640 B
layer2     backward  all_reduce  over data    x 2   2,600 B
layer2     forward   all_reduce  over tensor  x 1   1,920 B
objective  forward   all_reduce  over data    x 1       4 B
-       at rest       8 B
layer1  at rest  66,560 B
layer2  at rest  10,400 B
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """`check(*words)` in a folder with a copy of configs/digits.yaml: status, stdout and stderr by lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "digits.yaml").write_text((ROOT / "configs/digits.yaml").read_text())

    def typed(*words: str) -> tuple[int, list[str], list[str]]:
        status = main(["check", "digits.yaml", "--trust", *words])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    yield typed
    unload()


def test_check_writes_a_baseline_that_people_can_read_and_holds_it(check):
    status, out, err = check("--update")
    assert (status, err) == (0, [])
    assert out[-1] == (
        "digits.baseline is written: 6 collectives, 21,164 B on the wire per device (forward 1,924 B, backward 19,240 B)"
    )
    assert Path("digits.baseline").read_text() == TEXT
    status, out, err = check()
    assert (status, out[-1], err) == (0, "as digits.baseline holds", [])


@pytest.mark.seconds
def test_check_blames_the_line_that_adds_a_collective_and_says_how_to_accept_it(check):
    check("--update")
    path = Path("digits.yaml")
    path.write_text(
        "# one line more\n" + path.read_text().replace("column: tensor}", "column: tensor, output: gather}")
    )
    status, _, err = check()
    assert (status, len(err)) == (1, 2)  # layer2 wants its input split: the cotangent is gathered on the way back
    assert err[0] == (
        'signal "layer1" (digits.yaml:16) asks for 1 more all_gather over tensor in forward than digits.baseline, 24,576 B '
        "on the wire; accept it: jshard check digits.yaml --trust --update"
    )
    assert err[1].startswith(
        'signal "layer2" (digits.yaml:17) asks for 1 more all_gather over tensor in backward than '
    )
    check("--update")
    assert check()[0] == 0


def test_check_blames_the_line_that_adds_memory(check):
    check("--update")
    status, _, err = check("layer2={row: data}")
    assert status == 1
    assert (
        'signal "layer2" (digits.yaml:16) holds 30,720 B more at rest than digits.baseline; accept it: jshard check '
        "digits.yaml --trust --update"
    ) in [line.replace("the command line", "digits.yaml:16") for line in err]


def test_check_passes_what_is_less_and_says_so(check):
    check("--update", "layer1.output=gather")
    status, out, err = check()
    assert (status, err) == (0, [])
    assert out[-1] == "less than digits.baseline holds; to keep it so: jshard check digits.yaml --trust --update"


def test_check_of_a_moved_line_is_no_change(check):
    check("--update")
    path = Path("digits.yaml")
    path.write_text("# a line\n\n" + path.read_text())
    assert check()[0] == 0


def test_check_on_another_mesh(check):
    check("--update")
    status, _, err = check("jshard.mesh.data=4")
    assert (status, err) == (
        1,
        [
            "digits.baseline was written for mesh data: 2, tensor: 4, but the mesh is now data: 4, tensor: 4; accept it: jshard check digits.yaml "
            "--trust --update"
        ],
    )


def test_check_holds_the_budget(check):
    status, out, err = check("jshard.budget=1MiB")
    assert (status, out[-1], err) == (0, "76,968 B at rest on each device, of 1,048,576 B", [])
    status, _, err = check("jshard.budget=64KiB")
    assert (status, err) == (
        1,
        [
            "jshard.budget (the command line) is 65,536 B, and 76,968 B are at rest on each device, 66,560 B of it under "
            'signal "layer1" (digits.yaml:15); write budget: 76968, or split more of it: store: data'
        ],
    )


def test_check_takes_several_files(check, capsys):
    Path("other.yaml").write_text("jshard: {mesh: {data: 2}}\nlayer: {row: data}\n")
    status, out, _ = check("other.yaml")
    assert (status, out[-1]) == (0, "other.yaml:2  layer: rows over data")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", 'digits.baseline does not begin with "baseline 1", as this jshard writes it'),
        ("baseline 0\nmesh data: 2\n", 'digits.baseline does not begin with "baseline 1", as this jshard writes it'),
        (TEXT + "layer3 forever\n", 'digits.baseline:12 is "layer3 forever", not a line of a baseline'),
    ],
)
def test_check_of_an_old_or_broken_baseline_is_one_sentence(check, text, sentence):
    Path("digits.baseline").write_text(text)
    status, _, err = check()
    assert (status, err) == (2, [f"{sentence}; type: jshard check digits.yaml --trust --update"])


def test_check_of_a_file_without_a_model_baseline_budget_or_promise_needs_no_jax(check):
    Path("bare.yaml").write_text("jshard: {mesh: {data: 2}}\nlayer: {row: data}\n")
    program = (
        "import sys\nfrom jshard.cli import main\nstatus = main(['check', 'bare.yaml'])\n"
        "print(status, sorted({'jax', 'flax', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-B", "-c", program]  # a process of its own: a fork of the tests' server has numpy
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines()[-1] == "0 []"


# -- the comparison itself --


def line(signal="mlp", count=1, payload=1024, place=7, phase="forward") -> Line:
    return Line(
        Cause(() if signal == "-" else (signal,), phase, place=Location("a.yaml", place), source="model.py:3"),
        "all_reduce", "psum", ("tensor",), 4, count, True, payload, "float32", (256,),
    )  # fmt: skip


def left(count=1, primitive="rev") -> Left:
    cause = Cause(("mlp",), place=Location("a.yaml", 7), source="model.py:3")
    return Left(cause, primitive, ("data",), count, True)


def held(**bytes_: int) -> Ledger:
    return Ledger((), memory=tuple(Resident(Location("a.yaml", 7), signal, each) for signal, each in bytes_.items()))


def sentences(was: Ledger, now: Ledger) -> list[str]:
    return list(added(Baseline.of(was, "x"), now, "x", name="b", command="c"))


def test_baseline_survives_its_text():
    ledger = Ledger(
        (line(), line("-"), line("decoder/attn", 80, 2**40)), memory=(Resident(None, "-", 3), Resident(None, "mlp", 4))
    )
    baseline = Baseline.of(ledger, "data: 16")
    assert Baseline.read(baseline.text("jshard check a.yaml"), "b", "c") == baseline


def test_baseline_tells_more_bytes_more_times_and_what_stands_under_no_signal():
    assert sentences(Ledger((line(),)), Ledger((line(payload=2048),))) == [
        'signal "mlp" (a.yaml:7) asks for 1,536 B more on the wire by all_reduce over tensor in forward than b; accept it: c '
        "--update"
    ]
    assert sentences(Ledger((line(),)), Ledger((line(count=3),))) == [
        'signal "mlp" (a.yaml:7) asks for 2 more all_reduce over tensor in forward than b, 3,072 B on the wire; accept it: c '
        "--update"
    ]
    assert sentences(Ledger(()), Ledger((line("-"),))) == [
        "the program (model.py:3), under no signal, asks for 1 more all_reduce over tensor in forward than b, 1,536 B on the "
        "wire; accept it: c --update"
    ]


def test_baseline_is_a_text_of_columns():
    ledger = Ledger((line(), line("decoder", 10, 4000)), left=(left(),), memory=held(mlp=3, decoder=4000).memory)
    assert Baseline.of(ledger, "data: 16").text("c").splitlines()[2:] == [
        "baseline 1",
        "mesh data: 16",
        "decoder  forward  all_reduce            over tensor  x 10  60,000 B",
        "mlp      forward  all_reduce            over tensor   x 1   1,536 B",
        "mlp      forward  compiler_decides_rev  over data     x 1       0 B",
        "decoder  at rest  4,000 B",
        "mlp      at rest      3 B",
    ]


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        (
            Ledger((), left=(left(2),)),
            Ledger((), left=(left(5),)),
            'signal "mlp" (a.yaml:7) leaves 3 more rev over data in forward to the compiler than b, bytes unknown',
        ),
        (
            Ledger((line("z", place=9),)),
            Ledger((line("z", place=9), line("+a"))),
            'signal "+a" (a.yaml:7) asks for 1 more all_reduce over tensor in forward than b, 1,536 B on the wire',
        ),
        (held(), held(mlp=10), 'signal "mlp" (a.yaml:7) holds 10 B more at rest than b'),
        (held(), held(**{"-": 10}), "the program, under no signal, holds 10 B more at rest than b"),
        (held(), held(**{"+a": 10}), 'signal "+a" (a.yaml:7) holds 10 B more at rest than b'),
    ],
    ids=["left", "a name before -", "memory", "memory of no signal", "memory of a name before -"],
)
def test_baseline_tells_what_is_more(was, now, told):
    assert sentences(was, now) == [f"{told}; accept it: c --update"]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (Ledger((line(count=2),)), Ledger((line(),))),
        (Ledger((line(payload=2048),)), Ledger((line(),))),
        (Ledger((), left=(left(2),)), Ledger((), left=(left(),))),
        (Ledger((), left=(left(),)), Ledger(())),
        (held(mlp=10), held(mlp=9)),
        (held(mlp=1), held()),
    ],
    ids=["times", "bytes", "left", "left no more", "memory", "memory no more"],
)
def test_baseline_of_less_is_told_as_less(was, now):
    assert sentences(was, now) == sentences(now, now) == []
    assert Baseline.of(was, "x") != Baseline.of(now, "x")


@pytest.mark.parametrize(("was", "now"), [("x", "y"), ("y", "x")])
def test_baseline_of_another_mesh_is_told_alone(was, now):
    told = list(added(Baseline.of(Ledger(()), was), Ledger((line(),)), now, name="b", command="c"))
    assert told == [f"b was written for mesh {was}, but the mesh is now {now}; accept it: c --update"]
