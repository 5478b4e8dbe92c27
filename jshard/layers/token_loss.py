"""Cross entropy of logits, or of hidden states with logits computed for a few places at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.errors import JShardError
from jshard.layers import reduce

CHUNK = 256


def cross_entropy(
    outputs: object,
    targets: object,
    *,
    head: jax.Array | Callable[[Array], Array] | None = None,
    count: Any = None,
    z: float = 0.0,
    chunk: int = CHUNK,
) -> Array:
    """Return the mean over all targets of -log softmax(outputs) at the target.

    `outputs[..., classes]` are logits and `targets[...]` classes. If a row has several targets, negative targets do not
    count; `count` replaces the divisor of the sum. `z` is the weight of the z-loss, the squared log of the softmax
    denominator.

    With `head`, outputs are hidden states `[rows, places, features]`: the logits are `outputs @ head`, with a kernel
    `[features, words]` (the transpose of a tied table), or `head(outputs)`. Logits are computed in float32 for at most
    `chunk` places of each row at a time, and recomputed in the backward pass if there are several chunks.

    Under `jshard.shard` the head's words may be split (`column`), and rows and places too. Then each place costs all-reduces
    of three numbers forward (the maximum, the sum, the logit of the target) and of two backward, beside the gradient of the
    hidden states. With any number of chunks, a stored head is gathered once and its gradient summed once, in their dtype.
    """
    outputs, targets = jnp.asarray(outputs), jnp.asarray(targets)
    kernel = None if head is None or callable(head) else jnp.asarray(head)
    _check_shapes(outputs.shape, None if kernel is None else kernel.shape, targets.shape, has_head=head is not None)
    if head is None:
        losses = losses_of(outputs, targets, z)
    else:
        logits: Any = head if kernel is None else functools.partial(_product, kernel.astype(outputs.dtype))
        losses = by_places(lambda x, y: losses_of(logits(x), y, z), outputs, targets, chunk)
    if targets.ndim < 2:
        return reduce.mean(losses)
    counted = targets >= 0
    dtype = jnp.promote_types(losses.dtype, jnp.float32)  # bfloat16 counts only to 256
    both = jnp.stack([jnp.where(counted, losses, 0.0).astype(dtype), counted.astype(dtype)])
    sums = reduce.sum(both, axis=tuple(range(1, both.ndim)))  # one all-reduce
    return sums[0] / (jnp.maximum(sums[1], 1.0) if count is None else count)


def _product(kernel: Array, x: Array) -> Array:
    return jnp.einsum("bcd,dv->bcv", x, kernel, preferred_element_type=jnp.float32)


def _check_shapes(outputs: Any, kernel: Any, targets: Any, *, has_head: bool) -> None:
    if (len(outputs) == 3 if has_head else len(outputs) > 0) and targets == outputs[:-1]:
        if kernel is None or (len(kernel) == 2 and kernel[0] == outputs[-1]):
            return
    given = f"outputs {outputs}" + ("" if kernel is None else f", head {kernel}")
    hint = "outputs[..., classes] and targets[...]"
    if has_head:
        hint = "outputs[rows, places, features], head[features, words] and targets[rows, places]"
    raise JShardError(f"jshard.cross_entropy was given {given} and targets {targets}", hint=f"give it {hint}")


def by_places(f: Callable[[Array, Array], Any], x: Array, targets: Array, chunk: int = CHUNK) -> Any:
    """Return `f(x, targets)`, arrays[rows, places], computed for at most `chunk` places at a time.
    The backward pass recomputes each of several chunks."""
    length = targets.shape[1]
    count = next(n for n in itertools.count(-(-length // chunk)) if not length % n)

    def chunks(x: Array) -> Array:
        """Split into chunks of places `count` apart: if rows are split over devices, each device has a part of every chunk."""
        return jnp.moveaxis(x.reshape(x.shape[0], length // count, count, *x.shape[2:]), 2, 0)

    of_chunk = jax.checkpoint(f) if count >= 2 else f
    _, parts = lax.scan(lambda _, chunk: (None, of_chunk(*chunk)), None, (chunks(x), chunks(targets)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(targets.shape), parts)


def losses_of(logits: Array, targets: Array, z: float) -> Array:
    """Compute -log softmax(logits) at each target, plus `z` times the squared log of the
    denominator, by jshard's reductions: on an explicit mesh every collective is listed."""
    largest = lax.stop_gradient(reduce.max(logits, axis=-1, keepdims=True))
    shifted = logits - largest
    total = jnp.log(reduce.sum(jnp.exp(shifted), axis=-1))
    losses = total - at_targets(shifted, targets)
    return losses + z * (total + largest.squeeze(-1)) ** 2 if z else losses


def at_targets(logits: Array, targets: Array) -> Array:
    """Return the logit of each target by a selection and a sum: a gather has no sharding type if words are split."""
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    return reduce.sum(jnp.where(chosen, logits, 0), axis=-1)
