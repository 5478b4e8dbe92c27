"""Other people's models, unmodified, from the package index: equal to one device, at the cost that their plan has by formula."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from qwen3 import qwen3

import jshard

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # these models take names that JAX is going to remove
B, T, WIDTH, WORDS = 8, 8, 32, 64
rng = np.random.default_rng(0)
BATCH = (
    *rng.integers(0, WORDS, (2, B, T)).astype(np.int32),
    np.tile(np.arange(T, dtype=np.int32), (B, 1)),
    np.tile(np.tril(np.ones((T, T), bool)), (B, 1, 1)),
)


def cross_entropy(model, tokens, targets, positions, mask):
    logits, _ = model(tokens, positions, None, mask)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def plan(mesh, queries="tensor", keys="tensor", **words):
    store = {key: word for key, word in words.items() if key == "store"}
    layer = {"row": "data", **words}
    return {
        "jshard": {"mesh": mesh},
        "queries": {**layer, "column": queries, "match": ["layers/*/attn/q_proj/**", "layers/*/mlp/{gate,up}_proj/**"]},
        "keys": {**layer, "column": keys, "match": ["layers/*/attn/{k,v}_proj/**"]},
        "sums": {**layer, "reduction": queries, "match": ["layers/*/attn/o_proj/**", "layers/*/mlp/down_proj/**"]},
        "table": {**layer, "reduction": queries, "match": ["embedder/**"]},
        "head": {**layer, "column": queries, "match": ["lm_head/**"]},
        "rest": {"row": "data", "match": ["**"], **store},
    }


PLANS = {
    "data": (4, {"jshard": {"mesh": {"data": 8}}, "rest": {"row": "data", "match": ["**"]}}),
    "fsdp": (4, {"jshard": {"mesh": {"data": 8}}, "rest": {"row": "data", "store": "data", "match": ["**"]}}),
    "tensor": (4, plan({"data": 2, "tensor": 4})),
    "tensor and sequence": (4, plan({"data": 2, "tensor": 4}, sequence="tensor")),
    "tensor and fsdp": (4, plan({"data": 2, "tensor": 4}, store="data")),
    "two heads for keys": (2, plan({"data": 2, "kv": 2, "group": 2}, queries=["kv", "group"], keys="kv")),
}
# All-reduces of B x T x WIDTH: behind the lookup and two in each layer, and as many backward.
FORMULA = {
    "tensor": {("all_reduce", "forward"): 5, ("all_reduce", "backward"): 5},
    "tensor and sequence": {
        ("all_gather", "forward"): 5, ("reduce_scatter", "forward"): 5,
        ("all_gather", "backward"): 5, ("reduce_scatter", "backward"): 5,
    },
    "tensor and fsdp": {("all_reduce", "forward"): 5, ("all_reduce", "backward"): 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    """Loss and gradients on one device, by the number of heads of keys."""
    found: dict[int, object] = {}

    def made(extra, heads):
        jshard.unload()
        if heads not in found:
            found[heads] = jax.device_get(nnx.jit(nnx.value_and_grad(cross_entropy))(qwen3(extra, heads), *BATCH))
        return found[heads]

    return made


@pytest.mark.parametrize("name", PLANS)
def test_qwen3_equals_one_device(extra, alone, name):
    heads, configuration = PLANS[name]
    loss, gradients = alone(extra, heads)
    jshard.load(configuration)
    model, sharded = qwen3(extra, heads), jshard.shard(cross_entropy)
    jshard.shard(model, BATCH[0], BATCH[2], None, BATCH[3])
    step = nnx.value_and_grad(sharded)
    got, found = nnx.jit(step)(model, *BATCH)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    where = nnx.to_flat_state(nnx.state(model, nnx.Param))
    each = zip(where, nnx.to_flat_state(gradients), nnx.to_flat_state(found), strict=True)
    for (path, parameter), (_, want), (_, gradient) in each:
        wanted = np.asarray(want[...])
        np.testing.assert_allclose(
            gradient[...], wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max(), err_msg=str(path)
        )
        assert gradient.get_value().sharding == parameter.get_value().sharding, path
    ledger = jshard.explain(lambda model, *batch: step(model, *batch), model, *BATCH)
    counts = collections.Counter()
    for line in ledger:
        assert line.signal != "-", line
        if "data" not in line.mesh_axes and line.payload == B * T * WIDTH * 4 // 2:
            counts[line.collective, line.phase] += line.count
        if name != "tensor and sequence" and line.collective == "all_gather":
            assert "store" in configuration[line.signal], line  # nothing but parameters is gathered
    assert name not in FORMULA or counts == FORMULA[name]
