"""Linen models of other people, unmodified, from the package index: functions of `params`, equal to one device under each plan."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jshard
from jshard.layouts.paths import words_of
from tests.support.linen_models import MODELS, package
from tests.support.other_models import TINY

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # these models take names that JAX is going to remove
KEY = np.zeros(2, np.uint32)
ONE = dataclasses.replace(TINY, layers=1)
PLANS = ["data", "fsdp", "tensor", "tensor and fsdp", "tensor and sequence"]


@pytest.fixture(scope="module")
def alone():
    """A model, its loss and gradients on one device, and the logits of two steps of decoding."""
    found = {}

    def of(extra, name):
        jshard.unload()
        if name not in found:
            extra(package(name))
            model = MODELS[name](ONE)
            step = jax.jit(jax.value_and_grad(model.loss))(model.params, model.batch, KEY)
            found[name] = (
                model,
                jax.device_get(step),
                jax.device_get(model.decoded(jax.jit, model.params)),
            )
        return found[name]

    return of


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "whisper"])
def test_a_model_of_transformers_equals_one_device(extra, alone, name, plan):
    model, (loss, gradients), logits = alone(extra, name)
    jshard.load(model.plans()[plan])
    sharded = jshard.shard(model.loss)
    params = sharded.place(model.params, model.batch, KEY)
    step = jax.jit(jax.value_and_grad(sharded))  # explain finds its trace
    got, found = step(params, model.batch, KEY)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    each = zip(jax.tree_util.tree_flatten_with_path(params)[0], *map(jax.tree.leaves, (gradients, found)), strict=True)
    for (path, parameter), want, gradient in each:
        label = "/".join(words_of(path))
        np.testing.assert_allclose(gradient, want, rtol=0, atol=1e-4 * np.abs(want).max() + 1e-7, err_msg=label)
        assert gradient.sharding == parameter.sharding, label
    for line in jshard.explain(step, params, model.batch, KEY):
        assert line.signal.split("/")[-1] in model.plans()[plan], line
        assert line.collective != "all_gather" or line.cause.key in ("store", "sequence"), line
    for got, want in zip(model.decoded(jshard.shard, params), logits, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ["data", "fsdp"])
def test_nano_moe_generates_the_tokens_of_one_device(extra, plan):
    jshard.unload()
    extra(package("nano_moe"))
    model = MODELS["nano_moe"]()
    prompts = model.batch["x"][:, :5]
    wanted = np.asarray(jax.jit(model.generate)(model.params, KEY, prompts))
    assert wanted.shape == (8, 8)
    jshard.load(model.plans()[plan])
    sharded = jshard.shard(model.generate)
    params = sharded.place(model.params, KEY, prompts)
    got = jax.jit(sharded)(params, KEY, prompts)
    np.testing.assert_array_equal(got, wanted)
    assert got.sharding.spec[0] == "data"
    found = {
        (line.collective, line.cause.key) for line in jshard.explain(sharded, params, KEY, prompts, backward=False)
    }
    assert found == ({("all_gather", "store")} if plan == "fsdp" else set())
