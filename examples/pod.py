"""A stack of wide layers for a pod: to ask what its layouts cost before there is a pod. Nothing here is ever trained.

jshard explain configs/pod-fsdp.yaml --trust
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

import jshard


class Model(nnx.Module):
    """`depth` blocks of two layers each, 3.2 billion parameters; one `scan`, so that depth costs no time to read."""

    def __init__(self, features: int = 4096, hidden: int = 16384, depth: int = 24, *, rngs: nnx.Rngs):
        def block(rngs: nnx.Rngs) -> nnx.Module:
            return jshard.MLP(features, hidden, features, use_bias=False, rngs=rngs)

        self.blocks = nnx.vmap(block, in_axes=0, out_axes=0)(rngs.split(depth))

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)

        def block(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return x + nnx.merge(graph, state)(x), None

        return jax.lax.scan(block, x, state)[0]


def data(features: int = 4096) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """As many zeros as a batch has: only their shape counts."""
    zeros = np.broadcast_to(np.zeros((), np.float32), (8192, features))
    return {"train": (zeros, zeros), "test": (zeros, zeros)}


def loss(y: jax.Array, target: jax.Array) -> jax.Array:
    return jshard.mean((y - target) ** 2)


def model() -> Model:
    """For `--args`, which calls it under the configuration."""
    return Model(rngs=nnx.Rngs(0))


def serve(model: Model, x: jax.Array) -> jax.Array:
    return model(x)
