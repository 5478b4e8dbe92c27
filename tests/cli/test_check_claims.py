"""`jshard check` of a model that names no signal: who claims what, as docs/claims.md shows it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from jshard.cli import main
from jshard.signals.active_config import unload

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
MODEL, YAML, CONSOLE = (
    re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    for language in ("python", "yaml", "console")
)

DATA = """

def data():
    tokens = jnp.arange(512).reshape(64, 8) % 128
    return {"train": (tokens, tokens)}
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "decoder", raising=False)  # the tests have a module of that name as well
    Path("decoder.py").write_text(MODEL + DATA)
    Path("decoder.yaml").write_text(YAML)

    def checked(*words):
        status = main(["check", "decoder.yaml", *words])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    yield checked
    unload()
    sys.modules.pop("decoder", None)


def test_check_lists_claims_as_the_page_says(check):
    _, *lines = CONSOLE.splitlines()
    assert check("--claims") == (0, lines, [])


def test_check_of_an_experiment_counts_claims_and_lists_what_lies_whole_and_need_not(check):
    status, out, err = check("jshard.train.data=decoder:data", "keys.expect.all_gather=0")
    assert (status, err) == (0, [])
    assert out[-3:] == [
        "29 parameters are claimed: rest 5, keys 8, out 8, queries 8",
        "decoder.yaml:6  out  whole: layers/*/out/bias x 4 float32[32], 512 B on each device; would be split by store: data (32 in 2)",
        "1 of 1 expectations hold",
    ]


def test_check_has_a_row_for_each_claim(check):
    experiment = "jshard.train.data=decoder:data", "out.store=data", "keys.sequence=kv"
    status, out, err = check(*experiment)
    assert (status, err) == (0, [])
    (bias,) = [line for line in out if "out/bias x 4" in line and "whole:" not in line]
    assert bias.endswith("replicated, as a bias of a reduction must be")
    (kernel,) = [line for line in out if "k/kernel x 4" in line]
    assert "column: kv, sequence: kv" in kernel and kernel.endswith("sequence: nothing sums over kv")
    (document,) = json.loads("\n".join(check(*experiment, "--json")[1]))["configurations"]
    assert [row["differs"] for row in document["asked"] if row["parameter"] == "layers/*/out/bias"] == [
        "replicated, as a bias of a reduction must be"
    ]


def test_check_tells_what_claims_lack(check):
    status, out, err = check("--claims", 'keys.match=["layers/*/kay/**"]', "rest.match=[]")
    assert status == 2 and not any("parameters are claimed" in line for line in out)
    assert err == [
        'signal "keys" (the command line) has match "layers/*/kay/**", which fits no parameter; write k, '
        'norm, out or q after "layers/*"',
        'no signal of decoder.yaml claims 13 of 29 parameters: "embed/embedding", "layers/0/k/bias", "layers/0/k/kernel" and 10 '
        'more; claim them, or write rest: {match: ["**"]}',
    ]


def test_check_has_the_claims_in_its_document(check):
    (configuration,) = json.loads("\n".join(check("--claims", "--json")[1]))["configurations"]
    assert len(configuration["claims"]) == 29
    assert configuration["claims"][0] == {
        "place": "decoder.yaml:7", "signal": "rest", "path": "embed/embedding", "array": "float32[128,32]", "match": "**",
    }  # fmt: skip
    assert configuration["holds"] == ["29 parameters are claimed: rest 5, keys 8, out 8, queries 8"]


def test_check_of_claims_without_a_model_is_one_sentence(check):
    Path("decoder.yaml").write_text("jshard: {mesh: {data: 2}}\na: {match: '**'}\n")
    assert check("--claims")[::2] == (
        2,
        ["--claims lists the parameters of a model, and decoder.yaml names none; write model: examples.digits:Model under "
         "jshard.train"],
    )  # fmt: skip
    assert check()[::2] == (0, [])


SCOPED = """
import jax.numpy as jnp
from flax import nnx

import jshard


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        with jshard.signal("up"):
            x = nnx.relu(self.up(x))
        with jshard.signal("down"):
            return self.down(x)


def data():
    return {"train": (jnp.ones((16, 8)), jnp.zeros(16, jnp.int32))}
"""


def test_check_and_explain_claim_by_the_signals_around_calls(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("scoped.py").write_text(SCOPED)
    head = "jshard: {mesh: {data: 2, tensor: 4}, train: {model: scoped:Model, data: scoped:data, batch: 8}}\n"
    Path("tp.yaml").write_text(head + "up: {row: data, column: tensor}\ndown: {row: data, reduction: tensor}\n")
    assert main(["check", "tp.yaml", "--claims"]) == 0
    assert "4 parameters are claimed: down 2, up 2" in capsys.readouterr().out
    assert main(["explain", "tp.yaml"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"tp.yaml:2  up +column: tensor +up/kernel +float32\[8,32\] +\[-, tensor\]", out), out
