"""`jshard.MLP`: two Linears, each under a signal of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

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
