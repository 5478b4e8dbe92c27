"""`jshard.attend`: attention under jshard.shard equals one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard

ROWS, PLACES, HEADS, KEYS, SIZE = 4, 32, 8, 4, 4
WIDTH = HEADS * SIZE
draw = np.random.default_rng(0)
X = draw.normal(size=(ROWS, PLACES, WIDTH)).astype(np.float32)
SEGMENTS = np.sort(draw.integers(0, 3, (ROWS, PLACES)), axis=1).astype(np.int32)


class Attention(nnx.Module):
    def __init__(self, rngs, **how):
        linear = nnx.LinearGeneral
        self.q = linear(WIDTH, (HEADS, SIZE), use_bias=False, rngs=rngs)
        self.k = linear(WIDTH, (KEYS, SIZE), use_bias=False, rngs=rngs)
        self.v = linear(WIDTH, (KEYS, SIZE), use_bias=False, rngs=rngs)
        self.o = linear((HEADS, SIZE), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.how = how

    def __call__(self, x, segments):
        segments = segments if self.how.get("segments", True) else None
        how = {key: word for key, word in self.how.items() if key != "segments"}
        return x + self.o(jshard.attend(self.q(x), self.k(x), self.v(x), segments=segments, **how))


def loss(model, x, segments):
    return jnp.sin(model(x, segments)).mean()


def written_out(model, x, segments):
    """Attention, as one writes it down."""
    how = {"causal": True, "window": None, "segments": True, **model.how}
    q, k, v = model.q(x), *(jnp.repeat(each(x), HEADS // KEYS, axis=2) for each in (model.k, model.v))
    apart = jnp.arange(PLACES)[:, None] - jnp.arange(PLACES)
    seen = (apart >= 0) | (not how["causal"])
    if how["window"] is not None:
        seen &= abs(apart) < how["window"]
    seen = seen[None, None]
    if how["segments"]:
        seen = seen & (segments[:, :, None] == segments[:, None])[:, None]
    scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5, -jnp.inf)
    return jnp.sin(x + model.o(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v))).mean()


HOW = {
    "causal": {"segments": False}, "segments": {}, "window": {"window": 5}, "both ways": {"causal": False},
    "near both ways": {"causal": False, "window": 11},
}  # fmt: skip


def plan(mesh, column=("tensor",), **words):
    over = {"row": "data"} if "data" in mesh else {}
    sums = {"reduction": list(column)} if column else {}
    return {
        "jshard": {"mesh": mesh},
        "qkv": {**over, **({"column": list(column)} if column else {}), **words, "match": ["{q,k,v}/**"]},
        "out": {**over, **sums, **words, "match": ["o/**"]},
    }


def alike(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for (path, one), (_, other) in zip(nnx.to_flat_state(got[1]), nnx.to_flat_state(want[1]), strict=True):
        far = np.abs(other[...]).max()
        np.testing.assert_allclose(one[...], other[...], rtol=1e-4, atol=1e-5 * far, err_msg=str(path))


def reference(how):
    jshard.unload()
    return jax.device_get(nnx.jit(nnx.value_and_grad(written_out))(Attention(nnx.Rngs(0), **HOW[how]), X, SEGMENTS))


def run(how):
    return nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(
        jshard.shard(Attention(nnx.Rngs(0), **HOW[how])), X, SEGMENTS
    )


@pytest.mark.parametrize("how", HOW)
def test_attend_is_attention_on_one_device_and_with_its_heads_split(how):
    want = reference(how)
    alike(nnx.jit(nnx.value_and_grad(loss))(Attention(nnx.Rngs(0), **HOW[how]), X, SEGMENTS), want)
    jshard.load(plan({"data": 2, "tensor": 4}))
    alike(run(how), want)
