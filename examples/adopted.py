"""Two models of plain Flax for handwritten digits, which know nothing of meshes: where they lie is said in YAML alone.

jshard train configs/adopt/transformer.yaml
jshard train configs/cnn/data.yaml
jshard train configs/cnn/fsdp.yaml
jshard train configs/cnn/tensor.yaml
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.before_attention = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.before_mlp = nnx.RMSNorm(width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.before_attention(x))
        return x + self.down(nnx.gelu(self.up(self.before_mlp(x))))


class Transformer(nnx.Module):
    """An image is a sentence of its eight rows."""

    def __init__(self, width: int = 64, layers: int = 2, *, rngs: nnx.Rngs):
        self.rows = nnx.Linear(8, width, rngs=rngs)
        self.places = nnx.Param(0.02 * jax.random.normal(rngs.params(), (8, width)))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.RMSNorm(width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        x = self.rows(pixels.reshape(-1, 8, 8)) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), axis=1))


class CNN(nnx.Module):
    """Two convolutions with statistics of the batch between them, and two products."""

    def __init__(self, width: int = 32, *, rngs: nnx.Rngs):
        self.first, self.norm = nnx.Conv(1, width, (3, 3), rngs=rngs), nnx.BatchNorm(width, rngs=rngs)
        self.second = nnx.Conv(width, width, (3, 3), strides=2, rngs=rngs)
        self.up, self.down = nnx.Linear(16 * width, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.first(pixels.reshape(-1, 8, 8, 1))))
        x = nnx.relu(self.second(x))
        return self.down(nnx.relu(self.up(x.reshape(x.shape[0], -1))))
