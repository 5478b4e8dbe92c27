"""Other people's models, unmodified, from the package index: equal to one device, at the cost that their plan has by formula."""

from __future__ import annotations

import collections
import functools

import jax
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.inspect.compiled.schedule import wire_bytes
from tests.support.other_models import MODELS, TINY, is_installed

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # these models take names that JAX is going to remove
CASES = [  # `python -m benchmarks.models` runs every model under every plan
    *(("qwen3", plan) for plan in MODELS["qwen3"].plans),
    ("flax-images", "fsdp"),
    ("flax-images", "tensor"),
    ("flax-text", "tensor and fsdp"),
    ("qwen3-kv2", "two heads for keys"),
    ("qwen3-moe", "tensor and fsdp"),
    ("gemma3", "tensor and sequence"),
    ("mamba2", "fsdp"),
    ("mamba3", "fsdp"),
]
ACTIVATIONS = TINY.rows * TINY.tokens * TINY.width * 4 // 2
# All-reduces of them: behind the lookup and two in each layer, and as many backward.
FORMULA = {
    ("qwen3", "tensor"): {("all_reduce", "forward"): 5, ("all_reduce", "backward"): 5},
    ("qwen3", "tensor and sequence"): {
        ("all_gather", "forward"): 5, ("reduce_scatter", "forward"): 5,
        ("all_gather", "backward"): 5, ("reduce_scatter", "backward"): 5,
    },
    ("qwen3", "tensor and fsdp"): {("all_reduce", "forward"): 5, ("all_reduce", "backward"): 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    """What a model's loss and gradients, or its decoding, are on one device."""

    @functools.cache
    def found(name, what):
        adopted = MODELS[name]
        f, args = (
            (adopted.decode, adopted.start())
            if what == "decode"
            else (nnx.value_and_grad(adopted.loss), adopted.batch(TINY))
        )
        jshard.unload()
        return jax.device_get(nnx.jit(f)(adopted.build(), *args))

    return found


def needed(extra, name):
    """A model; the test is skipped where its package is not installed."""
    adopted = MODELS[name]
    if not is_installed(adopted.package):
        extra(adopted.package)
    return adopted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_model_equals_one_device(extra, alone, name, plan):
    adopted = needed(extra, name)
    configuration, batch = adopted.plans[plan], adopted.batch(TINY)
    loss, gradients = alone(name, "loss")
    jshard.load(configuration)
    model, sharded = adopted.build(), jshard.shard(adopted.loss)
    sharded.place(model, *batch)
    step = nnx.jit(nnx.value_and_grad(sharded))  # explain finds its trace
    compiled = step.lower(model, *batch).compile()
    got, found = compiled(model, *batch)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    where = nnx.to_flat_state(nnx.state(model, nnx.Param))
    each = zip(where, nnx.to_flat_state(gradients), nnx.to_flat_state(found), strict=True)
    for (path, parameter), (_, want), (_, gradient) in each:
        wanted = np.asarray(want[...])
        np.testing.assert_allclose(
            gradient[...], wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max(), err_msg=str(path)
        )
        assert gradient.get_value().sharding == parameter.get_value().sharding, path
    ledger = jshard.explain(lambda model, *batch: step(model, *batch), model, *batch)
    counts = collections.Counter()
    for line in ledger:
        assert line.signal != "-", line
        assert "redistribute" not in line.via, line
        if "data" not in line.mesh_axes and line.payload == ACTIVATIONS:
            counts[line.collective, line.phase] += line.count
        if plan != "tensor and sequence" and line.collective == "all_gather":
            assert "store" in configuration[line.signal], line  # nothing but parameters is gathered
    assert (name, plan) not in FORMULA or counts == FORMULA[name, plan]
    assert wire_bytes(compiled) <= ledger.total  # what XLA moves, the ledger has


@pytest.mark.parametrize(
    ("name", "plan"),
    [("qwen3", "tensor"), ("qwen3-moe", "tensor"), ("gemma3", "tensor"), ("mamba2", "data"), ("mamba3", "data")],
)
def test_a_step_of_decoding_equals_one_device(extra, alone, name, plan):
    adopted = needed(extra, name)
    wanted = alone(name, "decode")
    jshard.load(adopted.plans[plan])
    model, sharded = adopted.build(), jshard.shard(adopted.decode)
    got = nnx.jit(sharded)(model, *adopted.start())
    for (path, want), (_, have) in zip(*map(jax.tree.leaves_with_path, (wanted, got)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5 * np.abs(want).max(), err_msg=str(path))
        assert have.sharding.spec[0] == "data", path
        assert plan != "tensor" or have.ndim < 4 or have.sharding.spec[2] == "tensor", path  # keys and values by heads
    for line in jshard.explain(sharded, model, *adopted.start(), backward=False):
        # where the cache of tunix's first row ends is that of all of them: a number for each row
        assert "redistribute" not in line.via or line.payload <= 4 * TINY.rows, line
