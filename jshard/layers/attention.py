"""`jshard.attend` and `jshard.Attention`, with grouped queries, rotary positions (RoPE), packed rows and a cache."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jshard.errors import JShardError, did_you_mean
from jshard.layers.layer_stack import KVCache
from jshard.layers.ring_attention import Form, ring_attention
from jshard.signals.active_config import configuration

IMPLEMENTATIONS = (None, "xla", "cudnn", "blocks")
BLOCK, LEAST = 512, 64  # the most and the fewest queries of a block


def attend(
    q: Array, k: Array, v: Array, *, causal: bool = True, window: int | None = None, segments: Array | None = None,
    mask: Array | None = None, scale: float | None = None, implementation: object = None,
) -> Array:  # fmt: skip
    """Return softmax(q k^T scale) v, in the shape of q.

    `q` is [rows, places, heads, size], `k` and `v` are [rows, places, key heads, size]. The number of heads is a multiple of
    the key heads; neighbouring heads share a key head. A query sees the keys at its own place and before (`causal`), only
    the last `window` of them, and only in its own segment (`segments[rows, places]`, integers). A
    `mask[rows or 1, heads or 1, queries, keys]` limits them further. `scale` is by default 1 / sqrt(size). The caller applies
    RoPE. `implementation` is as in `jax.nn.dot_product_attention`: "cudnn" is NVIDIA's. "blocks" is plain JAX for causal
    attention: it computes a quarter of the queries at a time (64 to 512) over the keys up to them, and skips nearly half of
    the scores.

    Under a signal with `ring: axis`, `jshard.shard` splits the places over the mesh axis, and no device has all keys: keys
    and values go around a ring. With `attention: ulysses`, heads are exchanged for places during attention instead. Both
    ignore `implementation`. A call with a `mask` gathers its operands, and the ledger lists the gathers.
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
                f'attention of {q.shape[1]} queries over {k.shape[1]} keys has implementation "blocks", which needs causal '
                "attention without a mask and equal numbers",
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
    outs, places = [], jnp.arange(q.shape[1])
    block = min(BLOCK, max(LEAST, -(-q.shape[1] // 4)))
    for first in range(0, q.shape[1], block):
        begin = 0 if window is None else max(0, first - window + 1)
        asks, seen = slice(first, first + block), slice(begin, first + block)
        away = places[asks, None] - places[None, seen]
        mask = (away >= 0 if window is None else (away >= 0) & (away < window))[None, None]
        if segments is not None:
            mask &= (segments[:, asks, None] == segments[:, None, seen])[:, None]
        outs.append(jax.nn.dot_product_attention(q[:, asks], k[:, seen], v[:, seen], mask=mask, scale=scale))
    return jnp.concatenate(outs, 1)


@dataclasses.dataclass(frozen=True)
class Rope:
    """The base and the scaling of rotary frequencies, with the words of `rope_scaling` in a model's config.json."""

    theta: float = 10_000.0
    scaling: str = "none"  # linear, llama3
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.scaling not in (words := ("none", "linear", "llama3")):
            hint = did_you_mean(self.scaling, words, f"use {', '.join(words)}")
            raise JShardError(f'rope of a decoder has scaling "{self.scaling}"', hint=hint)

    @classmethod
    def of(cls, given: Rope | Mapping[str, Any] | None) -> Rope | None:
        return given if given is None or isinstance(given, Rope) else cls(**fields_of(cls, given, "rope of a decoder"))

    def frequencies(self, size: int) -> np.ndarray:
        """Return the rotation angle per position of each pair in a head of this size."""
        turns = self.theta ** -(np.arange(0, size, 2) / size)
        if self.scaling == "none":
            return turns
        if self.scaling == "linear":
            return turns / self.factor
        # llama3: fast pairs are unchanged, slow pairs are divided by the factor
        rounds = self.original_max_position_embeddings * turns / (2 * math.pi)
        kept = np.clip((rounds - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return turns * (kept + (1 - kept) / self.factor)

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotate the pairs (i, i + size / 2) of `x[batch, length, heads, size]` by its `positions[batch, length]`."""
        angles = positions[..., None, None] * jnp.asarray(self.frequencies(x.shape[-1]), jnp.float32)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        one, other = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1).astype(x.dtype)


def fields_of(kind: Any, given: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return `given` after a check against a dataclass: an unknown or a missing field is an error."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in given:
        if name not in fields:
            raise JShardError(f'{label} has no "{name}"', hint=did_you_mean(name, fields, f"use {', '.join(fields)}"))
    for name, field in fields.items():
        if name not in given and field.default is dataclasses.MISSING:
            raise JShardError(f"{label} has no {name}", hint=f"give {name} too")
    return dict(given)


class Attention(nnx.Module):
    """Multi-head attention of `x[B, T, width]`, with `heads` query heads and `kv_heads` key heads.

    Parameters: `q/kernel` (width, heads, head_dim), `k/kernel` and `v/kernel` (width, kv_heads, head_dim), `o/kernel` (heads,
    head_dim, width), and with `qk_norm` `q_norm/scale` and `k_norm/scale`. `column: tensor` of q, k and v with
    `reduction: tensor` of o splits the heads and costs an all-reduce forward and another backward.

    `window`, `causal` and `implementation` are as in `jshard.attend`. After `init_cache` each call writes to the cache:
    without positions it restarts at 0, else each row continues at its own position.
    """

    def __init__(
        self, width: int, heads: int, *, kv_heads: int | None = None, head_dim: int | None = None, qk_norm: bool = False,
        norm_eps: float = 1e-6, rope: Rope | Mapping[str, Any] | None = None, window: int | None = None, causal: bool = True,
        use_bias: bool = False, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None, rngs: nnx.Rngs,
    ):  # fmt: skip
        for name, size in {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}.items():
            if size is not None and size < 1:
                raise JShardError(f"jshard.Attention has {name}={size}", hint="use 1 or more")
        if head_dim is None and width % heads:
            raise JShardError(
                f"jshard.Attention divides width {width} among {heads} heads",
                hint=f"use width {width // heads * heads}, or write head_dim: 128",
            )
        size, kv_heads = head_dim or width // heads, kv_heads or heads
        if heads % kv_heads:
            raise JShardError(
                f"jshard.Attention has {heads} heads and {kv_heads} kv_heads, which don't divide them",
                hint=f"use kv_heads: {max(n for n in range(1, kv_heads) if not heads % n)}",
            )
        if rope is not None and size % 2:
            raise JShardError(
                f"jshard.Attention has heads of {size}, which rope turns by pairs",
                hint=f"use head_dim: {size + 1}, or leave rope out",
            )
        linear = functools.partial(
            nnx.LinearGeneral, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        norm = functools.partial(nnx.RMSNorm, size, epsilon=norm_eps, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.q = linear(width, (heads, size))
        self.k, self.v = linear(width, (kv_heads, size)), linear(width, (kv_heads, size))
        self.o = linear((heads, size), width, axis=(-2, -1))
        self.q_norm, self.k_norm = (norm(), norm()) if qk_norm else (None, None)
        self.rope, self.window, self.causal, self.implementation = Rope.of(rope), window, causal, implementation
        self.cached_key: KVCache | None = nnx.data(None)
        self.cached_value: KVCache | None = nnx.data(None)

    def init_cache(self, batch: int, length: int) -> None:
        """Allocate a cache for the keys and values of `length` tokens in each row, for each stacked layer."""
        *stacked, _, heads, size = self.k.kernel.shape
        zeros = lambda: KVCache.zeros(stacked, batch, length, heads, size, self.k.dtype or self.k.param_dtype)
        self.cached_key, self.cached_value = zeros(), zeros()

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        q, k, v = (checkpoint_name(project(x), name) for name, project in (("q", self.q), ("k", self.k), ("v", self.v)))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        if self.rope is not None:
            at = jnp.arange(x.shape[1])[None] if positions is None else positions
            q, k = self.rope.rotate(q, at), self.rope.rotate(k, at)
        if self.cached_key is not None:
            assert self.cached_value is not None
            if segments is not None:
                raise JShardError(
                    "a jshard.Attention that keeps keys and values was given segments",
                    hint="give each text a row of its own",
                )
            self.cached_key.write(k, positions)
            self.cached_value.write(v, positions)
            if positions is not None:
                return self.o(self._from_cache(q, self.cached_key.read(), self.cached_value.read(), positions))
        how = {"causal": self.causal, "window": self.window, "implementation": self.implementation}
        return self.o(checkpoint_name(attend(q, k, v, segments=segments, **how), "attention"))

    def _from_cache(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        slots, at = jnp.arange(k.shape[1]), positions[:, None, :, None]
        seen = slots <= at
        if self.window is not None:
            seen &= slots > at - self.window
        return attend(q, k, v, causal=False, mask=seen)
