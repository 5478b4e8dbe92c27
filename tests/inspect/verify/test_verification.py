"""How verify prints what it found: the verdict, what is wrong, a row for blocks that repeat, and the probes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jshard
from jshard.inspect.ledger import Ledger
from jshard.inspect.verify.verification import Finding, Verification
from jshard.programs.provenance import Cause

PLAN = """\
jshard: {mesh: {data: 2, tensor: 2}}
wide: {row: data, column: tensor, match: ["blocks_*/{qkv,fc1}/kernel"]}
sums: {row: data, reduction: tensor, match: ["blocks_*/{out,fc2}/kernel"]}
rest: {row: data, match: ["**"]}
"""
X = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
TX = optax.adam(1e-3)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("vit.yaml").write_text(PLAN)
    jshard.load("vit.yaml")
    yield
    jshard.unload()


def params(blocks):
    """Those of a Linen ViT, whose MLP has two layers of one shape."""
    kernel = lambda key, *shape: {"kernel": jax.random.normal(jax.random.key(key), shape) / 4}
    block = lambda n: {"qkv": kernel(n, 8, 24), "out": kernel(n, 8, 8), "fc1": kernel(n, 8, 8), "fc2": kernel(n, 8, 8)}
    return {"patches": kernel(99, 8, 8)} | {f"blocks_{n}": block(n) for n in range(blocks)}


def loss(params, x):
    x = x @ params["patches"]["kernel"]
    for n in range(len(params) - 1):
        block = params[f"blocks_{n}"]
        q, k, v = jnp.split(x @ block["qkv"]["kernel"], 3, -1)
        x = x + jnp.maximum(q @ k.mT, 0) @ v @ block["out"]["kernel"]
        x = x + jnp.maximum(x @ block["fc1"]["kernel"], 0) @ block["fc2"]["kernel"]
    return (x**2).mean()


@jshard.shard
def step(params, state, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    updates, state = TX.update(gradients, state)
    return value, optax.apply_updates(params, updates), state


@pytest.mark.seconds
@pytest.mark.parametrize("blocks", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_verify_has_a_row_for_all_equal_blocks_behind_the_verdict(blocks):
    found = jshard.verify(step, params(blocks), TX.init(params(blocks)), X)
    verdict, *rows, probes = str(found).splitlines()
    assert verdict == f"EQUAL on {{data: 2, tensor: 2}} and on one device: {5 + 12 * blocks} arrays, all bitwise"
    names = [f"{part}['blocks_*']['{layer}']['kernel']" for part in PARTS for layer in ("fc1", "fc2", "out", "qkv")]
    names += [f"{part}['patches']['kernel']" for part in PARTS] + ["step[0]", "step[2][0].count"]
    told = {name.removesuffix(f", {blocks} arrays") for name in (row.split("  ")[2] for row in rows)}
    assert (told, len(rows), sum(f", {blocks} arrays" in row for row in rows)) == ({*names}, 17, 12)
    assert probes.startswith("probes: ")
    assert len(json.loads(found.to_json())["findings"]) == 5 + 12 * blocks


PARTS = "step[1]", "step[2][0].mu", "step[2][0].nu"


def test_explain_of_twelve_blocks_has_the_rows_of_two_and_its_document_every_line():
    two, twelve = (jshard.explain(jshard.shard(loss), params(blocks), X) for blocks in (2, 12))
    assert len(str(two).splitlines()) == len(str(twelve).splitlines()) == 20
    many = "vit.yaml:3  sums  forward all_reduce over tensor (2) 24 x 192 B float32 4,608 B on the wire".split()
    assert many in [line.split() for line in str(twelve).splitlines()]
    assert [each.parameter for each in twelve.claims] == [
        *(f"blocks_*/{name}/kernel" for name in ("fc1", "qkv", "fc2", "out")), "patches/kernel",
    ]  # fmt: skip
    assert len(json.loads(twelve.to_json())["lines"]) == len(twelve.lines) > 150


def test_explain_keeps_rows_apart_that_differ_in_anything_they_show():
    line, *_ = jshard.explain(jshard.shard(loss), params(2), X)
    other = dataclasses.replace(line, shape=(), primitive="same to a reader")
    apart = [
        dataclasses.replace(line, payload=1), dataclasses.replace(line, branches=("branch 1 of 2",)),
        dataclasses.replace(line, mesh_axes=("data",)), dataclasses.replace(line, count_known=False),
        dataclasses.replace(line, cause=dataclasses.replace(line.cause, place=None)),
        *(dataclasses.replace(line, compiler="XLA", cause=Cause(source=source)) for source in ("a.py:1", "a.py:2")),
    ]  # fmt: skip
    *rows, _ = str(Ledger((line, *apart, other, *apart))).splitlines()
    assert len(rows) == len({*rows}) == 1 + len(apart)


def finding(name, verdict="bitwise", off=0.0, **more):
    return Finding({"data": 2}, name, verdict, off, 0.0, "", False, Cause(), **more)


def test_what_is_wrong_is_told_before_what_is_right_and_by_its_name():
    blocks = [finding(f"m.layers_{n}.w after") for n in range(12)]
    blocks[3] = finding("m.layers_3.w after", "differs", 0.5)
    blocks[7] = finding("m.layers_7.w after", stand_ins=("exp",))
    state = [finding(f"o.{n}.mu after", kind="optimizer state") for n in range(3)]
    dropped = [finding(f"o.{name} after", "dropped", kind="optimizer state") for name in ("step", "count")]
    found = Verification((*blocks, *state, *dropped), (), "probes: some", unheld="nobody knows")
    assert str(found).splitlines() == [
        "NOT EQUAL: 3 of 17 arrays differ on {data: 2} and on one device",
        "the changes of a plain call are unknown (because: nobody knows)",
        "-  -  m.layers_3.w after               differs by 0.5",
        "-  -  o.step after                     changes in a plain call, but not in this one",
        "-  -  o.count after                    changes in a plain call, but not in this one",
        "-  -  m.layers_*.w after, 10 arrays    bitwise",
        "-  -  m.layers_7.w after               bitwise (stand-ins: exp)",
        "-  -  optimizer state after, 3 arrays  bitwise",
        "probes: some",
    ]
    assert len(json.loads(found.to_json())["findings"]) == 17
