"""The loss per token of a language model from its last hidden states: logits of a few places at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.errors import JShardError


def cross_entropy(x: Any, head: Any, targets: Any, *, z: float = 0.0, chunk: int = 256) -> Array:
    """Return the mean over all targets that are not negative of -log softmax(x @ head) at the target.

    `x[rows, places, features]` are hidden states, `head[features, words]` a kernel (of a tied table its transpose), and
    `targets[rows, places]` words. The logits of at most `chunk` places of each row are made at a time, in float32, and made
    again in the backward pass. `z` times the square of the log of the softmax's denominator is added for each target (z-loss).

    Plain JAX: under `jshard.shard` the head's words may be split (`column`), rows and places too. Then each place costs
    all-reduces of three numbers forward (the maximum, the sum, the logit of the target) and of two in the backward pass,
    beside the gradient of x, as behind any such kernel. Whatever the chunks, a stored head is gathered once and its gradient
    summed once, in the dtype of x.
    """
    x, head, targets = jnp.asarray(x), jnp.asarray(head), jnp.asarray(targets)
    if x.ndim != 3 or head.shape[:-1] != x.shape[2:] or targets.shape != x.shape[:2]:
        raise JShardError(
            f"jshard.cross_entropy was given x {x.shape}, head {head.shape} and targets {targets.shape}",
            hint="give it x[rows, places, features], head[features, words] and targets[rows, places]",
        )
    length, dtype = targets.shape[1], x.dtype
    count = next(n for n in range(-(-length // chunk), length + 1) if length % n == 0)

    @jax.checkpoint
    def losses(x: Array, targets: Array, head: Array) -> Array:
        logits = jnp.einsum("bcd,dv->bcv", x, head, preferred_element_type=jnp.float32)
        largest = lax.stop_gradient(logits.max(-1))
        total = largest + jnp.log(jnp.exp(logits - largest[..., None]).sum(-1))
        chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return jnp.where(targets >= 0, total - chosen + z * total**2, 0.0)

    def chunks(x: Array) -> Array:
        """The places of a chunk are `count` apart: where devices hold parts of a row, each holds a part of every chunk."""
        return jnp.moveaxis(x.reshape(x.shape[0], length // count, count, *x.shape[2:]), 2, 0)

    head = head.astype(dtype)
    _, each = lax.scan(lambda _, some: (None, losses(*some, head)), None, (chunks(x), chunks(targets)))
    return each.sum() / jnp.maximum((targets >= 0).sum(), 1)
