"""What is trained under the soak: a step is nothing, and between two of them each process sleeps, or fails if it is told to.

The folder SOAK_HERE holds the words: `raise.2` makes process 2 raise, `full.2` lets it write no more, `nan.2` gives it
rows of NaN from then on; `hurry` ends the sleeping.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import jshard

PAUSE = float(os.environ.get("SOAK_PAUSE", "0.25"))  # seconds between two steps


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        with jshard.signal("layer1"):
            self.up = jshard.Linear(8, 16, use_bias=False, rngs=rngs)
        with jshard.signal("layer2"):
            self.down = jshard.Linear(16, 4, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jshard.signal("layer1"):
            x = nnx.relu(self.up(x))
        with jshard.signal("layer2"):
            return self.down(x)


class Rows:
    """64 rows of numbers; reading one takes its time."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(0)
        self.x, self.y = numbers.normal(size=(64, 8)).astype(np.float32), numbers.integers(0, 4, 64).astype(np.int32)
        self.here, self.rank = Path(os.environ["SOAK_HERE"]), os.environ.get("JAX_PROCESS_ID", "0")
        (self.here / f"pid.{self.rank}").write_text(str(os.getpid()))
        self.ahead, self.read = 12, 0  # rows of the first batch and of those that are read ahead

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        self.read += 1
        if self.read > self.ahead and not (self.here / "hurry").exists():
            time.sleep(PAUSE / 4)  # a process reads four rows for a step
        if self._told("raise"):
            raise RuntimeError("the soak says so")
        if self._told("full"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        ill = (self.here / f"nan.{self.rank}").exists()
        return self.x[number] * np.float32("nan" if ill else 1), self.y[number]

    def _told(self, word: str) -> bool:
        told = self.here / f"{word}.{self.rank}"
        if not told.exists():
            return False
        told.unlink()
        return True


def data() -> dict[str, Any]:
    rows = Rows()
    return {"train": rows, "test": (rows.x, rows.y)}
