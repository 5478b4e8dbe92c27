"""Rotary position embeddings (RoPE), with the scalings that long contexts are trained with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard.errors import JShardError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Rope:
    """The base of the rotations, and how their frequencies are scaled; the words are those of `rope_scaling` in a model's
    config.json."""

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
        """Return the angle by which each pair of a head of this size turns from one position to the next."""
        turns = self.theta ** -(np.arange(0, size, 2) / size)
        if self.scaling == "none":
            return turns
        if self.scaling == "linear":
            return turns / self.factor
        # llama3: fast pairs stay as they are, slow ones are divided by the factor
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
    """Return the fields of a dataclass that are given; one that it has not, or that is missing, is an error."""
    fields = {each.name: each for each in dataclasses.fields(kind)}
    for name in given:
        if name not in fields:
            raise JShardError(f'{label} has no "{name}"', hint=did_you_mean(name, fields, f"use {', '.join(fields)}"))
    for name, field in fields.items():
        if name not in given and field.default is dataclasses.MISSING:
            raise JShardError(f"{label} says no {name}", hint=f"write {name}: beside what it says")
    return dict(given)
