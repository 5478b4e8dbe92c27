"""A model on stages, of which one process is killed, or hangs, in the operation of its table and the step that STAGED says:
`kill 5 "stage 2, tick 4"`; once, before `jshard launch` starts all again."""

from __future__ import annotations

import os
import shlex
import signal
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

import jshard
from jshard import events
from jshard.run_names import RESTART

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


def disturb(fault: str, step: int, place: str) -> None:
    hears = events.operation

    def operation(where: str, ended: bool) -> None:
        assert hears is not None
        hears(where, ended)
        if where.startswith(place) and not ended and jshard.pulse().step == step:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)

    events.hear_operations(operation)


if "STAGED" in os.environ and RESTART not in os.environ:
    name, number, place = shlex.split(os.environ["STAGED"])
    disturb(name, int(number), place)
