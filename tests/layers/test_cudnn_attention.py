"""NVIDIA's attention under `jshard.shard`: each device attends with its rows and heads. What it computes is stood in for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir

import jshard

X = np.random.default_rng(0).normal(size=(4, 8, 32)).astype(np.float32)
SEGMENTS = np.repeat([[0, 0, 0, 1, 1, 1, 1, 1]], 4, axis=0).astype(np.int32)
CLAIMS = {
    "heads": {"row": "data", "column": "tensor", "match": ["{q,k,v}/**"]},
    "sums": {"row": "data", "reduction": "tensor", "match": ["o/**"]},
}


def attended(q, k, v, bias, *_, mask_type, scale, layout, is_training=True, **ignored):
    assert layout == 0 and q.shape[2] % k.shape[2] == 0
    causal, bias = mask_type == cudnn.MaskType.CAUSAL, bias if bias.ndim == 4 else None
    out = jax.nn.dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale, implementation="xla")
    return [out, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)][: 1 + is_training]


def gradients(q, k, v, bias, *rest, **params):
    *rest, _, _, cotangent = rest
    forward = lambda q, k, v, bias: attended(q, k, v, bias, *rest, **params)[0]
    return jax.vjp(forward, q, k, v, bias)[1](cotangent)[: 3 + params["variadic_args"][1]]


@pytest.fixture
def stood_in(monkeypatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91500)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    for name, stand_in in {"fwd": attended, "bwd": gradients}.items():
        primitive = getattr(cudnn, f"_dot_product_attention_{name}_p_wrapper")
        mlir.register_lowering(primitive, mlir.lower_fun(stand_in, multiple_results=True), platform="cpu")


def loss(model, x, segments):
    return jnp.square(model(x, segments=segments)).sum()


@pytest.mark.seconds
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rows_and_heads_are_split_and_nothing_is_gathered(stood_in, kv_heads, segments):
    def built():
        return jshard.Attention(32, 4, kv_heads=kv_heads, implementation="cudnn", dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    jshard.unload()
    step = nnx.value_and_grad(loss)
    want = jax.device_get(nnx.jit(step)(built(), X, segments))
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": kv_heads}}, **CLAIMS})
    model = jshard.shard(built(), X, segments=segments)
    step = nnx.value_and_grad(jshard.shard(loss))
    got = nnx.jit(step)(model, X, segments)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-2)
    ledger = jshard.explain(lambda *args: step(*args), model, X, segments)
    assert {line.collective for line in ledger} == {"all_reduce"}
    assert not [line for line in ledger if line.shape[-2:] == (8, 8)]  # nobody asks for the gradient of the mask
    assert got[1].q.kernel.get_value().sharding == model.q.kernel.get_value().sharding
    for (path, one), (_, other) in zip(nnx.to_flat_state(got[1]), nnx.to_flat_state(want[1]), strict=True):
        far = np.abs(other[...].astype(np.float32)).max()
        np.testing.assert_allclose(one[...], other[...], rtol=0.05, atol=0.02 * far, err_msg=str(path))


def test_a_bias_that_rows_share_gets_the_sum_of_their_gradients(stood_in):
    q, k, bias = (
        np.random.default_rng(n).normal(size=size) for n, size in enumerate([(4, 8, 4, 8), (4, 8, 2, 8), (1, 4, 8, 8)])
    )

    def biased(bias, q, k):
        q, k, bias = (x.astype(jnp.bfloat16) for x in (q, k, bias))
        return jnp.square(jax.nn.dot_product_attention(q, k, k, bias, implementation="cudnn").astype(jnp.float32)).sum()

    jshard.unload()
    want = jax.jit(jax.grad(biased))(bias, q, k)
    jshard.load({"jshard": {"mesh": {"data": 4}}, "rows": {"row": "data", "match": ["**"]}})
    q, k = jax.device_put((q, k), jax.NamedSharding(jshard.mesh(), jax.P("data")))
    step = jax.grad(jshard.shard(biased))
    np.testing.assert_allclose(jax.jit(step)(bias, q, k), want, rtol=0.05, atol=0.02 * np.abs(want).max())
    summed = [line for line in jshard.explain(step, bias, q, k) if line.shape == bias.shape]
    assert [(line.collective, line.phase) for line in summed] == [("all_reduce", "backward")]
