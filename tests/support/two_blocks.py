"""A decoder and a vision transformer of plain Flax, as small as they can be: what verify proves, and its claims."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

WIDTH, HEADS, HIDDEN, WORDS, CLASSES = 16, 4, 32, 32, 8


class Attention(nnx.Module):
    """With rotary positions and normed heads, as Qwen3 has it."""

    def __init__(self, rngs):
        for name in ("q", "k", "v"):
            setattr(self, name, nnx.LinearGeneral(WIDTH, (HEADS, WIDTH // HEADS), use_bias=False, rngs=rngs))
        self.o = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.head_norm = nnx.RMSNorm(WIDTH // HEADS, rngs=rngs)

    def __call__(self, x):
        q, k = (turned(self.head_norm(each(x))) for each in (self.q, self.k))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        later = jnp.arange(x.shape[1])[:, None] < jnp.arange(x.shape[1])
        weights = jax.nn.softmax(jnp.where(later, -1e30, scores))
        return self.o(jnp.einsum("bhqk,bkhd->bqhd", weights, self.v(x)))


def turned(x):
    """Rotate pairs of features by an angle that grows with the position."""
    turns = 100.0 ** (-jnp.arange(x.shape[-1] // 2) / (x.shape[-1] // 2))
    angles = jnp.arange(x.shape[1])[:, None, None] * turns
    one, two = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [one * jnp.cos(angles) - two * jnp.sin(angles), two * jnp.cos(angles) + one * jnp.sin(angles)], -1
    )


class Block(nnx.Module):
    def __init__(self, rngs):
        self.before, self.after = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = Attention(rngs)
        self.gate, self.up = (nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.before(x))
        y = self.after(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    def __init__(self, rngs, blocks=2):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViTBlock(nnx.Module):
    def __init__(self, rngs):
        self.before, self.after = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(nnx.gelu(self.up(self.after(x))))


class ViT(nnx.Module):
    """Images of 8 x 8 in patches of 4 x 4, a class token and learnt positions."""

    def __init__(self, rngs, blocks=2):
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.positions = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (1, 5, WIDTH)))
        self.blocks = nnx.List([ViTBlock(rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(len(x), -1, WIDTH)
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (len(x), 1, WIDTH)), x], 1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def cross_entropy(model, x, targets):
    logs = jax.nn.log_softmax(model(x))
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()


def of_qwen3(model, tokens, targets):
    """The loss of tunix's Qwen3, which asks for positions and a mask."""
    positions = jnp.tile(jnp.arange(8), (4, 1))
    mask = jnp.tile(jnp.tril(jnp.ones((8, 8), bool)), (4, 1, 1))
    return cross_entropy(lambda tokens: model(tokens, positions, None, mask)[0], tokens, targets)


rng = np.random.default_rng(0)
TOKENS = tuple(np.random.default_rng(1).integers(0, 64, (2, 4, 8)).astype(np.int32))
TEXT = tuple(rng.integers(0, WORDS, (2, 4, 4)).astype(np.int32))
IMAGES = rng.normal(size=(4, 8, 8, 3)).astype(np.float32), rng.integers(0, CLASSES, 4).astype(np.int32)
DECODER = """\
jshard: {mesh: {data: 2, tensor: 2}}
queries: {row: data, column: tensor, match: ["blocks/*/attention/{q,k,v}/**"]}
sums: {row: data, reduction: tensor, match: ["blocks/*/attention/o/**", "blocks/*/down/**"]}
hidden: {row: data, column: tensor, match: ["blocks/*/{gate,up}/**"]}
words: {row: data, reduction: tensor, match: ["embed/**"]}
head: {row: data, column: tensor, match: ["head/**"]}
rest: {row: data, match: ["**"]}
"""
VIT = """\
jshard: {mesh: {data: 2, tensor: 2}}
columns: {row: data, column: tensor, match: ["blocks/*/attention/{query,key,value}/**", "blocks/*/up/**", "head/**"]}
sums: {row: data, reduction: tensor, match: ["blocks/*/attention/out/**", "blocks/*/down/**"]}
rest: {row: data, match: ["**"]}
"""


def also(text, key, value):
    """The same with one more word in every signal."""
    return text.replace("{row: data,", f"{{row: data, {key}: {value},")


QWEN3 = """\
jshard: {mesh: {data: 2, tensor: 4}}
columns: {row: data, store: data, column: tensor, sequence: tensor, match: ["layers/*/attn/{q,k,v}_proj/**", "layers/*/mlp/{gate,up}_proj/**", "lm_head/**"]}
sums: {row: data, store: data, reduction: tensor, sequence: tensor, match: ["layers/*/attn/o_proj/**", "layers/*/mlp/down_proj/**", "embedder/**"]}
rest: {row: data, store: data, match: ["**"]}
"""
