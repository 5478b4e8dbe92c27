"""One training step as `verify` compares it: the loss, every gradient, and what the optimizer makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.inspect.verify.inputs import Named, named_leaves


def step_with_gradients(loss: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Named]:
    """A training step that hands out its gradients too: of the parameters, and of inputs that are no whole numbers. Parameters
    and optimizer state are left behind in its arguments, as every step leaves them."""

    def train(model: Any, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> Named:
        smooth = jnp.issubdtype(x.dtype, jnp.inexact)
        of = [nnx.DiffState(0, optimizer.wrt), *([1] if smooth else [])]
        value, (gradients, *of_x) = nnx.value_and_grad(lambda model, x: loss(model(x), y), argnums=of)(model, x)
        optimizer.update(model, gradients)
        leaves = {**named_leaves("model", gradients), **(named_leaves("x", of_x[0]) if smooth else {})}
        return Named({"loss": value, **{f"gradient of {name}": leaf for name, leaf in leaves.items()}})

    return train
