"""`module:function` with `--args` in place of an experiment: what a command says of it is what Python says, and what goes
wrong is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard.cli import main
from jshard.inspect.plan.planning import mesh_on, moved_to
from jshard.inspect.plan.topology import Topology
from jshard.layers.creating import abstract
from jshard.signals.active_config import unload

MODULE = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import jshard

def model():
    return jshard.MLP(8, 16, 8, use_bias=False, rngs=nnx.Rngs(0))

def trained():
    made = model()
    return made, jshard.Optimizer(made, optax.adam(1e-3))

def wide():
    return jshard.MLP(1_000_000, 1_000_000, 8, use_bias=False, rngs=nnx.Rngs(0))

def batch():
    return jax.ShapeDtypeStruct((8, 8), jnp.float32)

def mixed():
    return {"x": jnp.ones((8, 8)), "scale": 2.0}, "mean"

def loss(model, x):
    return jshard.mean(model(x) ** 2)

def other_loss(model, x):
    return jshard.mean(model(x) ** 3)

def step(model, optimizer, x):
    value, gradients = nnx.value_and_grad(lambda model: loss(model, x))(model)
    optimizer.update(model, gradients)
    return value

def named(model, batch, reduction):
    assert reduction == "mean" and batch["scale"] == 2.0
    return loss(model, batch["x"])

def dropped(model, x, key):
    return loss(model, x * jax.random.bernoulli(key, 0.5, x.shape))

def alone():
    return jnp.zeros(3)

def fails(model, x):
    with jshard.signal("up"):
        return model(x) + jnp.ones(3)

def grow(n):
    return n

def breaks():
    raise OSError("the disk is gone")

class Thing:
    pass

number = 3
weights, x = {"w": jnp.ones((8, 8))}, np.ones((8, 8), np.float32)

def product(params, x):
    return jnp.mean(x @ params["w"])
"""
YAML = """jshard:
  mesh: {data: 2, tensor: 4}
up: {row: data, column: tensor}
down: {row: data, reduction: tensor}
"""
ARGS = ["--args", "mine:model", "float32[8,8]@data"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """With a module `mine` and a configuration; nothing of them stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("jshard.cli.experiment.pretend", lambda count, platforms: None)  # this process has its devices
    monkeypatch.setenv("JSHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JSHARD_CONFIG", raising=False)
    sys.modules.pop("mine", None)  # another test's
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "mlp.yaml").write_text(YAML)
    (tmp_path / "rows.yaml").write_text(YAML.replace("row: data, reduction: tensor", "row: data"))
    yield
    sys.modules.pop("mine", None)
    unload()


def typed(capsys, *words: str) -> tuple[int, str, str]:
    """The exit status, stdout, and stderr without the line about pretended devices."""
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, "\n".join(line for line in err.splitlines() if "pretending" not in line)


def test_function_is_explained_as_python_explains_it(capsys):
    status, out, err = typed(capsys, "explain", "mine:loss", "--config", "mlp.yaml", *ARGS)
    assert (status, err) == (0, "")
    jshard.load("mlp.yaml")
    import mine  # pyright: ignore[reportMissingImports]

    x = jax.device_put(np.ones((8, 8), np.float32), jax.NamedSharding(jshard.mesh(), jax.P("data")))
    assert out == f"{jshard.explain(mine.loss, mine.model(), x)}\n"
    assert out.splitlines()[0].split()[:4] == ["mlp.yaml:4", "down", "forward", "all_reduce"]


def test_function_needs_no_array_and_no_device(capsys):
    words = ["mine:loss", "jshard.mesh.tensor=1000", "--config", "mlp.yaml"]
    status, out, _ = typed(capsys, "explain", *words, "--args", "mine:wide", "float32[8,1000000]")
    assert status == 0 and " over tensor (1000) " in out


def test_function_takes_the_parts_of_a_tuple_as_arguments(capsys):
    status, out, _ = typed(
        capsys, "explain", "mine:step", "--config", "mlp.yaml", "--args", "mine:trained", "mine:batch"
    )
    assert status == 0
    assert "memory: 1,032 B at rest per device" in out


def test_function_takes_arrays_models_and_trees_by_their_names(capsys):
    Path("other.py").write_text(f"{MODULE}\nmade = model()\n")
    expected = typed(capsys, "explain", "mine:loss", "--config", "mlp.yaml", "--args", "mine:model", "mine:x")
    assert expected[0] == 0
    words = "explain", "other:loss", "--config", "mlp.yaml", "--args", "other:made", "other:x"
    assert typed(capsys, *words) == expected
    status, out, err = typed(
        capsys, "explain", "mine:product", "--config", "mlp.yaml", "--args", "mine:weights", "mine:x"
    )
    assert (status, err) == (0, "") and out.endswith("total: no collectives\n")


def test_function_is_handed_what_is_no_array_as_it_is(capsys):
    status, out, err = typed(
        capsys, "explain", "mine:named", "--config", "mlp.yaml", "--args", "mine:model", "mine:mixed"
    )
    assert (status, err) == (0, "")
    assert "down" in out


def test_function_finds_its_configuration_in_the_environment_and_takes_changes(capsys, monkeypatch):
    monkeypatch.setenv("JSHARD_CONFIG", "mlp.yaml")
    _, out, _ = typed(capsys, "explain", "mine:loss", *ARGS, "up.column=[]", "down.reduction=[]")
    assert "tensor" not in out
    _, out, _ = typed(capsys, "explain", "mine:alone")
    assert out == "mlp.yaml:3  up  unused: nothing in this program is under it\n" + (
        "mlp.yaml:4  down  unused: nothing in this program is under it\ntotal: no collectives\n"
    )


def test_function_keeps_its_configuration_whatever_its_module_loads(capsys):
    Path("rows.py").write_text(f"import jshard\njshard.load('rows.yaml')\n{MODULE}")
    _, out, _ = typed(capsys, "explain", "rows:loss", "--config", "mlp.yaml", "--args", "rows:model", "float32[8,8]")
    assert "mlp.yaml:4" in out and "rows.yaml" not in out


@pytest.mark.seconds
def test_function_is_planned_as_python_plans_it(capsys):
    status, out, _ = typed(capsys, "plan", "mine:loss", "--config", "mlp.yaml", *ARGS, "--json")
    document = json.loads(out)
    assert (status, document["topology"]["name"], document["wire"]["asked"]) == (0, "cpu:8", 644)
    import mine  # pyright: ignore[reportMissingImports]

    with moved_to(away := mesh_on(Topology.of("cpu:8"), jshard.load("mlp.yaml"))):
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.NamedSharding(away, jax.P("data", None)))
        made = jshard.plan(mine.loss, abstract(mine.model), x, topology="cpu:8")
    assert made.cached and json.loads(made.to_json())["program"] == document["program"]


@pytest.mark.seconds
def test_function_is_verified_on_numbers_of_those_shapes(capsys):
    words = ["mine:dropped", "--config", "mlp.yaml", "--args", "mine:model", "float32[8,8]@data", "key[]"]
    status, out, err = typed(capsys, "verify", *words, "--mesh", "data=4,tensor=2")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].startswith("EQUAL on {data: 2, tensor: 4}, {data: 4, tensor: 2} and on one device: ")


def test_function_has_a_baseline_of_its_own_and_holds_promises(capsys):
    words = ["mine:loss", "--config", "mlp.yaml", *ARGS]
    _, out, _ = typed(capsys, "check", *words, "--update")
    assert out.splitlines()[-1].startswith("mlp.mine.loss.baseline is written: 5 collectives, 644 B on the wire")
    command = "jshard check mine:loss --config mlp.yaml --args mine:model 'float32[8,8]@data'"
    assert Path("mlp.mine.loss.baseline").read_text().splitlines()[0].endswith(f"Held by: {command}")
    assert typed(capsys, "check", *words)[1].splitlines()[-1] == "as mlp.mine.loss.baseline holds"
    status, _, err = typed(capsys, "check", *words, "down.reduction=[]", "up.expect.all_reduce=9")
    assert status == 1
    assert err.splitlines() == [
        'signal "up" (the command line) expects 9 all_reduce, and 2 are asked for; write all_reduce: 2, or see jshard explain',
        'signal "down" (mlp.yaml:4) asks for 1 more all_gather over tensor in forward than mlp.mine.loss.baseline, 192 B on '
        f"the wire; accept it: {command} --update",
        'signal "down" (mlp.yaml:4) asks for 384 B more on the wire by all_reduce over data in backward than '
        f"mlp.mine.loss.baseline; accept it: {command} --update",
    ]


def test_function_without_an_optimizer_has_no_budget_to_hold(capsys):
    status, out, _ = typed(capsys, "check", "mine:loss", "jshard.budget=1KiB", "--config", "mlp.yaml", *ARGS)
    assert (status, out.splitlines()[-1]) == (
        0, "the budget is not checked: without an optimizer among the arguments, memory at rest is unknown",
    )  # fmt: skip
    words = ["mine:step", "jshard.budget=1KiB", "--config", "mlp.yaml", "--args", "mine:trained", "mine:batch"]
    status, _, err = typed(capsys, "check", *words)
    assert status == 1 and err.startswith("jshard.budget (the command line) is 1,024 B, and 1,032 B are at rest")


def test_function_has_a_page(capsys):
    words = ["mine:step", "--config", "mlp.yaml", "--args", "mine:trained", "mine:batch"]
    assert typed(capsys, "report", *words, "-o", "page.html")[0] == 0
    assert "<svg" in Path("page.html").read_text()


@pytest.mark.slow
def test_function_is_compared_with_itself_at_another_commit(capsys):
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], check=True, capture_output=True)

    git("init", "-q")
    git("add", "mine.py", "mlp.yaml")
    git("commit", "-qm", "one")
    words = ["git:HEAD:mine:loss", "mine:loss", "--config", "mlp.yaml", *ARGS]
    Path("mlp.yaml").write_text(f"# a remark\n{YAML.replace(', reduction: tensor', '')}")
    status, out, err = typed(capsys, "diff", *words)
    assert (status, err) == (1, "")
    assert out.splitlines()[0].startswith("~ HEAD:mlp.yaml:4 -> mlp.yaml:5  down")
    assert typed(capsys, "diff", "git:HEAD:mine:los", *words[1:]) == (
        2, "", 'at HEAD, "mine:los" names a function, but mine has no "los"; did you mean "mine:loss"?',
    )  # fmt: skip


MIXED = [
    (
        ["mine:loss", "rows.yaml"],
        "jshard diff compares two of a kind, and mine:loss is a function, rows.yaml a configuration; type: jshard diff "
        "mine:loss --config rows.yaml --config configs/other.yaml",
    ),
    (["mlp.yaml", "rows.yaml", "--args", "float32[8]"], "--args is for a function, and mlp.yaml is a configuration; remove --args"),
    (
        ["mine:loss", *["--config", "mlp.yaml"] * 3],
        "--config is given 3 times; give it once, or once for each side",
    ),
    (
        ["mine:loss", "mine:other_loss", *ARGS],
        'the function "mine:loss" has no configuration; add --config configs/mlp.yaml, or set JSHARD_CONFIG',
    ),
    (
        ["git:HEAD:mine:loss", "mlp.yaml"],
        "jshard diff compares two of a kind, and git:HEAD:mine:loss is a function, mlp.yaml a configuration; type: jshard diff "
        "git:HEAD:mine:loss --config mlp.yaml --config configs/other.yaml",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), MIXED, ids=[" ".join(words)[:50] for words, _ in MIXED])
def test_diff_of_what_can_not_be_compared_is_one_sentence(capsys, words, sentence):
    assert typed(capsys, "diff", *words) == (2, "", sentence)


MISTAKES = [
    (
        ["mine:fails", *ARGS],
        f"mine.py:{MODULE[: MODULE.index('return model(x) + jnp.ones(3)')].count(chr(10)) + 1} (in fails, under signal "
        '"up" (mlp.yaml:3)) fails while it is traced: ValueError: Incompatible shapes for broadcasting: shapes=[(8, 8), '
        f"(3,)]; fix mine.py:{MODULE[: MODULE.index('return model(x) + jnp.ones(3)')].count(chr(10)) + 1}",
    ),
    (["mine:los", *ARGS], '"mine:los" names a function, but mine has no "los"; did you mean "mine:loss"?'),
    (
        ["nowhere:loss", *ARGS],
        '"nowhere:loss" names a function, but there is no module "nowhere" in this folder or among the installed packages; '
        "write nowhere.py, or start from the folder that holds it",
    ),
    (["mine:number"], '"mine:number" names a function, but that is an int; name a class or a function'),
    (["mine:Thing"], '"mine:Thing" names a class; name a function that calls it'),
    (
        ["mine:loss", "--args", "mine:model"],
        "mine:loss takes model, x, and is given 1 argument; write one word for each argument after --args, such as float32[64,784], "
        "float32[64,784]@data or train:model",
    ),
    (
        ["mine:alone", "--args", "int32[3]"],
        "mine:alone takes nothing, and is given 1 argument; write one word for each argument after --args, such as float32[64,784], "
        "float32[64,784]@data or train:model",
    ),
    (
        ["mine:loss", "--args", "mine:model", "flot32[8]"],
        '--args "flot32[8]" has the dtype "flot32", which jshard does not know; did you mean "float32"?',
    ),
    (
        ["mine:loss", "--args", "mine:model", "f4[8]"],
        '--args "f4[8]" has the dtype "f4", which jshard does not know; use float32, bfloat16, float16, int32 or another of '
        "JAX",
    ),
    (
        ["mine:loss", "--args", "mine:model", "float32(8)"],
        '--args "float32(8)" is neither a shape nor a function; write it like float32[64,784], float32[64,784]@data or '
        "train:model",
    ),
    (
        ["mine:loss", "--args", "mine:model", "float32[8,,8]"],
        '--args "float32[8,,8]" has an empty size; write it like float32[64,784], float32[64,784]@data or train:model',
    ),
    (
        ["mine:loss", "--args", "mine:model", "float64[8,8]"],
        '--args "float64[8,8]" is 64 bits wide, and JAX runs in 32; write float32[8,8], or set JAX_ENABLE_X64=1',
    ),
    (
        ["mine:loss", "--args", "mine:model", "float32[8,8]@dta"],
        '--args "float32[8,8]@dta" names mesh axis "dta", which is not in jshard.mesh (mlp.yaml:2: data, tensor); did you '
        'mean "data"?',
    ),
    (
        ["mine:loss", "--args", "mine:model", "float32[7,8]@data"],
        '--args "float32[7,8]@data" splits axis 0 of size 7 over mesh axis "data" of size 2; use 6 or 8, or pad',
    ),
    (
        ["mine:loss", "--args", "mine:model", "float32[8]@None,data"],
        '--args "float32[8]@None,data" lays out 2 axes, but the array (8,) has 1; give 1 axes',
    ),
    (
        ["mine:loss", "--args", "mine:modle", "float32[8,8]"],
        '--args "mine:modle" names a function, but mine has no "modle"; did you mean "mine:model"?',
    ),
    (
        ["mine:loss", "--args", "mine:grow"],
        '--args "mine:grow" is called without arguments, and needs "n"; write a function around it that takes none',
    ),
    (
        ["mine:loss", "--args", "mine:breaks"],
        f"mine.py:{MODULE[: MODULE.index('raise OSError')].count(chr(10)) + 1} (in breaks) fails while mine:breaks is called: "
        f"OSError: the disk is gone; fix mine.py:{MODULE[: MODULE.index('raise OSError')].count(chr(10)) + 1}",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), MISTAKES, ids=[" ".join(words)[:50] for words, _ in MISTAKES])
def test_function_mistake_is_one_sentence(capsys, words, sentence):
    assert typed(capsys, "explain", *words, "--config", "mlp.yaml") == (2, "", sentence)


def test_function_that_fails_in_tracing_is_the_same_sentence_for_every_command(capsys):
    words = ["mine:fails", "--config", "mlp.yaml", *ARGS]
    told = {typed(capsys, name, *words) for name in ("explain", "plan", "check", "verify", "report")}
    line = MODULE[: MODULE.index("return model(x) + jnp.ones(3)")].count("\n") + 1
    assert {(status, err) for status, _, err in told} == {
        (
            2,
            f'mine.py:{line} (in fails, under signal "up" (mlp.yaml:3)) fails while it is traced: ValueError: Incompatible '
            f"shapes for broadcasting: shapes=[(8, 8), (3,)]; fix mine.py:{line}",
        )
    }


def test_module_that_fails_when_it_is_imported_is_one_sentence(capsys):
    Path("broken.py").write_text("one = 1\ntwo = one / 0\n")
    assert typed(capsys, "explain", "broken:loss", "--config", "mlp.yaml") == (
        2, "", "broken.py:2 (in <module>) fails while broken is imported: ZeroDivisionError: division by zero; fix broken.py:2",
    )  # fmt: skip


def test_function_without_a_configuration_is_one_sentence(capsys):
    assert typed(capsys, "explain", "mine:loss", *ARGS) == (
        2, "", 'the function "mine:loss" has no mesh; add --on data=4,tensor=2, or --config configs/mlp.yaml',
    )  # fmt: skip


@pytest.mark.parametrize(("option", "word"), [("--args", "float32[8]"), ("--config", "rows.yaml")])
def test_configuration_takes_no_words_of_a_function(capsys, option, word):
    assert typed(capsys, "explain", "mlp.yaml", option, word) == (
        2,
        "",
        f"{option} is for a function, and mlp.yaml is a configuration; remove {option}, or type: jshard explain "
        "module:function --config mlp.yaml",
    )
