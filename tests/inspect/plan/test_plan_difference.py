"""Two plans side by side: what runs on either, what it needs, and whether it is the same program by its compiled text."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard
from jshard.cli import main
from jshard.cli.terminal import fitted
from jshard.errors import JShardError
from jshard.inspect.plan import Topology, plan
from jshard.inspect.plan.difference import Moves, Outcome, compare
from jshard.inspect.plan.planning import mesh_on, moved_to
from jshard.signals.active_config import configuration
from tests.support import decoder
from tests.support.outside import users_environment
from tests.support.typed_in import typed_in

YAML = """jshard:
  mesh: {data: 2, tensor: 4}
  topology: cpu:8
up: {row: data, column: tensor}
down: {row: data, reduction: tensor}
"""
ARGS = ["--config", "mlp.yaml", "--args", "planned:model", "float32[8,8]@data"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch, kept_plans):
    with typed_in(tmp_path, "planned", YAML, monkeypatch):
        yield


def runs(place, signal, phase, collective, axis, via, count, wire) -> Moves:
    return Moves(place, signal, phase, collective, (axis,), None, via, count, wire, payload=wire)


def side(label: str = "a.yaml", **more) -> Outcome:
    sizes = more.pop("parts", {"arguments": 1024, "temporaries": 512})
    plain = Outcome(
        label, "v5e:4x4", (runs("a.yaml:4", "down", "forward", "all_reduce", "tensor", "", 2, 2048),), 2048,
        {name: ("", size) for name, size in sizes.items()}, 1536, capacity=4096, seconds=0.02,
        program={"lines": 90, "sha256": "a"},
    )  # fmt: skip
    return dataclasses.replace(plain, **more)


def test_plans_of_one_text_are_the_same_program():
    told = compare(side(), side("b.yaml"))
    assert told.same
    assert str(told) == "same program on v5e:4x4: the compiled text is the same, 90 lines"


def test_plans_are_told_apart_by_what_runs_memory_and_the_model_of_time():
    gathers = runs("b.yaml:9", "down", "forward", "all_gather", "tensor", "redistribute", 2, 3 * 2**20)
    more = runs("b.yaml:7", "up", "backward", "all_reduce", "data", "", 4, 4096)
    old = side(moves=(*side().moves, dataclasses.replace(more, place="a.yaml:7", count=2, wire=1024, payload=1024)))
    new = side(
        "b.yaml", moves=(gathers, more), wire=3 * 2**20 + 4096, memory=5 * 2**20,
        parts={"arguments": 1024, "temporaries": 5 * 2**20 - 1024}, seconds=0.03, program={"lines": 99, "sha256": "b"},
    )  # fmt: skip
    told = compare(old, new)
    assert not told.same
    assert str(told).splitlines() == [
        "~ a.yaml:7 -> b.yaml:7  up    backward  all_reduce  over data    runs 2 -> runs 4      +3,072 B on the wire  (grown)",
        "- a.yaml:4              down  forward   all_reduce  over tensor  runs 2                -2,048 B on the wire  (gone)",
        "+ b.yaml:9              down  forward   all_gather  over tensor  runs 2            +3,145,728 B on the wire  (added, "
        "redistribute)",
        "~ temporaries  +5,241,344 B  (512 B -> 5,241,856 B)",
        "wire: 2,048 B -> 3,149,824 B (3.0 MiB) (+3,147,776 B) per device",
        "memory: 1,536 B -> 5,242,880 B (5.0 MiB) (+5,241,344 B) per device, of 4,096 B: fits -> does not fit",
        "time: 20.0 ms -> 30.0 ms a step (a model, nothing was measured)",
        "differs: 1 all_reduce grown, 1 all_reduce gone, 1 all_gather added (+3.0 MiB), memory changed, on v5e:4x4",
    ]
    assert max(map(len, fitted(str(told), 60).splitlines())) <= 60
    document = json.loads(told.to_json())
    assert (document["schema"], document["same"], document["new"]["capacity"]) == ("jshard.diff/2", False, 4096)
    assert [(each["kind"], each["wire"]) for each in document["changes"]] == [
        ("grown", 3072), ("gone", -2048), ("added", 3 * 2**20),
    ]  # fmt: skip


def test_plans_that_differ_in_their_text_alone_show_its_first_line():
    new = side("b.yaml", program={"lines": 90, "sha256": "b"})
    told = compare(side(), new)
    assert told.is_open and not told.same
    assert dataclasses.replace(told, first=(3, "tanh", "maximum")).summary() == (
        "differs: 3 lines of the compiled text, first 'tanh' -> 'maximum', on v5e:4x4"
    )


def test_plan_that_is_too_large_can_not_be_the_same_program():
    large = {"program": None, "memory": 8192, "parts": {}, "moves": (), "seconds": None}
    told = compare(side(), side("b.yaml", **large))
    assert str(told).splitlines()[-2:] == [
        "memory: 1,536 B -> 8,192 B (+6,656 B) per device, of 4,096 B: fits -> does not fit",
        "unknown difference: b.yaml is too large and was not compiled, on v5e:4x4",
    ]
    assert not compare(side(**large), side("b.yaml", **large)).same


def test_plans_for_other_chips_are_other_programs():
    told = compare(side(), side(topology="v6e:4x4"))
    assert not told.same
    assert str(told).splitlines()[-1] == "differs: the compiled text, on v5e:4x4 -> v6e:4x4"


def planned(text: str = YAML):
    Path("mlp.yaml").write_text(text)
    jshard.load("mlp.yaml")
    with moved_to(mesh_on(Topology.of("cpu:8"), jshard.load("mlp.yaml"))):
        model = nnx.eval_shape(lambda: jshard.MLP(8, 16, 8, use_bias=False, rngs=nnx.Rngs(0)))
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        return plan(lambda model, x: jnp.square(model(x)).mean(), model, x)  # for the topology of the configuration


@pytest.mark.seconds
def test_diff_of_two_plans_is_what_runs_on_either():
    one, same = planned(), planned(YAML.replace("up: {", "# a remark\nup: {"))
    assert jshard.diff(one, same).same
    other = planned(YAML.replace(", reduction: tensor", ""))
    told = jshard.diff(one, other)
    kinds = {(each.kind, (each.new or each.old).signal, (each.new or each.old).collective) for each in told.changes}
    assert {("gone", "down", "all_reduce"), ("added", "down", "all_gather")} <= kinds
    assert told.new.wire == other.comparison.got and told.old.memory == one.memory.needed
    with pytest.raises(JShardError) as mixed:
        jshard.diff(one, "mlp.yaml")
    assert str(mixed.value) == "jshard.diff is given a plan and a path; give two paths, two ledgers or two plans"
    with pytest.raises(JShardError) as twice:
        jshard.diff(one, other, topology="cpu:8")
    assert str(twice.value) == (
        "jshard.diff is given a plan twice and the topology cpu:8; give two paths: only a configuration or a function can be compiled"
    )


def test_plan_without_a_topology_anywhere_is_one_sentence():
    with pytest.raises(JShardError) as told:
        plan(jnp.sum, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert str(told.value) == (
        'jshard.plan needs a topology, and the configuration names none; write topology="v5e:4x4", or topology: v5e:4x4 under jshard '
        "in the configuration"
    )


# -- on the command line --


def typed(capsys, *words: str) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, "\n".join(line for line in err.splitlines() if "pretending" not in line)


@pytest.mark.slow
def test_diff_compiles_for_the_topology_of_the_configuration(capsys):
    status, out, err = typed(capsys, "diff", "planned:loss", "down.reduction=[]", *ARGS)
    assert (status, err) == (1, "")
    assert "wire: " in out and out.endswith(", on cpu:8\n")
    status, out, err = typed(capsys, "diff", "planned:loss", "planned:loss", *ARGS)
    assert (status, err) == (0, "")
    assert out.startswith("same program on cpu:8: the compiled text is the same, ")


def test_diff_compiles_nothing_for_no_topology(monkeypatch):
    """And for one that a single side says, both."""
    typed_words: list[list[str]] = []

    def told(sides, commands):
        typed_words.extend(commands)
        raise JShardError("stop", hint="here")

    monkeypatch.setattr("jshard.training.diff._output", told)
    Path("bare.yaml").write_text(YAML.replace("  topology: cpu:8\n", ""))
    for old, new, said in (
        ("mlp.yaml", "bare.yaml", "none"), ("mlp.yaml", "bare.yaml", None), ("bare.yaml", "mlp.yaml", None),
        ("bare.yaml", "bare.yaml", None), ("bare.yaml", "mlp.yaml", "cpu:4"),
    ):  # fmt: skip
        with pytest.raises(JShardError, match="stop; here"):
            jshard.diff(old, new, topology=said)
    assert typed_words == [
        *[["explain", "--json"]] * 2,
        *[["plan", "--topology", "cpu:8", "--json"]] * 4,
        *[["explain", "--json"]] * 2,
        *[["plan", "--topology", "cpu:4", "--json"]] * 2,
    ]


def test_plan_takes_the_topology_of_the_configuration(capsys):
    _, out, _ = typed(capsys, "plan", "planned:loss", *ARGS, "--json")
    assert json.loads(out)["topology"]["name"] == "cpu:8"
    Path("mlp.yaml").write_text(YAML.replace("cpu:8", "v5x:4x4"))
    assert typed(capsys, "plan", "planned:loss", *ARGS) == (
        2, "",
        'jshard.topology (mlp.yaml:3) is "v5x:4x4", which is no topology: there is no chip "v5x"; use v5e:4x4, v6e:4x4 or '
        "v5p:4x4x8",
    )  # fmt: skip


MISFIT = (
    "jshard.mesh (mlp.yaml:2) has 8 devices, and jshard.topology (mlp.yaml:3), cpu:16, has 16; write topology: cpu:8, or make "
    "its sizes multiply to 16"
)


@pytest.mark.parametrize("name", ["plan", "check", "diff"])
def test_mesh_that_does_not_fit_the_topology_is_told_with_both_lines(capsys, name):
    Path("mlp.yaml").write_text(YAML.replace("cpu:8", "cpu:16"))
    words = ["planned:loss", *(["planned:loss"] if name == "diff" else []), *ARGS]
    status, _, err = typed(capsys, name, *words)
    assert (status, err) == (2, MISFIT)


@pytest.mark.parametrize("name", ["plan", "diff"])
def test_topology_that_means_nothing_lists_near_ones_for_every_command(capsys, name):
    words = ["planned:loss", *(["planned:loss"] if name == "diff" else []), *ARGS]
    assert typed(capsys, name, *words, "--topology", "v5x:4x4") == (
        2, "", '"v5x:4x4" is no topology: there is no chip "v5x"; use v5e:4x4, v6e:4x4 or v5p:4x4x8',
    )  # fmt: skip


@pytest.mark.parametrize("name", ["plan", "diff"])
def test_compiler_that_is_not_installed_is_the_same_sentence_for_every_command(capsys, monkeypatch, name):
    there = jshard.inspect.plan.aot._there
    monkeypatch.setattr(jshard.inspect.plan.aot, "_there", lambda module: module != "libtpu" and there(module))
    words = ["planned:loss", *(["planned:loss"] if name == "diff" else []), *ARGS]
    assert typed(capsys, name, *words, "--topology", "v5e:2x4") == (
        2, "", 'planning for v5e:2x4 needs libtpu, which is not installed; type: pip install "jshard[tpu]"',
    )  # fmt: skip


# -- for chips that are not there --


@pytest.mark.parametrize("name", ["v5e:2x4", "h100:8"])
def test_wrong_axis_in_one_weight_shows_in_what_runs(extra, name):
    extra(name)

    def of_decoder(**signals):
        jshard.load({**decoder.configured(2, 4), **signals})
        with moved_to(mesh_on(Topology.of(name), configuration())):
            step, args = decoder.training_step(decoder.TINY)
            return plan(step, *args, topology=name)

    right = of_decoder()
    assert jshard.diff(right, of_decoder()).same
    split = {"row": "data", "store": "data", "dtype": {"compute": "bfloat16"}}  # and no reduction: tensor
    told = jshard.diff(right, of_decoder(**{"mlp/down": split}))
    assert not told.same
    assert any(
        each.new is not None and each.new.signal == "mlp/down" and each.new.collective == "all_gather" and each.wire > 0
        for each in told.changes
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x4", "h100:8"])
def test_noise_of_compilers_does_not_reach_the_user(extra, name):
    extra(name)
    clean = users_environment(PYTHONPATH=str(Path(jshard.__file__).parent.parent))
    words = [sys.executable, "-m", "jshard", "plan", "planned:loss", *ARGS, "--topology", name]
    done = subprocess.run(words, env=clean, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")
