"""What a plan says of a program: each equation is decided once a pass, and `explain --why` prints decision and reason."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard.cli import main
from jshard.layers.partition.lookup import WHERE_IT_RESTS
from jshard.layers.partition.plan import key_of, steps
from jshard.layers.partition.planner import Planner
from jshard.layers.partition.run import Run
from jshard.layers.sharded_call import Call
from jshard.programs.jaxprs import bare
from jshard.signals import active_config as current
from jshard.training.experiments.experiment import Experiment
from tests.support.partitioned import built

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = (
    "model.width=32", "model.depth=4", "model.heads=4", "model.hidden=64", "data.length=32", "data.text=english", "batch=8",
)  # fmt: skip


@pytest.fixture
def english(tmp_path, monkeypatch):
    (tmp_path / "english").mkdir()
    (tmp_path / "english/0.txt").write_text("one is followed by two.\n" * 40)
    monkeypatch.chdir(tmp_path)


@pytest.mark.quick("pipe-1f1b.yaml-3")
@pytest.mark.parametrize(("file", "passes"), [
    ("lm/english.yaml", 2),  # where parameters lie, and how the program runs on them
    ("pipe-1f1b.yaml", 3),  # and how one stage does
])  # fmt: skip
def test_each_equation_is_decided_once_a_pass(file, passes, english, monkeypatch):
    decided, programs, inside = collections.Counter(), collections.Counter(), []
    equation, program = Planner.equation, Planner.program

    def counted(self, eqn, values):
        inside.append(key_of(eqn))
        decided[self, tuple(inside)] += 1
        try:
            return equation(self, eqn, values)
        finally:
            inside.pop()

    def started(self, jaxpr, values):
        programs[tuple(bare(jaxpr).invars)] += not inside
        return program(self, jaxpr, values)

    monkeypatch.setattr(Planner, "equation", counted)
    monkeypatch.setattr(Planner, "program", started)
    Experiment.build(current.load(CONFIGS / file, [*SMALL, "_split.store=data"]), current.mesh()).lowered()
    assert set(decided.values()) == {1}
    assert max(programs.values()) == passes


def test_a_run_that_splits_an_array_otherwise_than_its_step_is_no_run():
    """The plan is a second account of the run: where they differ, one of them is wrong, and no number comes out."""
    x = np.ones((8, 16), np.float32)
    jshard.load({"jshard": {"mesh": {"data": 8}}, "all": {"row": "data", "match": ["**"]}})
    call = Call(lambda params, x: jnp.tanh(x @ params["kernel"]), ({"kernel": np.ones((16, 4), np.float32)}, x), {})
    key, step = next((key, step) for key, step in call.program.plan.items() if step.choice)
    call.program.plan = {**call.program.plan, key: dataclasses.replace(step, results=(((), ()),))}
    with pytest.raises(AssertionError):
        call.run("f")


LINES = """\
blocks/mlp/up/kernel, float32[4,256,640], claimed by columns (configs/lm/english.yaml:27: column: tensor)
  split over tensor (axis 2); first used by dot_general
"""


@pytest.mark.parametrize(("file", "times"), [
    ("lm/english.yaml", {1: 10}),
    ("pipe-1f1b.yaml", {2: 9, 3: 1}),  # to find what parameters vary over, and for a chunk; the head also for its types
])  # fmt: skip
def test_each_product_is_run_once_a_trace(file, times, english, monkeypatch):
    ran, run = collections.Counter(), Run.equation

    def counted(self, eqn, parts, step):
        if eqn.primitive.name == "dot_general":
            ran[key_of(eqn)] += 1
        return run(self, eqn, parts, step)

    monkeypatch.setattr(Run, "equation", counted)
    Experiment.build(current.load(CONFIGS / file, [*SMALL, "_split.store=data"]), current.mesh()).lowered()
    assert collections.Counter(ran.values()) == times


@pytest.mark.quick(2)
@pytest.mark.parametrize(("word", "found"), [
    ("up/kernel", LINES), ("blocks/mlp/u*/kernel", LINES),
    ("*/up/bias", "'*/up/bias' is not a claimed parameter of this program; write one of "),
    ("model.py:12", "'model.py:12' is not a source line of an equation of this program; name a model "),
])  # fmt: skip
def test_why_a_parameter_lies_as_it_does_is_printed(word, found, capsys, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    assert main(["explain", "configs/lm/english.yaml", "--why", word]) == (found is not LINES) * 2
    out, err = capsys.readouterr()
    assert found.replace("'", '"') in out + err


def test_how_the_equations_of_a_line_are_split_is_printed(capsys, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    assert main(["explain", "configs/adopt/transformer.yaml", "--trust", "--why", "adopted.py:25"]) == 0
    rows = capsys.readouterr().out
    at = lambda line: f'signal "{line[0]}" (configs/adopt/transformer.yaml:{line[1]}) splits its parameter'
    columns, sums = at(("columns", 15)), at(("sums", 16))
    assert (
        f"dot_general [data, -, -], [-, tensor] -> [data, -, tensor]: tensor as {columns}; data as operand 0 is split  x 2"
        in rows
    )
    assert f"tensor as {sums}; data as operand 0 is split; summed over tensor  x 2" in rows
    assert "reshape [tensor] -> [-, -, tensor]: created where it is used, split as that use needs" in rows


@pytest.mark.quick(1)
@pytest.mark.parametrize(("word", "sentence"), [
    ("adopted.py:25", 'axis_types: auto leaves the equations of "adopted.py:25" to XLA, so jshard does not know how they are split; '
     "write axis_types: explicit under jshard, or name a parameter"),
    ("u/kernel", '"u/kernel" is not a claimed parameter of this program; write one of '),
])  # fmt: skip
def test_what_is_left_to_xla_has_no_plan(word, sentence, capsys, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    words = ["explain", "configs/adopt/transformer.yaml", "--trust", "jshard.axis_types=auto", "--why", word]
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_steps_are_of_all_equations_also_where_a_table_is_read_where_it_rests(mesh):
    table, places = np.zeros((64, 32), np.float32), np.zeros((8, 2), np.int32)
    claim = {"row": "data", "reduction": "tensor", "store": "data"}
    program, _ = built(mesh(data=2, tensor=4), lambda w, at: w[at], [table, places], [claim, (("data",), ())])
    found = [step.how for eqn, step in steps(program.jaxpr, program.plan) if eqn.primitive.name == "gather"]
    assert found == [WHERE_IT_RESTS]
