"""Time the matrix product of one device by its kernel and by XLA, bare and with bias and GELU."""

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
from jax.typing import DTypeLike

from jshard.kernels.chip import Chip, chip_called
from jshard.kernels.local_matmul import matmul
from jshard.kernels.select_algorithm import GPUS

EPILOGUES: dict[str, dict[str, Any]] = {"bare": {}, "bias and gelu": {"activation": "gelu"}}
CALL_SECONDS = 2e-3  # that one call should take: of a shorter one its dispatch is timed


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one op by one algorithm: median, lowest and highest of `repeats` calls."""

    op: str  # a collective, or the epilogue of a product
    algorithm: str
    amount: int  # bytes of the payload, or rows of the square matrices
    median: float
    low: float
    high: float
    repeats: int
    done: float  # bytes that each device puts on the wire, if it sends no more than the collective must; or operations
    limit: float  # of these a second, by the chip's maker: over a device's links one way, or at its peak; 0 if unknown
    group: int = 1

    @property
    def rate(self) -> float:
        """Return bytes, or floating-point operations, a second."""
        return self.done / self.median


def algorithms_at_hand(chip: Chip) -> list[str]:
    """List the algorithms that compile for `chip`. What is only interpreted is never timed."""
    return ["pallas", "xla"] if chip.platform == "tpu" or chip.name in GPUS else ["xla"]


def time_in_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float, float]]:
    """Time each of `runs`: median, lowest and highest seconds of `repeats` calls, each of which waits for its result.

    The runs take turns, so that other load, and a clock that slows with heat, fall on all alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(each), min(each), max(each)) for name, each in seconds.items()}


def measure(sides: Sequence[int], *, dtype: DTypeLike = "bfloat16", repeats: int = 20) -> list[Timing]:
    """Time each product at each of `sides`, by each algorithm that compiles here."""
    device = jax.devices()[0]
    chip = chip_called(device.device_kind, device.platform)
    peak = chip.peak(str(jnp.dtype(dtype))) if chip.flops else 0.0
    found = []
    for side in sides:
        chained = max(1, min(32, round(CALL_SECONDS * (peak or 1e11) / (2 * side**3))))
        for epilogue in EPILOGUES:
            runs = {word: _prepared(side, epilogue, word, dtype, chained) for word in algorithms_at_hand(chip)}
            for word, seconds in time_in_turns(runs, repeats).items():
                median, low, high = (each / chained for each in seconds)
                found.append(Timing(epilogue, word, side, median, low, high, repeats, 2 * side**3, peak))
    return found


def _prepared(side: int, epilogue: str, algorithm: Any, dtype: DTypeLike, chained: int) -> Callable[[], Any]:
    """Compile a chain of products and run it once, on numbers that neither vanish nor overflow along it."""
    random = np.random.default_rng(0)
    x, w = (random.standard_normal((side, side), np.float32) for _ in range(2))
    x, w = jnp.asarray(x, dtype), jnp.asarray(w / side**0.5, dtype)
    bias = jnp.ones(side, dtype) if EPILOGUES[epilogue] else None

    @jax.jit
    def chain(x: Array, w: Array, bias: Array | None) -> Array:
        for _ in range(chained):
            x = matmul(x, w, bias=bias, algorithm=algorithm, **EPILOGUES[epilogue])
        return x

    call = lambda: chain(x, w, bias).block_until_ready()
    call()
    return call
