"""A decoder of scanned blocks, as large as one likes: for reading, pricing and planning; nobody trains it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import jshard
from jshard.layers import cross_entropy
from jshard.layers.creating import abstract
from jshard.layouts.layout import Layout
from jshard.signals.active_config import configuration, mesh


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int = 2
    features: int = 64
    heads: int = 8
    hidden: int = 128
    vocabulary: int = 64
    length: int = 16
    batch: int = 8

    @property
    def parameters(self) -> int:
        block = 4 * self.features**2 + 3 * self.features * self.hidden + 2 * self.features
        return self.layers * block + 2 * self.features * self.vocabulary + self.features


TINY = Size()
SEVEN_BILLION = Size(
    layers=32, features=4096, heads=32, hidden=11008, vocabulary=32000, length=2048, batch=32
)  # 6.74e9 parameters, in the shape of Llama 2 7B

# The compiled texts in tests/data/hlo keep what they gather: one gather and one scatter of each array, to be read.
SPLIT = {"row": "data", "store": {"parameters": "data", "keep": True}, "dtype": {"compute": "bfloat16"}}
SIGNALS: dict[str, Any] = {
    "embed": {**SPLIT},
    "attn/qkv": {**SPLIT, "column": "tensor"},
    "attn/out": {**SPLIT, "reduction": "tensor"},
    "mlp/up": {**SPLIT, "column": "tensor"},
    "mlp/down": {**SPLIT, "reduction": "tensor"},
    "head": {**SPLIT, "column": "tensor"},
}


def configured(data: int, tensor: int, *, axis_types: str = "explicit", sequence: bool = False) -> dict[str, Any]:
    """FSDP over data and tensor parallelism over tensor, in bfloat16; with `sequence`, activations between layers lie
    split by sequence."""
    signals = {name: dict(keys) for name, keys in SIGNALS.items()}
    if sequence:
        for name in signals:
            signals[name]["sequence"] = "tensor"
    return {"jshard": {"mesh": {"data": data, "tensor": tensor}, "axis_types": axis_types}, **signals}


class Block(nnx.Module):
    def __init__(self, size: Size, *, rngs: nnx.Rngs):
        linear = functools.partial(jshard.Linear, use_bias=False, rngs=rngs)
        self.heads = size.heads
        self.norms = nnx.List([nnx.RMSNorm(size.features, rngs=rngs) for _ in range(2)])
        with jshard.signal("attn/qkv"):
            self.q, self.k, self.v = (linear(size.features, size.features) for _ in range(3))
        with jshard.signal("attn/out"):
            self.out = linear(size.features, size.features)
        with jshard.signal("mlp/up"):
            self.gate, self.up = (linear(size.features, size.hidden) for _ in range(2))
        with jshard.signal("mlp/down"):
            self.down = linear(size.hidden, size.features)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attend(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))

    def attend(self, x: jax.Array) -> jax.Array:
        q, k, v = (_heads(layer(x), self.heads) for layer in (self.q, self.k, self.v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5)
        later = jnp.arange(x.shape[1])[:, None] < jnp.arange(x.shape[1])
        weights = jax.nn.softmax(jnp.where(later, -1e9, scores), axis=-1)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out(y.reshape(*y.shape[:2], -1))


def _heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:2], heads, -1)


class Decoder(nnx.Module):
    def __init__(self, size: Size, *, rngs: nnx.Rngs):
        linear = functools.partial(jshard.Linear, use_bias=False, rngs=rngs)
        with jshard.signal("embed"):
            self.embed = linear(size.vocabulary, size.features)
        self.blocks = nnx.vmap(functools.partial(_block, size), in_axes=0, out_axes=0)(rngs.split(size.layers))
        self.norm = nnx.RMSNorm(size.features, rngs=rngs)
        with jshard.signal("head"):
            self.head = linear(size.features, size.vocabulary)
        self.vocabulary = size.vocabulary

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(jax.nn.one_hot(tokens, self.vocabulary, dtype=jnp.bfloat16))
        graph, state = nnx.split(self.blocks)

        @jax.checkpoint
        def block(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graph, state)(x), None

        x, _ = jax.lax.scan(block, x, state)
        return self.head(self.norm(x))


def _block(size: Size, rngs: nnx.Rngs) -> Block:
    return Block(size, rngs=rngs)


def training_step(size: Size) -> tuple[Any, tuple[Any, ...]]:
    """The step of the loaded configuration as one program of pure arrays, and the shapes that it is called with."""

    def built() -> tuple[Decoder, nnx.Optimizer]:
        decoder = Decoder(size, rngs=nnx.Rngs(0))
        return decoder, jshard.Optimizer(decoder, optax.adamw(1e-4))

    graph, state = nnx.split(abstract(built))
    where = jax.tree.map(lambda array: array.sharding, state)

    def step(state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        decoder, optimizer = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(lambda decoder: cross_entropy(decoder(tokens), targets))(decoder)
        optimizer.update(decoder, gradients)
        return nnx.state((decoder, optimizer)), value

    assert configuration() is not None
    sharding = Layout(mesh(), "data", None).sharding
    tokens = jax.ShapeDtypeStruct((size.batch, size.length), jnp.int32, sharding=sharding)
    return jax.jit(step, donate_argnums=0, out_shardings=(where, None)), (state, tokens, tokens)


__all__ = ["SEVEN_BILLION", "TINY", "Decoder", "PartitionSpec", "Size", "configured", "training_step"]
