"""`jshard.MLP`, two Linears under signals of their own; `jshard.GatedMLP`, Llama's feed-forward layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jshard.layers.layer import Layer
from jshard.layers.linear import Linear
from jshard.signals.scope import Entry, resolve


class MLP(Layer):
    """`down(activation(up(x)))`. `up` is built and called under signal `signals[0]`, `down` under `signals[1]`, both nested
    in the signal that the MLP itself is under. With `up: {column: t}` and `down: {reduction: t}` it costs one all-reduce.

    Under a signal with `compile: true`, a call outside jit is one program.
    """

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int, *, activation: Callable[..., Any] = nnx.relu,
        signals: tuple[str, str] = ("up", "down"), rngs: nnx.Rngs, **arguments: Any,
    ):  # fmt: skip
        super().__init__()
        self.signals = signals
        self.activation = activation
        with resolve(())[1], Entry(signals[0]):
            self.up = Linear(in_features, hidden_features, rngs=rngs, **arguments)
        with resolve(())[1], Entry(signals[1]):
            self.down = Linear(hidden_features, out_features, rngs=rngs, **arguments)

    def __call__(self, x: jax.Array) -> jax.Array:
        signal, scope = resolve(self.signal_path)
        with scope:
            if signal is not None and signal.compile:
                return one_program(*nnx.split(self), x)
            return self._run(x)

    def _run(self, x: jax.Array) -> jax.Array:
        with Entry(self.signals[0]):
            x = self.activation(self.up(x))
        with Entry(self.signals[1]):
            return self.down(x)


@functools.partial(jax.jit, static_argnums=0)
def one_program(graphdef: Any, state: tuple[Any, ...], x: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state)._run(x)


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
