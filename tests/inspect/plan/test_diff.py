"""`jshard diff`: what changed, on which line of either side, and whether it is the same program after all."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import jax
import pytest

import jshard
from jshard.cli import main
from jshard.cli.terminal import fitted
from jshard.errors import JShardError, Location
from jshard.inspect.compiled.program_text import first_difference, normalised
from jshard.inspect.ledger import Ledger, Line
from jshard.inspect.ledger.entries import Left, Staged
from jshard.inspect.ledger.memory import Resident
from jshard.inspect.plan import explain
from jshard.inspect.plan.difference import compare
from jshard.layouts.mesh import absent_mesh
from jshard.programs.provenance import Cause, scope
from jshard.schedules import generate
from jshard.signals.active_config import on_mesh, unload
from jshard.training.diff import _outcomes, _Side
from tests.support.decoder import SEVEN_BILLION, TINY, Size, configured, training_step

ROOT = Path(__file__).parents[3]
DIGITS = "configs/digits.yaml"


def line(signal="mlp", collective="all_reduce", count=1, payload=1024, place=7, phase="forward", axis="tensor") -> Line:
    return Line(
        Cause((signal,), phase, place=Location("a.yaml", place)),
        collective,
        "p",
        (axis,),
        4,
        count,
        True,
        payload,
        "float32",
        (payload // 4,),
    )


def kinds(before: list[Line], after: list[Line]) -> list[tuple[str, str | None, str | None, int]]:
    difference = jshard.diff(Ledger(tuple(before)), Ledger(tuple(after)))
    return [(c.kind, c.old and c.old.place, c.new and c.new.place, c.wire) for c in difference.changes]


def test_diff_of_equal_ledgers_on_other_lines_is_none():
    assert kinds([line(place=7), line("head")], [line(place=9), line("head")]) == []


def test_diff_tells_added_and_gone():
    assert kinds([line()], [line(collective="all_gather", place=8)]) == [
        ("gone", "a.yaml:7", None, -1536),
        ("added", None, "a.yaml:8", 768),
    ]


def test_diff_tells_grown_and_shrunk_by_size_and_by_times():
    assert kinds([line()], [line(payload=2048, place=9)]) == [("grown", "a.yaml:7", "a.yaml:9", 1536)]
    assert kinds([line(count=3)], [line(count=1)]) == [("shrunk", "a.yaml:7", "a.yaml:7", -3072)]


def test_diff_tells_moved_between_signals_phases_and_mesh_axes():
    assert kinds([line("mlp")], [line("attn", place=3)]) == [("moved", "a.yaml:7", "a.yaml:3", 0)]
    assert kinds([line()], [line(phase="backward")]) == [("moved", "a.yaml:7", "a.yaml:7", 0)]
    assert kinds([line()], [line(axis="data")]) == [("moved", "a.yaml:7", "a.yaml:7", 0)]


def test_diff_of_what_only_has_another_name_might_be_one_program():
    assert jshard.diff(Ledger((line("mlp"),)), Ledger((line("attn"),))).is_open
    assert jshard.diff(Ledger((line("mlp", count=2),)), Ledger((line("attn"), line("head")))).is_open
    assert not jshard.diff(Ledger((line(),)), Ledger((line(payload=4),))).is_open


def test_diff_is_a_table_of_changes_and_totals():
    before = Ledger((line(), line("head")), memory=(Resident(Location("a.yaml", 7), "mlp", 100),))
    after = Ledger(
        (line("head", count=2), line(collective="all_gather")), memory=(Resident(Location("a.yaml", 7), "mlp", 300),)
    )
    difference = jshard.diff(before, after)
    assert str(difference).splitlines() == [
        "~ a.yaml:7 -> a.yaml:7  head  forward  all_reduce  over tensor (4)  1 x 1,024 B -> 2 x 1,024 B  "
        "+1,536 B on the wire  (grown)",
        "- a.yaml:7              mlp   forward  all_reduce  over tensor (4)  1 x 1,024 B                 "
        "-1,536 B on the wire  (gone)",
        "+ a.yaml:7              mlp   forward  all_gather  over tensor (4)  1 x 1,024 B                   "
        "+768 B on the wire  (added)",
        "~ a.yaml:7  mlp  at rest  +200 B  (100 B -> 300 B)",
        "wire: 3,072 B -> 3,840 B (+768 B) per device",
        "memory: 100 B -> 300 B (+200 B) at rest per device",
        "differs: 1 all_reduce grown, 1 all_reduce gone, 1 all_gather added, memory changed",
    ]
    assert not difference.same
    assert max(map(len, fitted(str(difference), 50).splitlines())) <= 50
    assert fitted(str(difference), 50).split() == str(difference).split()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ([line(count=2)], [line(payload=2048)], [("grown", 1024, 2048)]),
        (
            [line(payload=4), line(payload=8)],
            [line(payload=16), line(payload=32)],
            [("grown", 4, 16), ("grown", 8, 32)],
        ),
    ],
    ids=["as many bytes", "in their order"],
)
def test_diff_pairs_what_is_alike_but_for_its_size(before, after, told):
    changes = jshard.diff(Ledger(tuple(before)), Ledger(tuple(after))).changes
    assert [(each.kind, each.old and each.old.payload, each.new and each.new.payload) for each in changes] == told


ONE, TWO = (Staged("stage", generate(kind, 2, 4)) for kind in ("gpipe", "1f1b"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Ledger((line(),)), Ledger((line(count=2),))),
        (Ledger((), memory=(Resident(None, "a", 1),)), Ledger((), memory=(Resident(None, "a", 2),))),
        (Ledger((), stages=(ONE,)), Ledger(())),
        (Ledger((), stages=(ONE,)), Ledger((), stages=(TWO,))),
    ],
    ids=["times", "memory", "stages of one", "stages"],
)
def test_diff_of_what_differs_can_be_no_one_program(before, after):
    for one, other in ((before, after), (after, before)):
        assert not jshard.diff(one, other).is_open and not jshard.diff(one, other).same
        assert jshard.diff(one, one).is_open and jshard.diff(one, one).same


def test_diff_of_schedules_names_both():
    difference = jshard.diff(Ledger((), stages=(ONE,)), Ledger((), stages=(TWO,)))
    assert str(difference).splitlines() == [
        "- gpipe: 2 stages, 4 microbatches, 10 ticks, 20.0 % idle in lock-step",
        "+ 1f1b: 2 stages, 4 microbatches, 6 ticks, 20.0 % idle in lock-step",
        "wire: 0 B -> 0 B (+0 B) per device",
        "differs: another schedule",
    ]


def test_diff_of_what_stages_keep_says_how_much():
    kept = dataclasses.replace(ONE, kept=2048)
    assert str(jshard.diff(Ledger((), stages=(ONE,)), Ledger((), stages=(kept,)))).splitlines() == [
        "+ kept for backwards on each device: 4 x 2.00 KiB from F: 8.00 KiB",
        "wire: 0 B -> 0 B (+0 B) per device",
        "differs: another schedule",
    ]


def test_diff_of_one_program_says_what_was_compared():
    same = jshard.diff(Ledger((line(),)), Ledger((line(),)))
    assert str(same) == "the same collectives and memory"
    assert str(same.proven("a\nb", "a\nb")) == "same program: the compiled text is the same, 2 lines"
    assert same.proven("a\nb", "a\nc").summary() == "differs: 1 lines of the compiled text, first 'b' -> 'c'"


def test_diff_of_memory_that_one_side_alone_holds():
    before, after = Ledger((), memory=(Resident(None, "mlp", 1000), Resident(None, "x", 9))), Ledger(())
    assert str(jshard.diff(before, after)).splitlines() == [
        "- -  mlp  at rest  -1,000 B  (1,000 B -> 0 B)",
        "- -  x    at rest      -9 B  (9 B -> 0 B)",
        "wire: 0 B -> 0 B (+0 B) per device",
        "memory: 1,009 B -> 0 B (-1,009 B) at rest per device",
        "differs: memory changed",
    ]
    assert "memory: 0 B -> 1,009 B (+1,009 B) at rest per device" in str(jshard.diff(after, before)).splitlines()


def test_diff_beside_what_a_compiler_added_pairs_by_place_and_size():
    added = dataclasses.replace(line("head", count=30, place=8), compiler="XLA for CPU")
    asked = Ledger((line(), line(place=9)))
    compiled = Ledger((line(count=2), added, line("head", place=8)), compiler="XLA for CPU")
    assert [(each.kind, each.side.count) for each in jshard.diff(asked, compiled).changes] == [("added", 31)]
    assert [(each.kind, each.side.count) for each in jshard.diff(compiled, asked).changes] == [("gone", 31)]
    as_many = Ledger((dataclasses.replace(line(), primitive="other", compiler="XLA for CPU"),), compiler="XLA for CPU")
    assert jshard.diff(Ledger((line(),)), as_many).same and jshard.diff(as_many, Ledger((line(),))).same


def left(count=1, place=7, primitive="concatenate") -> Left:
    cause = Cause(("mlp",), place=Location("a.yaml", place), source="model.py:3")
    return Left(cause, primitive, ("data",), count, True)


def test_diff_tells_what_one_side_leaves_to_the_compiler():
    both = Ledger((), left=(left(primitive="rev"),))
    assert jshard.diff(both, Ledger((), left=(left(primitive="rev", place=9),))).same
    difference = jshard.diff(both, Ledger((), left=(left(primitive="rev"), left(), left())))
    assert str(difference).splitlines() == [
        "+ a.yaml:7  mlp  forward  concatenate  over data  2 x ? B  bytes unknown  (added, decided by the compiler)",
        "wire: 0 B -> 0 B (+0 B) per device",
        "differs: 1 concatenate added",
    ]


def test_diff_of_a_revision_names_it_in_front_of_every_place(monkeypatch):
    ledger = Ledger((line(),), left=(left(),), memory=(Resident(Location("a.yaml", 7), "mlp", 100),))
    monkeypatch.setattr("jshard.training.diff._output", lambda sides, commands: [ledger.to_json()] * 2)
    side = _Side("git:HEAD:a.yaml", ".", "a.yaml", (), ["a.yaml"], "HEAD")
    old, new = _outcomes((side, dataclasses.replace(side, revision="")), [["explain", "--json"]] * 2)
    places = [
        {*(each.place for each in found.moves), *(place for place, _ in found.parts.values())} for found in (old, new)
    ]
    assert places == [{"HEAD:a.yaml:7"}, {"a.yaml:7"}]
    assert compare(old, new).same


def test_diff_document_has_a_version():
    text = jshard.diff(Ledger((line(),)), Ledger(())).to_json()
    document = json.loads(text)
    assert text.splitlines()[1] == '  "schema": "jshard.diff/2",'
    assert sorted(document) == ["changes", "new", "old", "same", "says", "schema"]
    assert (document["same"], document["old"]["wire"], document["new"]["wire"]) == (False, 1536, 0)
    (change,) = document["changes"]
    assert (change["kind"], change["wire"], change["old"]["place"], change["new"]) == ("gone", -1536, "a.yaml:7", None)


def decoder(size: Size = TINY, *, data: int = 2, tensor: int = 4, **signals) -> Ledger:
    """A decoder on a pod that need not be here."""
    said = configured(data, tensor)
    said.update(signals)
    jshard.load(said)
    try:
        with on_mesh(absent_mesh({"data": data, "tensor": tensor})):
            step, arguments = training_step(size)
            return explain(step, *arguments)
    finally:
        unload()


WRONG = {"mlp/down": {"row": "data", "store": "data", "dtype": {"compute": "bfloat16"}}}  # and no reduction: tensor


@pytest.mark.seconds
def test_diff_of_one_wrong_axis_in_one_weight_shows_what_it_costs():
    difference = jshard.diff(decoder(), decoder(**WRONG))
    assert not difference.same
    x = TINY.batch // 2 * TINY.length * TINY.hidden * 2  # the whole input of the layer, on one device, in bfloat16
    added = [c.new for c in difference.changes if c.kind == "added" and c.new and c.new.signal == "mlp/down"]
    forward = [each for each in added if each.phase == "forward"]
    assert [
        (each.collective, each.mesh_axes, each.count, each.payload) for each in forward if "redistribute" in each.via
    ] == [("all_gather", ("tensor",), TINY.layers, x)]
    gone = [c.old for c in difference.changes if c.kind == "gone" and c.old and c.old.phase == "forward"]
    assert [(each.signal, each.collective, each.mesh_axes) for each in gone] == [
        ("mlp/down", "all_reduce", ("tensor",))
    ]


@pytest.mark.slow
def test_diff_of_one_wrong_axis_in_seven_billion_parameters_says_an_all_gather_more_and_its_mebibytes():
    pod = {"data": 16, "tensor": 16}
    before, after = decoder(SEVEN_BILLION, **pod), decoder(SEVEN_BILLION, **pod, **WRONG)
    lines = str(jshard.diff(before, after)).splitlines()
    size = SEVEN_BILLION
    assert size.parameters == 6_738_415_616
    x = size.batch // 16 * size.length * size.hidden * 2
    gathered = next(line for line in lines if line.startswith("+") and "  forward " in line)
    assert re.split(" {2,}", gathered)[1:] == [
        "mlp/down", "forward", "all_gather", "over tensor (16)", f"{size.layers} x {x:,} B",
        f"{size.layers * x * 15 // 16:+,} B on the wire", "(added, redistribute)",
    ]  # fmt: skip
    assert lines[-1] == (  # x is gathered in forward, and again where backward computes it anew
        "differs: 2 all_gather grown (+4.7 GiB), 1 reduce_scatter grown (+2.4 GiB), 1 all_reduce gone (-1.9 GiB), 2 all_gather "
        "added (+5.0 GiB)"
    )
    wire = next(line for line in lines if line.startswith("wire: "))
    assert wire == (
        f"wire: {before.total:,} B ({before.total / 2**30:,.1f} GiB) -> {after.total:,} B ({after.total / 2**30:,.1f} GiB) "
        f"({after.total - before.total:+,} B) per device"
    )


# -- compiled texts --


def test_program_has_no_names_of_functions_scopes_or_lines():
    def first(x):
        with scope(signal="a"):
            return jax.numpy.sin(x) * 2

    def second(y):
        return jax.numpy.sin(y) * 2

    def other(y):
        return jax.numpy.sin(y) * 3

    one, two, three = (normalised(jax.jit(f).lower(jax.numpy.ones(4)).compile()) for f in (first, second, other))
    assert one == two and "signal" not in one and "metadata" not in one and "first" not in one
    assert one != three
    count, old, new = first_difference(one, three)
    assert count == 1 and "constant(2)" in old and "constant(3)" in new


# -- on the command line --


def typed(capsys, *words: str) -> tuple[int, list[str], list[str]]:
    status = main(["diff", *words])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


@pytest.mark.slow
def test_diff_is_1_for_a_difference_and_names_both_lines(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    status, out, err = typed(capsys, DIGITS, "--trust", "layer2.reduction=[]")
    assert (status, err) == (1, [])
    assert [text.split()[:2] for text in out[:3]] == [
        ["~", f"{DIGITS}:16"],
        ["-", f"{DIGITS}:16"],
        ["+", f"{DIGITS}:16"],
    ]
    assert out[-3:] == [
        "wire: 21,164 B -> 51,500 B (+30,336 B) per device",
        "memory: 76,968 B -> 107,688 B (+30,720 B) at rest per device",
        "differs: 1 all_reduce grown, 1 all_reduce gone, 1 all_gather added, memory changed",
    ]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a small experiment, committed twice: the second model is another."""
    monkeypatch.chdir(tmp_path)
    model = (ROOT / "examples/xor.py").read_text()
    (tmp_path / "mine.py").write_text(model)
    (tmp_path / "xor.yaml").write_text(
        "jshard:\n  mesh: {tensor: 4}\n  train: {model: 'mine:Model', data: 'mine:data', batch: 4, optimizer: adam}\n"
        "layer1: {column: tensor}\nlayer2: {reduction: tensor}\n"
    )

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "mine.py").write_text(model.replace("nnx.tanh", "nnx.relu"))
    (tmp_path / "xor.yaml").write_text("# a remark\n" + (tmp_path / "xor.yaml").read_text())
    return tmp_path


@pytest.mark.slow
def test_diff_between_commits_uses_the_models_of_each(repository, capsys):
    status, out, err = typed(capsys, "git:HEAD:xor.yaml", "xor.yaml")
    assert (status, err) == (1, [])
    assert out[-1].startswith("differs: ") and "of the compiled text, first" in out[-1]  # relu for tanh moves no more
    (repository / "mine.py").write_text((ROOT / "examples/xor.py").read_text())
    status, out, err = typed(capsys, "git:HEAD:xor.yaml", "xor.yaml")
    assert (status, err) == (0, [])
    assert out[0].startswith("same program: the compiled text is the same, ")


SENTENCES = [
    (
        [DIGITS],
        "jshard diff takes two configurations, and 1 is given; type: jshard diff configs/digits.yaml configs/other.yaml",
    ),
    (
        [DIGITS, "b.yaml", "c.yaml"],
        "jshard diff takes two configurations, and 3 are given; type: jshard diff configs/digits.yaml configs/other.yaml",
    ),
    ([DIGITS, "configs/digts.yaml", "--trust"], 'configs/digts.yaml is not there; did you mean "configs/digits.yaml"?'),
    (
        ["git:HEAD", DIGITS],
        "git:HEAD is not git:REVISION:path; write it like git:HEAD~1:configs/digits.yaml",
    ),
    (
        ["git:nowhere:configs/digits.yaml", DIGITS],
        "git:nowhere:configs/digits.yaml can't be read: not a valid object name: nowhere; name a revision that git log shows",
    ),
    (
        ["git:HEAD:configs/nothing.yaml", DIGITS],
        "configs/nothing.yaml is not there at HEAD; see git ls-tree -r HEAD --name-only",
    ),
    (
        [DIGITS, "configs/mlp.yaml", "--trust"],
        "configs/mlp.yaml names no model to train; write model: examples.digits:Model under jshard.train",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "sentence"), SENTENCES, ids=[" ".join(words) for words, _ in SENTENCES])
def test_diff_trouble_is_one_sentence_and_2(capsys, monkeypatch, words, sentence):
    monkeypatch.chdir(ROOT)
    assert typed(capsys, *words) == (2, [], [sentence])


def test_diff_of_a_ledger_and_a_path_is_refused():
    with pytest.raises(JShardError) as told:
        jshard.diff(Ledger(()), DIGITS)
    assert str(told.value) == "jshard.diff is given a ledger and a path; give two paths, two ledgers or two plans"
