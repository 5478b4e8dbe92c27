"""A model on stages, of which one process gets the signal, at the step and of the rank, that STAGED says: `SIGKILL 5 1`;
once, before `jshard launch` starts all again."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import numpy as np
from flax import nnx

import jshard
from jshard.runs.names import RESTART

WIDTH = 8


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(nnx.silu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.blocks = jshard.stack(Block, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(x)


def data() -> dict[str, Any]:
    numbers = np.random.default_rng(0)
    return {"train": (numbers.normal(size=(64, WIDTH)).astype(np.float32), numbers.integers(0, WIDTH, 64))}


def disturb(name: str, step: int) -> None:
    pulse = jshard.pulse()
    waits = pulse.waits

    def disturbed(number: int, result: Any) -> None:
        waits(number, result)
        if number == step:  # handed to the devices
            os.kill(os.getpid(), signal.Signals[name])

    pulse.waits = disturbed


if "STAGED" in os.environ and RESTART not in os.environ:
    name, step, rank = os.environ["STAGED"].split()
    if os.environ.get("JAX_PROCESS_ID") == rank:
        disturb(name, int(step))
