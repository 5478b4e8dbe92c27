"""How long the product of one device takes by its kernel and by XLA, bare and with bias and GELU, side by side."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshard.kernels.chip import Chip, chip_called
from jshard.kernels.local_matmul import matmul
from jshard.kernels.select_algorithm import GPU_GENERATIONS

EPILOGUES: dict[str, dict[str, Any]] = {"bare": {}, "bias and gelu": {"activation": "gelu"}}
LONG_ENOUGH = 2e-3  # seconds that one call should take, or what is timed is its beginning


@dataclasses.dataclass(frozen=True)
class ProductTime:
    """A product of square matrices: seconds of one, by the median, the lowest and the highest of `repeats` calls, each of
    `chained` products one after the other."""

    side: int
    epilogue: str
    algorithm: str
    median: float
    low: float
    high: float
    repeats: int
    chained: int
    peak: float  # floating-point operations a second that the chip's maker states, 0 if unknown

    @property
    def rate(self) -> float:
        """Floating-point operations a second."""
        return 2 * self.side**3 / self.median


def algorithms_at_hand(chip: Chip) -> list[str]:
    """Those that compile for the device at hand. What is only interpreted is never timed."""
    able = chip.platform == "tpu" or chip.gpu.get("major") in GPU_GENERATIONS
    return ["pallas", "xla"] if able else ["xla"]


def measure(sides: Sequence[int], *, dtype: Any = "bfloat16", repeats: int = 20) -> list[ProductTime]:
    """Each product at each of `sides`, the algorithms taking turns so that what else the machine does, and what heat does
    to its clock, falls on all alike. Every call is waited for."""
    device = jax.devices()[0]
    chip = chip_called(device.device_kind, device.platform)
    peak = chip.peak(str(jnp.dtype(dtype))) if chip.flops else 0.0
    found = []
    for side in sides:
        chained = max(1, min(32, round(LONG_ENOUGH * (peak or 1e11) / (2 * side**3))))
        for epilogue in EPILOGUES:
            runs = {word: _prepared(side, epilogue, word, dtype, chained) for word in algorithms_at_hand(chip)}
            took: dict[str, list[float]] = {word: [] for word in runs}
            for _ in range(repeats):
                for word, run in runs.items():
                    begun = time.perf_counter()
                    run()
                    took[word].append((time.perf_counter() - begun) / chained)
            for word, seconds in took.items():
                middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
                found.append(ProductTime(side, epilogue, word, middle, low, high, repeats, chained, peak))
    return found


def _prepared(side: int, epilogue: str, algorithm: Any, dtype: Any, chained: int) -> Callable[[], None]:
    """A call that is compiled and has run once, on numbers that neither vanish nor overflow along the chain."""
    random = np.random.default_rng(0)
    x, w = (random.standard_normal((side, side), np.float32) for _ in range(2))
    x, w = jnp.asarray(x, dtype), jnp.asarray(w / side**0.5, dtype)
    bias = jnp.ones(side, dtype) if EPILOGUES[epilogue] else None

    @jax.jit
    def chain(x: Array, w: Array, bias: Array | None) -> Array:
        for _ in range(chained):
            x = matmul(x, w, bias=bias, algorithm=algorithm, **EPILOGUES[epilogue])
        return x

    def call() -> None:
        chain(x, w, bias).block_until_ready()

    call()
    return call
