"""The loss per token of a language model from its last hidden states: logits of a few places at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.errors import JShardError
from jshard.layers import reduce

CHUNK = 256


def cross_entropy(x: Any, head: Any, targets: Any, *, z: float = 0.0, chunk: int = CHUNK) -> Array:
    """Return the mean over all targets that are not negative of -log softmax(x @ head) at the target.

    `x[rows, places, features]` are hidden states, `head[features, words]` a kernel (of a tied table its transpose), and
    `targets[rows, places]` words. The logits of at most `chunk` places of each row are made at a time, in float32, and made
    again in the backward pass, unless one chunk is all. `z` times the square of the log of the softmax's denominator is added
    for each target (z-loss).

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
    head = head.astype(x.dtype)

    def losses(x: Array, targets: Array) -> Array:
        return losses_of(jnp.einsum("bcd,dv->bcv", x, head, preferred_element_type=jnp.float32), targets, z)

    counts = targets >= 0
    each = by_places(losses, x, targets, chunk)
    return jnp.where(counts, each, 0.0).sum() / jnp.maximum(counts.sum(), 1)


def by_places(f: Callable[[Array, Array], Any], x: Array, targets: Array, chunk: int = CHUNK) -> Any:
    """Return `f(x, targets)`, arrays[rows, places], from at most `chunk` places of each row at a time. What f makes of them is
    made again in the backward pass, where there is more than one chunk."""
    length = targets.shape[1]
    count = next(n for n in itertools.count(-(-length // chunk)) if not length % n)

    def chunks(x: Array) -> Array:
        """The places of a chunk are `count` apart: where devices hold parts of a row, each holds a part of every chunk."""
        return jnp.moveaxis(x.reshape(x.shape[0], length // count, count, *x.shape[2:]), 2, 0)

    one = jax.checkpoint(f) if count >= 2 else f
    _, each = lax.scan(lambda _, some: (None, one(*some)), None, (chunks(x), chunks(targets)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(targets.shape), each)


def losses_of(logits: Array, targets: Array, z: float) -> Array:
    """Compute -log softmax(logits) at each target, and `z` times the square of the log of the denominator. Each reduction is
    jshard's own, so that on an explicit mesh nothing moves unseen."""
    largest = lax.stop_gradient(reduce.max(logits, axis=-1, keepdims=True))
    shifted = logits - largest
    total = jnp.log(reduce.sum(jnp.exp(shifted), axis=-1))
    losses = total - at_targets(shifted, targets)
    return losses + z * (total + largest.squeeze(-1)) ** 2 if z else losses


def at_targets(logits: Array, targets: Array) -> Array:
    """Select the logit of each target. A selection and a sum: a gather can't be typed on a mesh that splits the words."""
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    return reduce.sum(jnp.where(chosen, logits, 0), axis=-1)
