"""`jshard.Decoder`: a language model in the form of Llama 3 and Qwen3, from a short config."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.errors import JShardError, did_you_mean
from jshard.layers.attention import Attention, Rope, fields_of
from jshard.layers.layer_stack import stack
from jshard.layers.linear import GatedMLP
from jshard.layers.moe import MoE
from jshard.signals.schema import DTYPES


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a decoder, with the compute dtype `dtype` and the parameters' dtype `param_dtype`."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    hidden: int
    kv_heads: int | None = None  # default: heads
    head_dim: int | None = None  # default: width / heads
    norm_eps: float = 1e-6
    rope: Rope | Mapping[str, Any] = Rope()
    qk_norm: bool = False
    tied: bool = False  # the head is the embedding's table
    window: int | None = None
    dropout: float = 0.0
    experts: int | None = None  # of a jshard.MoE in each layer, `hidden` wide; each token goes to top_k experts
    top_k: int = 2
    capacity: float | None = None
    implementation: str | None = None  # of jax.nn.dot_product_attention
    unroll: int = 1  # layers in one iteration of the scan: see jshard.stack
    dtype: str | None = None
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope", Rope.of(self.rope))
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            hint, kind = "", str(field.type).partition(" ")[0]
            if kind == "int" and not _is_number(value, int | np.integer, 1):
                hint = "use a whole number, 1 or more"
            elif kind == "float" and not _is_number(value, float | int | np.floating, 0):
                hint = "use a number, 0 or more"
            elif field.name == "dropout" and self.dropout >= 1:
                hint = "use 0, or a share below 1"
            elif field.name.endswith("dtype") and not _is_dtype(value):
                hint = did_you_mean(value, DTYPES, f"use {', '.join(DTYPES)}")
            if hint:
                raise JShardError(f"a jshard.Decoder has {field.name}: {value!r}", hint=hint)


class Block(nnx.Module):
    """A transformer block: `x + attn(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c, dtypes = config, _dtypes(config)
        self.attn_norm = nnx.RMSNorm(c.width, epsilon=c.norm_eps, rngs=rngs, **dtypes)
        self.attn = Attention(
            c.width, c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, qk_norm=c.qk_norm, norm_eps=c.norm_eps, rope=c.rope,
            window=c.window, implementation=c.implementation, rngs=rngs, **dtypes,
        )  # fmt: skip
        self.mlp_norm = nnx.RMSNorm(c.width, epsilon=c.norm_eps, rngs=rngs, **dtypes)
        mlp = (
            GatedMLP
            if c.experts is None
            else functools.partial(MoE, experts=c.experts, top_k=c.top_k, capacity=c.capacity)
        )
        self.mlp = mlp(c.width, c.hidden, rngs=rngs, **dtypes)
        self.dropout = nnx.Dropout(c.dropout, rngs=rngs) if c.dropout else None

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        x = x + self._dropped(self.attn(self.attn_norm(x), positions, segments))
        return x + self._dropped(self.mlp(self.mlp_norm(x)))

    def _dropped(self, x: jax.Array) -> jax.Array:
        return x if self.dropout is None else self.dropout(x)


class Decoder(nnx.Module):
    """A language model from tokens `int32[B, T]` to logits `float32[B, T, vocabulary]`.

        model = jshard.Decoder(vocabulary=256, width=64, depth=2, heads=4, hidden=128, rngs=nnx.Rngs(0))

    It has an embedding, `depth` equal blocks, a norm and a head; `DecoderConfig` lists the sizes. The input may also be a
    mapping `{"tokens", "positions", "segments"}`.
    """

    def __init__(self, *, rngs: nnx.Rngs, **sizes: object):
        self.config = c = DecoderConfig(**fields_of(DecoderConfig, sizes, "a jshard.Decoder"))
        dtypes = _dtypes(c)
        self.embed = nnx.Embed(c.vocabulary, c.width, rngs=rngs, **dtypes)
        self.blocks = stack(Block, c.depth, c, rngs=rngs, unroll=c.unroll)
        self.norm = nnx.RMSNorm(c.width, epsilon=c.norm_eps, rngs=rngs, **dtypes)
        self.head = None if c.tied else nnx.Linear(c.width, c.vocabulary, use_bias=False, rngs=rngs, **dtypes)

    def __call__(self, inputs: jax.Array | Mapping[str, jax.Array]) -> jax.Array:
        return self.logits(self.hidden(inputs))

    def hidden(self, inputs: jax.Array | Mapping[str, jax.Array]) -> jax.Array:
        """Compute the input of the head, `[B, T, width]`."""
        given = inputs if isinstance(inputs, Mapping) else {"tokens": inputs}
        x = self.blocks(self.embed(given["tokens"]), given.get("positions"), given.get("segments"))
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Compute the logits of hidden states, for all places or a part of them."""
        logits = self.embed.attend(hidden) if self.head is None else self.head(hidden)
        return logits.astype(jnp.float32)

    def init_cache(self, batch: int, length: int) -> None:
        """Allocate caches for the keys and values of up to `length` tokens; a call with tokens alone restarts at 0."""
        for _, module in nnx.iter_modules(self):
            if isinstance(module, Attention):
                module.init_cache(batch, length)


# The signature names every size, so that a misspelt word in YAML is an error with its line and the nearest name.
_own, _rngs, _ = inspect.signature(Decoder.__init__).parameters.values()
_sizes = [
    _rngs.replace(name=field.name, default=None, annotation=field.type) for field in dataclasses.fields(DecoderConfig)
]
setattr(Decoder.__init__, "__signature__", inspect.Signature([_own, *_sizes, _rngs]))  # noqa: B010


def _is_number(value: Any, kinds: Any, least: int) -> bool:
    return isinstance(value, kinds) and value is not True and bool(value >= least)


def _is_dtype(value: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(value), jnp.floating))
    except TypeError:
        return False


def _dtypes(config: DecoderConfig) -> dict[str, Any]:
    return {"dtype": config.dtype and jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
