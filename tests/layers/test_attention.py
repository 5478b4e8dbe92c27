"""`jshard.Attention` and `jshard.GatedMLP`: the numbers of the formula, alone and split, from a cache and without."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError

WIDTH, HEADS, KV, SIZE, ROWS, LENGTH = 16, 8, 4, 4, 4, 8
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
SEGMENTS = np.repeat([[0, 0, 0, 1, 1, 1, 1, 2]], ROWS, 0)
POSITIONS = np.repeat([[0, 1, 2, 0, 1, 2, 3, 0]], ROWS, 0)


def attention(**more):
    how = {"kv_heads": KV, "head_dim": SIZE, "qk_norm": True, "rope": {"theta": 100.0}, **more}
    layer = jshard.Attention(WIDTH, HEADS, rngs=nnx.Rngs(0), **how)
    if layer.q_norm is not None:
        layer.q_norm.scale.set_value(jnp.linspace(0.5, 2, SIZE))
    return layer


def by_hand(layer, x, seen, positions=None):
    """softmax(QK)V head by head; `seen[t, s]` says whether t attends to s."""
    q, k, v = (np.einsum("btd,dnh->btnh", x, each.kernel[...]) for each in (layer.q, layer.k, layer.v))
    if layer.q_norm is not None:
        q, k = (each / np.sqrt((each**2).mean(-1, keepdims=True) + 1e-6) for each in (q, k))
        q, k = q * layer.q_norm.scale[...], k * layer.k_norm.scale[...]
    if layer.rope is not None:
        at = jnp.arange(x.shape[1])[None] if positions is None else positions
        q, k = layer.rope.rotate(q, at), layer.rope.rotate(k, at)
    made = []
    for head in range(HEADS):
        of = head * k.shape[2] // HEADS
        scores = np.einsum("bth,bsh->bts", q[:, :, head], k[:, :, of]) / SIZE**0.5
        weights = jax.nn.softmax(np.where(seen, scores, -np.inf), -1)
        made.append(np.einsum("bts,bsh->bth", weights, v[:, :, of]))
    return np.einsum("btnh,nhd->btd", np.stack(made, 2), layer.o.kernel[...])


CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
CASES = {
    "grouped": ({}, {}, CAUSAL),
    "plain": ({"kv_heads": None, "qk_norm": False, "rope": None}, {}, CAUSAL),
    "both ways": ({"causal": False}, {}, np.ones_like(CAUSAL)),
    "window": ({"window": 3}, {}, CAUSAL & ~np.tril(np.ones((LENGTH, LENGTH), bool), -3)),
    "packed": (
        {}, {"positions": POSITIONS, "segments": SEGMENTS}, CAUSAL & (SEGMENTS[0][:, None] == SEGMENTS[0]),
    ),
}  # fmt: skip


@pytest.mark.quick("both ways", "window")
@pytest.mark.parametrize("case", CASES)
def test_attention_computes_what_the_formula_says(case):
    jshard.unload()
    more, given, seen = CASES[case]
    layer = attention(**more)
    np.testing.assert_allclose(layer(X, **given), by_hand(layer, X, seen, given.get("positions")), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_dim"])
def test_sizes_below_one_are_told(name):
    with pytest.raises(JShardError) as told:
        jshard.Attention(WIDTH, **{"heads": HEADS, name: 0}, rngs=nnx.Rngs(0))
    assert str(told.value) == f"jshard.Attention has {name}=0; use 1 or more"
    nnx.eval_shape(lambda: jshard.Attention(WIDTH, **{"heads": HEADS, name: 1}, rngs=nnx.Rngs(0)))


def test_a_plain_attention_has_four_kernels():
    layer = jshard.Attention(WIDTH, HEADS, rngs=nnx.Rngs(0))
    shapes = {"/".join(map(str, path)): each[...].shape for path, each in nnx.to_flat_state(nnx.state(layer))}
    into = dict.fromkeys(("q/kernel", "k/kernel", "v/kernel"), (WIDTH, HEADS, WIDTH // HEADS))
    assert shapes == {**into, "o/kernel": (HEADS, WIDTH // HEADS, WIDTH)}


@pytest.mark.parametrize(("dtypes", "kept"), [
    ({}, jnp.float32), ({"dtype": jnp.bfloat16}, jnp.bfloat16), ({"param_dtype": jnp.bfloat16}, jnp.bfloat16),
    ({"dtype": jnp.float32, "param_dtype": jnp.bfloat16}, jnp.float32),
])  # fmt: skip
def test_a_cache_is_of_what_is_computed(dtypes, kept):
    layer = attention(**dtypes)
    layer.init_cache(ROWS, LENGTH)
    assert layer.cached_key.get_value().dtype == layer.cached_value.get_value().dtype == kept


def test_packed_rows_are_the_texts_by_themselves():
    jshard.unload()
    layer = attention()
    called = nnx.jit(lambda layer, *given: layer(*given))
    packed = called(layer, X, POSITIONS, SEGMENTS)
    for part in (slice(0, 3), slice(3, 7), slice(7, 8)):
        np.testing.assert_allclose(packed[:, part], called(layer, X[:, part]), rtol=1e-4, atol=1e-5)


@pytest.mark.quick("3")
@pytest.mark.parametrize("window", [None, 3])
def test_a_token_from_the_cache_is_that_of_the_whole_text(window):
    jshard.unload()
    layer, lengths = attention(window=window), np.array([2, 5, 3, 4])
    whole = layer(X)
    layer.init_cache(ROWS, LENGTH + 2)
    read = layer(X[:, :5])  # what is behind a row's own length is written over
    np.testing.assert_allclose(read, whole[:, :5], rtol=1e-4, atol=1e-5)
    for further in range(3):
        at = lengths + further
        token = layer(X[np.arange(ROWS), at][:, None], at[:, None])
        np.testing.assert_allclose(token[:, 0], whole[np.arange(ROWS), at], rtol=1e-4, atol=1e-5)


@pytest.mark.seconds
def test_a_cache_is_for_its_rows_and_length():
    layer = attention()
    layer.init_cache(ROWS, LENGTH - 1)
    for x, sentence in (
        (X, "a cache for 4 rows of 7 tokens was given 4 of 8; call init_cache(4, 8) first"),
        (X[:2, :1], "a cache for 4 rows of 7 tokens was given 2 of 1; call init_cache(2, 7) first"),
        (np.repeat(X[:, :1], 2, 0), "a cache for 4 rows of 7 tokens was given 8 of 1; call init_cache(8, 7) first"),
    ):
        with pytest.raises(JShardError) as error:
            layer(x)
        assert str(error.value) == sentence
    assert layer(X[:, 1:]).shape == (ROWS, LENGTH - 1, WIDTH)


def test_packed_rows_are_not_kept_in_a_cache():
    layer = attention()
    layer.init_cache(ROWS, LENGTH)
    with pytest.raises(JShardError) as error:
        layer(X, POSITIONS, SEGMENTS)
    assert str(error.value) == (
        "a jshard.Attention that keeps keys and values was given segments; give each text a row of its own"
    )


def claimed(**words):
    return {
        "jshard": {"mesh": {"data": 2, "tensor": 4}},
        "columns": {
            "row": "data",
            "column": "tensor",
            "match": ["attn/{q,k,v}/kernel", "mlp/{gate,up}/kernel"],
            **words,
        },
        "sums": {"row": "data", "reduction": "tensor", "match": ["{attn/o,mlp/down}/kernel"], **words},
        "rest": {"row": "data", "match": ["**"]},
    }


class Both(nnx.Module):
    def __init__(self):
        self.attn, self.mlp = attention(), jshard.GatedMLP(WIDTH, 32, rngs=nnx.Rngs(1))

    def __call__(self, x, segments=None):
        x = jnp.sin(x)
        return self.mlp(self.attn(x, segments=segments))


def test_gated_mlp_computes_what_the_formula_says():
    jshard.unload()
    mlp = jshard.GatedMLP(WIDTH, 32, rngs=nnx.Rngs(1))
    gate, up, down = (each.kernel[...] for each in (mlp.gate, mlp.up, mlp.down))
    np.testing.assert_allclose(mlp(X), (nnx.silu(X @ gate) * (X @ up)) @ down, rtol=1e-5, atol=1e-6)


@pytest.mark.seconds
@pytest.mark.parametrize(("words", "asked"), [
    ({}, {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}),
    ({"sequence": "tensor"}, {("reduce_scatter", "forward"): 2, ("all_gather", "forward"): 1,
                              ("reduce_scatter", "backward"): 1, ("all_gather", "backward"): 2,
                              ("all_reduce", "backward"): 1}),
], ids=["tensor", "sequence"])  # fmt: skip
def test_heads_are_split_by_column_at_the_cost_of_a_sum_each_way(words, asked):
    def loss(model, x, segments):
        return jnp.square(model(x, segments)).mean()

    jshard.unload()
    of_x = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))
    value, (gradients, x) = of_x(Both(), X, SEGMENTS)
    jshard.load(claimed(**words))
    rows = jshard.place(X, jax.P("data"))
    model, sharded = jshard.shard(Both(), X, SEGMENTS), nnx.value_and_grad(jshard.shard(loss), argnums=(0, 1))
    assert model.attn.q.kernel.get_value().sharding.spec == jax.P(None, "tensor", None)
    assert model.attn.k.kernel.get_value().addressable_shards[0].data.shape == (WIDTH, KV // 4, SIZE)
    assert model.attn.o.kernel.get_value().sharding.spec == jax.P("tensor", None, None)
    got, (found, of_rows) = nnx.jit(sharded)(model, rows, SEGMENTS)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    np.testing.assert_allclose(of_rows, x, rtol=1e-4, atol=1e-6)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    counts = collections.Counter()
    for line in jshard.explain(lambda *args: sharded(*args), model, rows, SEGMENTS):
        assert "redistribute" not in line.via, line
        if line.mesh_axes == ("tensor",) and line.payload >= X.nbytes // 8:
            counts[line.collective, line.phase] += line.count
    assert counts == asked
