"""`configs/adopt/`: each file is one that a user can start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jshard.cli import main
from jshard.signals.config import Configuration, load_configuration
from jshard.signals.globs import OTHERS, narrowed
from tests.support import linen_models
from tests.support.other_models import MODELS, TINY, is_installed

FOLDER = Path(__file__).parents[1] / "configs" / "adopt"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_file_to_start_from_claims_every_parameter(path):
    found = load_configuration(path)
    assert found.has_claims and found.devices == 8
    globs = [glob for signal in found.signals.values() for glob in signal.match]
    assert globs.count(OTHERS) == 1
    assert all(signal.match for signal in found.signals.values())
    assert len(set(globs)) == len(globs)
    assert not any(one == "" for glob in globs for one, _ in narrowed(glob))
    row = {signal.row for signal in found.signals.values() if signal.shard is None}
    assert row == {("data",)}
    assert all(signal.store == ("data",) for signal in found.signals.values())


@pytest.mark.usefixtures("in_the_root")
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_file_to_start_from_is_checked(path, capsys):
    assert main(["check", str(path), "--trust"]) == 0
    is_our_own = path.stem == "transformer"
    assert ("parameters are claimed: " in capsys.readouterr().out) == is_our_own


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_root")
def test_a_small_cnn_learns_the_same_under_three_files(tmp_path, capsys):
    found = {}
    for name in ("data", "fsdp", "tensor"):
        output = tmp_path / name
        assert main(["train", f"configs/cnn/{name}.yaml", "steps=6", "log.every=2", f"output={output}"]) == 0
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        found[name] = [line["loss"] for line in lines if "loss" in line]
    capsys.readouterr()
    assert len(found["data"]) == 3
    np.testing.assert_allclose(found["fsdp"], found["data"], rtol=1e-4)
    np.testing.assert_allclose(found["tensor"], found["data"], rtol=1e-4)


def said(configuration: Configuration) -> dict[str, tuple[object, ...]]:
    """Where each glob's parameters lie, but for `store`, which a plan of its own has."""
    signals = configuration.signals.values()
    return {glob: (each.column, each.reduction, each.shard) for each in signals for glob in each.match}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_says_what_its_model_is_tested_under(name):
    plans = MODELS[name].plans
    plan = next(plans[each] for each in ("tensor and fsdp", "two heads for keys", "fsdp") if each in plans)
    file = {"qwen3-kv2": "qwen3-kv"}.get(name, name)
    assert said(load_configuration(FOLDER / f"{file}.yaml")) == said(load_configuration(plan))


@pytest.mark.parametrize("name", linen_models.MODELS)
def test_a_file_says_what_its_linen_model_is_tested_under(extra, name):
    extra(linen_models.package(name))
    plans = linen_models.MODELS[name]().plans()
    plan = plans.get("tensor and fsdp", plans["fsdp"])
    assert said(load_configuration(FOLDER / f"{name.replace('_', '-')}.yaml")) == said(load_configuration(plan))


def qwen3(*, rngs: nnx.Rngs) -> nnx.Module:
    """Tunix's Qwen3, called with tokens alone, as `jshard train` calls a model."""
    first: Any = MODELS["qwen3"].make(TINY)

    class OfTokens(type(first)):
        def __call__(self, tokens: jax.Array) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
            return super().__call__(tokens, positions, None, jnp.broadcast_to(mask, (len(tokens), *mask.shape)))[0]

    return OfTokens(first.config, rngs=rngs)


def tokens() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    text = np.random.default_rng(0).integers(0, TINY.words, (16, 9)).astype(np.int32)
    return {"train": (text[:, :-1], text[:, 1:])}


@pytest.mark.usefixtures("in_the_root")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_qwen3_is_trained_by_its_file_with_the_losses_of_one_device(extra, tmp_path, capsys):
    if not is_installed("tunix"):
        extra("tunix")
    (tmp_path / "alone.yaml").write_text("jshard: {mesh: {data: 1}}")
    found = []
    for path in ("configs/adopt/qwen3.yaml", tmp_path / "alone.yaml"):
        output = tmp_path / f"{len(found)}"
        named = ["jshard.train.model=test_adopt:qwen3", "jshard.train.data=test_adopt:tokens", f"output={output}"]
        assert main(["train", str(path), *named, "batch=8", "steps=3", "log.every=1"]) == 0
        found.append([json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()])
    capsys.readouterr()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
