"""Models of plain Flax for `jshard train`, which know nothing of meshes; tests name their signals in a configuration alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.core import Tracer

drawn: list[bool] = []  # of each model: whether its parameters were traced, and not made, while it was built


class Dense(nnx.Module):
    """Two products, a norm between them, random numbers in each step."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)
        self.dropout, self.down = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        drawn.append(isinstance(self.up.kernel[...], Tracer))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(self.norm(nnx.relu(self.up(x)))))


class Filters(nnx.Module):
    """Two convolutions, statistics of the batch between them."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first, self.norm = nnx.Conv(1, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.second, self.head = nnx.Conv(8, 8, (3, 3), rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        drawn.append(isinstance(self.head.kernel[...], Tracer))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.first(x.reshape(-1, 4, 4, 1))))
        return self.head(nnx.relu(self.second(x)).mean((1, 2)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.LayerNorm()(nn.relu(nn.Dense(32)(x))))


def bridged(*, rngs: nnx.Rngs) -> nnx.Module:
    """A model of Linen as one of NNX."""
    model = nnx.bridge.ToNNX(Linen(), rngs=rngs).lazy_init(jnp.ones((1, 16)))
    drawn.append(any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))))
    return model


def data() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(84, 16)).astype(np.float32), draw.integers(0, 8, 84).astype(np.int32)
    return {"train": (x[:64], y[:64]), "test": (x[64:], y[64:])}
