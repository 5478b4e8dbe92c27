"""`jshard.GatedMLP`: the feed-forward layer of Llama and its like."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`. `column: tensor` of gate and up with `reduction: tensor` of down costs one
    all-reduce forward and one backward."""

    def __init__(
        self, width: int, hidden: int, *, activation: Callable[[jax.Array], jax.Array] = nnx.silu, use_bias: bool = False,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs,
    ):  # fmt: skip
        linear = functools.partial(nnx.Linear, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = self.activation(checkpoint_name(self.gate(x), "gate"))
        return self.down(gate * checkpoint_name(self.up(x), "up"))
