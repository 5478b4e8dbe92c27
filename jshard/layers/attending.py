"""Attention of queries over keys and values, as every layer of jshard that attends calls it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jshard.errors import JShardError, did_you_mean
from jshard.layers.ring_attention import Form, ring_attention
from jshard.signals.active_config import configuration

IMPLEMENTATIONS = (None, "xla", "cudnn", "blocks")
BLOCK, LEAST = 512, 64  # queries of a block, at most and at least


def attend(
    q: Array, k: Array, v: Array, *, causal: bool = True, window: int | None = None, segments: Array | None = None,
    mask: Array | None = None, scale: float | None = None, implementation: object = None,
) -> Array:  # fmt: skip
    """Return softmax(q k^T scale) v, of the shape of q.

    `q[rows, places, heads, size]`, `k` and `v[rows, places, key heads, size]`: heads are a multiple of key heads, and those
    that share one are neighbours. A query sees the keys at its own place and before (`causal`), of those the last `window`, of
    its own segment only (`segments[rows, places]`, whole numbers), and where `mask[rows or 1, heads or 1, queries, keys]` is
    true. `scale` is 1 / sqrt(size) unless said. Positions (RoPE) are the caller's, before. `implementation` is that of
    `jax.nn.dot_product_attention`: "cudnn" asks for NVIDIA's. "blocks" is plain JAX for causal attention: a quarter of
    the queries at a time, 64 to 512, over the keys up to theirs, so that nearly half of the scores are never made.

    Where a signal of the configuration says `ring: axis`, `jshard.shard` has rows split by places over that mesh axis, and no
    device ever has all keys: they go around a ring, or, with `attention: ulysses`, heads are split instead while devices
    attend. That has one implementation, and what has a `mask` is gathered, and told.
    """
    if window is not None and window < 1:
        raise JShardError(
            f"attention has a window of {window}", hint="use 1 or more, or leave it out: then all are seen"
        )
    if implementation not in IMPLEMENTATIONS:
        hint = did_you_mean(implementation, IMPLEMENTATIONS[1:], f"use {', '.join(IMPLEMENTATIONS[1:])}")
        raise JShardError(f'attention has implementation "{implementation}"', hint=hint)
    present = configuration()
    rings = present is not None and any(signal.ring for signal in present.signals.values())
    if rings and mask is None and q.shape[1] == k.shape[1] > 1:
        form = Form(causal, window, q.shape[-1] ** -0.5 if scale is None else scale)
        return ring_attention(form)(q, k, v, () if segments is None else (segments,))
    if implementation == "blocks":
        if not causal or mask is not None or q.shape[1] != k.shape[1]:
            raise JShardError(
                f'attention of {q.shape[1]} queries over {k.shape[1]} keys was asked for by "blocks", which is for causal '
                "attention without a mask, of as many",
                hint="leave implementation out",
            )
        return _in_blocks(q, k, v, window, segments, scale)
    if segments is not None:
        same = (segments[:, :, None] == segments[:, None, :])[:, None]
        mask = same if mask is None else mask & same
    near = None if window is None else (window - 1, 0 if causal else window - 1)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=causal, scale=scale, local_window_size=near, implementation=implementation
    )


def _in_blocks(q: Array, k: Array, v: Array, window: int | None, segments: Array | None, scale: float | None) -> Array:
    found, places = [], jnp.arange(q.shape[1])
    block = min(BLOCK, max(LEAST, -(-q.shape[1] // 4)))
    for first in range(0, q.shape[1], block):
        begin = 0 if window is None else max(0, first - window + 1)
        asks, seen = slice(first, first + block), slice(begin, first + block)
        away = places[asks, None] - places[None, seen]
        mask = (away >= 0 if window is None else (away >= 0) & (away < window))[None, None]
        if segments is not None:
            mask &= (segments[:, asks, None] == segments[:, None, seen])[:, None]
        found.append(jax.nn.dot_product_attention(q[:, asks], k[:, seen], v[:, seen], mask=mask, scale=scale))
    return jnp.concatenate(found, 1)
