"""`jshard.Attention`: grouped queries with rotary positions, for training on packed rows and for decoding from a cache."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jshard.errors import JShardError
from jshard.layers.attending import attend
from jshard.layers.kv_cache import KVCache
from jshard.layers.rope import Rope


class Attention(nnx.Module):
    """Multi-head attention of `x[B, T, width]`, `heads` queries to `kv_heads` keys and values.

    Parameters: `q/kernel` (width, heads, head_dim), `k/kernel` and `v/kernel` (width, kv_heads, head_dim), `o/kernel` (heads,
    head_dim, width), and with `qk_norm` `q_norm/scale` and `k_norm/scale`. `column: tensor` of q, k and v with
    `reduction: tensor` of o splits the heads and costs one all-reduce forward and one backward.

    `window`, `causal` and `implementation` are those of `jshard.attend`. After `init_cache` a call keeps keys and values:
    without positions it begins anew at 0, else each row goes on at its own.
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
        """Make room for the keys and values of `length` tokens in each row; of layers that are stacked, for each of them."""
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
