"""Token-by-token generation: a compiled program reads the prompts, another makes each token from a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jshard.errors import JShardError, kind_of
from jshard.layers.creating import created
from jshard.layers.program_claims import is_run_by_claims
from jshard.layers.sharding import shard
from jshard.layers.user_code_errors import as_user_error
from jshard.layouts.layout import Layout
from jshard.layouts.redistribution import redistribute
from jshard.signals.active_config import configuration, mesh
from jshard.signals.config import Configuration
from jshard.training.checkpoints.checkpoint import Checkpoint
from jshard.training.checkpoints.weights import load_weights
from jshard.training.components import Component
from jshard.training.data.batches import Placement
from jshard.training.settings import Settings

ROOM = 64  # prompts and caches are padded to a multiple, so that few lengths are compiled


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The rule that chooses a token: the likeliest at temperature 0, else a draw from the `top_k`
    likeliest tokens, and from the fewest with `top_p` of the probability."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        ranges = {"temperature": (0, None), "top_k": (1, None), "top_p": (0, 1)}
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and not (least <= value and (most is None or value <= most)):
                between = f"{least} or more" if most is None else f"a number between {least} and {most}"
                raise JShardError(f"{name} is {value}", hint=f"use {between}")
            if value is not None and name != "temperature" and self.temperature == 0:
                raise JShardError(
                    f"{name} is {value} at temperature 0, which always takes the likeliest token",
                    hint="use a temperature above 0, such as 1.0",
                )

    def choose(self, logits: jax.Array, positions: jax.Array, key: jax.Array) -> jax.Array:
        """Choose the token after a position in each row of `logits[B, V]`. A row's draw depends on
        the key, the row's number and the position, not on other rows."""
        if self.temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None or self.top_p is not None:
            logits = jnp.where(logits < self._least(logits), -jnp.inf, logits)

        def noise(row: jax.Array, position: jax.Array) -> jax.Array:
            return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, row), position), logits.shape[1:])

        return jnp.argmax(logits + jax.vmap(noise)(jnp.arange(len(logits)), positions), -1).astype(jnp.int32)

    def _least(self, logits: jax.Array) -> jax.Array:
        """Return for each row the smallest logit allowed in a draw."""
        falling = -jnp.sort(-logits, -1)[:, : self.top_k]
        if self.top_p is None:
            return falling[:, -1:]
        chances = jax.nn.softmax(falling, -1)
        before = jnp.cumsum(chances, -1) - chances
        return jnp.where((before < self.top_p) | (before == 0), falling, jnp.inf).min(-1, keepdims=True)


def generate(
    model: object, prompts: Sequence[Sequence[int]], *, tokens: int = 100, temperature: float = 0.0, top_k: int | None = None,
    top_p: float | None = None, stop: Sequence[int] = (), seed: int = 0,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Continue prompts of tokens: yield the next token of each, up to `tokens` times; None after a token in `stop`.

        for next in jshard.generate(model, [tokenizer.encode("Once")], temperature=0.8, top_k=40): ...

    `model` is a `jshard.Decoder`, or has its `init_cache`, `hidden` and `logits`. Parameters keep their sharding; the cache
    has the sharding of the keys and values that the model writes. The draws are equal on every mesh.
    """
    if missing := [name for name in ("init_cache", "hidden", "logits") if not hasattr(model, name)]:
        raise JShardError(
            f"{kind_of(model)} has no {missing[0]}, which generation needs",
            hint="give it a jshard.Decoder",
        )
    if not len(prompts):
        raise JShardError("there is no prompt", hint="give a list of prompts, each a list of tokens")
    if empty := [number for number, prompt in enumerate(prompts) if not len(prompt)]:
        raise JShardError(f"prompt {empty[0]} is empty", hint="give at least one token")
    if tokens < 1:
        raise JShardError(f"tokens is {tokens}", hint="use 1 or more")
    writer = Writer(model, prompts, tokens, Sampling(temperature, top_k, top_p), seed)
    going = [True] * len(prompts)
    for tokens_of_rows in writer:
        shown = [int(token) if on else None for token, on in zip(tokens_of_rows, going, strict=False)]
        going = [on and token not in stop for on, token in zip(going, shown, strict=True)]
        yield shown
        if not any(going):
            return


def trained_model(configuration: Configuration, on: Mesh | None, checkpoint: Checkpoint) -> nnx.Module:
    """Build the model of a training run with a checkpoint's parameters, without reading data or making an optimizer."""
    settings = Settings(configuration)
    named, ways = Component.of(settings, "model"), Placement(on, configuration.signals).ways

    def built() -> nnx.Module:
        return named(rngs=nnx.Rngs(settings["seed"]))

    with as_user_error(f"{named.path} is built"):
        if on is not None and is_run_by_claims(configuration, built):
            tokens = jax.ShapeDtypeStruct((ways, ROOM), jnp.int32)
            # The parameters are read from the checkpoint.
            model = created(built, lambda: shard(built(), tokens), only=nnx.Not(nnx.Param))
        else:
            model = built()
    return load_weights(model, checkpoint.folder)


class Writer:
    """An iterable of the next token of each prompt, up to `tokens` times."""

    def __init__(self, model: object, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling, seed: int):
        how = {"deterministic": True, "use_running_average": True, "dropless": True}
        self.graph, self.state = nnx.split(nnx.view(model, **how, raise_if_not_found=False))
        self.count, self.tokens, self.sampling, self.key = len(prompts), tokens, sampling, jax.random.key(seed)
        lengths = [*map(len, prompts)]
        rows = -(-len(prompts) // _placement().ways) * _placement().ways  # rows without a prompt are thrown away
        self.prompts = np.zeros((rows, -(-max(lengths) // ROOM) * ROOM), np.int32)
        self.lengths = np.array([*lengths, *[1] * (rows - len(prompts))], np.int32)
        self.room = -(-(max(lengths) + tokens) // ROOM) * ROOM
        self._check(prompts)
        for row, prompt in zip(self.prompts, prompts, strict=False):
            row[: len(prompt)] = prompt

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise an error for a token outside the model's vocabulary."""
        reads = functools.partial(_prefill, self.graph, self.room)
        vocabulary = jax.eval_shape(reads, self.state, self.prompts, self.lengths)[0].shape[-1]
        for number, prompt in enumerate(prompts):
            for at, token in enumerate(prompt):
                if not 0 <= token < vocabulary:
                    raise JShardError(
                        f"prompt {number} has token {token} at place {at}, and the model knows {vocabulary} tokens",
                        hint=f"use tokens from 0 to {vocabulary - 1}, of the tokenizer that it was trained with",
                    )

    def prefill(self) -> tuple[jax.Array, Any]:
        """Read the prompts, and return the next token of each, and the cache."""
        logits, cache = _prefill(self.graph, self.room, self.state, self.prompts, self.lengths)
        return _chosen(self.sampling, logits, self.lengths - 1, self.key), cache

    def decode(self, number: int, token: jax.Array, cache: object) -> tuple[jax.Array, Any]:
        """Return the token after number `number`, and the updated cache; the given cache is donated."""
        positions = self.lengths + np.int32(number)
        logits, cache = _decode(self.graph, self.room, self.state, cache, token, positions)
        return _chosen(self.sampling, logits, positions, self.key), cache

    def __iter__(self) -> Iterator[np.ndarray]:
        token, cache = self.prefill()
        for number in range(self.tokens):
            current = token
            if number + 1 < self.tokens:  # the devices compute the next token while the host reads this one
                token, cache = self.decode(number, current, cache)
            yield np.asarray(current)[: self.count]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(graph: Any, room: int, state: Sequence[Any], prompts: Any, lengths: Any) -> Any:
    model = nnx.merge(graph, state)
    model.init_cache(len(prompts), room)
    return _behind(model, prompts, lengths), jax.tree.leaves(nnx.state(model, nnx.Cache))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(graph: Any, room: int, state: Sequence[Any], cache: Any, token: Any, positions: Any) -> Any:
    model = nnx.merge(graph, state)
    model.init_cache(len(token), room)
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(nnx.state(model, nnx.Cache)), cache))
    logits = _next(model, {"tokens": token[:, None], "positions": positions[:, None]})
    return logits, jax.tree.leaves(nnx.state(model, nnx.Cache))


@shard
def _behind(model: Any, prompts: jax.Array, lengths: jax.Array) -> jax.Array:
    """Compute the logits after the last token of each prompt."""
    is_last = jnp.arange(prompts.shape[1]) == lengths[:, None] - 1
    return model.logits(jnp.where(is_last[..., None], model.hidden(prompts), 0).sum(1))


@shard
def _next(model: Any, token: Any) -> jax.Array:
    return model.logits(model.hidden(token)[:, 0])


@functools.partial(jax.jit, static_argnums=0)
def _chosen(sampling: Sampling, logits: jax.Array, positions: jax.Array, key: jax.Array) -> jax.Array:
    """Choose the tokens after these positions, and replicate them, for the host and for the embedding."""
    placement = _placement()
    if placement.mesh is None:
        return sampling.choose(logits, positions, key)
    logits = redistribute(logits, Layout(placement.mesh, placement.mesh_axes, ()))
    return redistribute(sampling.choose(logits, positions, key), Layout(placement.mesh, ()))


def _placement() -> Placement:
    present = configuration()
    return Placement(None, {}) if present is None or present.mesh is None else Placement(mesh(), present.signals)
