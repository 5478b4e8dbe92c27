"""What the entries of a ledger say of themselves, and how those that are alike are added up."""

from __future__ import annotations

import dataclasses

import pytest

from jshard.errors import Location
from jshard.inspect.ledger.entries import ChosenStrategy, Left, Line, Staged, Unused, joined
from jshard.programs.provenance import Cause
from jshard.schedules import generate

PLACE = Location("a.yaml", 7)
CAUSE = Cause(("mlp",), place=PLACE, source="model.py:12")
LINE = Line(CAUSE, "all_reduce", "psum", ("data",), 4, 2, True, 1024, "float32", (256,))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "a.yaml:7 | mlp | forward | all_reduce | over data (4) | 2 x 1,024 B | float32 | 3,072 B on the wire | "),
        (
            {"count_known": False, "mesh_axes": (), "typed": True, "cause": Cause(asked=False)},
            "- | - | forward | all_reduce | over ? (4) | ? x 2 x 1,024 B | float32 | ? x 3,072 B on the wire | (sharding in "
            "types, no signal asked)",
        ),
        (
            {"each": 1, "kernel": "ring", "declared": 10},
            "a.yaml:7 | mlp | forward | all_reduce | over data (4) | 2 x 1,024 B | float32 | 10 B on the wire | (kernel ring, as "
            "it declares, 1 by a stage)",
        ),
        (
            {"compiler": "XLA for CPU", "branches": ("branch 1 of 2",)},
            "a.yaml:7 | mlp | forward | all_reduce | over data (4) | 2 x 1,024 B | float32 | 3,072 B on the wire | (branch 1 of "
            "2, psum at model.py:12, added by XLA for CPU)",
        ),
    ],
    ids=["asked", "typed", "kernel", "compiler"],
)
def test_a_line_is_the_words_of_a_table(changes, told):
    assert " | ".join(dataclasses.replace(LINE, **changes).cells()) == told


@pytest.mark.parametrize(
    ("first", "second", "each"), [(None, None, None), (1, None, 3), (None, 1, 3), (1, 1, 2)], ids=str
)
def test_lines_are_added_by_what_one_device_runs(first, second, each):
    one, other = (dataclasses.replace(LINE, each=each) for each in (first, second))
    (line,) = joined([one, other], lambda line: line.collective)
    assert (line.count, line.each, line.runs) == (4, each, each or 4)


def test_lines_that_stages_run_stay_apart_from_those_that_all_devices_run():
    staged = dataclasses.replace(LINE, each=1)
    lines = [LINE, staged, dataclasses.replace(LINE, count=3), dataclasses.replace(staged, each=4)]
    assert [(line.count, line.each) for line in joined(lines)] == [(5, None), (4, 5)]


@pytest.mark.parametrize(
    ("bytes_", "told"),
    [
        ({}, ""),
        ({"kept": 100}, "kept for backwards on each device: 3 x 100 B from F: 300 B"),
        (
            {"kept": 100, "left": 30},
            "kept for backwards on each device: 3 x 100 B from F, 2 x 30 B from B for W: 360 B",
        ),
    ],
    ids=["inputs", "what F made", "what B leaves W"],
)
def test_stages_tell_what_they_keep(bytes_, told):
    staged = Staged("stage", generate("zero_bubble", 2, 4), **bytes_)
    assert staged.keeps == told
    assert (
        staged.document()["says"] == staged.says == [f"{staged.table}, 14.3 % idle in lock-step", *filter(None, [told])]
    )


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (
            Left(CAUSE, "rev", ("data",), 1, True),
            "a.yaml:7  mlp  forward  rev over data (model.py:12): not asked for, decided by the compiler",
        ),
        (
            Left(Cause(), "rev", ("data",), 2, False),
            "-  -  forward  ? x 2 x rev over data: not asked for, decided by the compiler",
        ),
        (ChosenStrategy(PLACE, "mlp", "row=data", "model.py:12"), "a.yaml:7  mlp  chosen: row=data  (model.py:12)"),
        (ChosenStrategy(None, "mlp", "row=data"), "-  mlp  chosen: row=data"),
        (Unused(PLACE, "mlp"), "a.yaml:7  mlp  unused: nothing in this program is under it"),
        (Unused(None, "mlp"), "-  mlp  unused: nothing in this program is under it"),
    ],
    ids=["left", "left of no signal", "choice", "choice without places", "unused", "unused without a place"],
)
def test_a_remark_is_one_line(entry, told):
    assert str(entry) == told


def test_choices_are_one_wherever_they_are_made():
    assert ChosenStrategy(PLACE, "mlp", "row=data", "model.py:12") == ChosenStrategy(
        PLACE, "mlp", "row=data", "model.py:13"
    )
