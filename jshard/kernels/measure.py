"""Timings of collectives and products on the devices at hand, by each algorithm, and tests against XLA's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jshard.algorithms import ALGORITHMS
from jshard.errors import JShardError
from jshard.kernels.all_reduction import all_reduce
from jshard.kernels.chip import Chip, chip_called, interpret
from jshard.kernels.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from jshard.kernels.collectives import COLLECTIVES, pvary
from jshard.kernels.gather_scatter import all_gather, reduce_scatter
from jshard.kernels.local_matmul import matmul
from jshard.kernels.select_algorithm import GPUS, LONGEST_RING, NO_KERNELS

MOVES = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
PRODUCTS = {"all_gather_matmul": all_gather_matmul, "matmul_reduce_scatter": matmul_reduce_scatter}
CALL_SECONDS = 2e-3  # the least time of a timed call: below it, dispatch dominates


@dataclasses.dataclass(frozen=True)
class Timing:
    """The seconds of an op by an algorithm: median, lowest and highest of `repeats` calls."""

    op: str
    algorithm: str
    group: int
    amount: int  # bytes of the payload, or rows of the square matrices
    median: float
    low: float
    high: float
    repeats: int
    done: float  # the least bytes on the wire per device, or floating-point operations
    limit: (
        float  # the most of them a second, by the chip's maker: over a device's links one way, or at peak; 0 if unknown
    )

    @property
    def rate(self) -> float:
        """Bytes, or floating-point operations, a second."""
        return self.done / self.median


def algorithms_at_hand(op: str, group: int, chip: Chip) -> list[str]:
    """Return the algorithms of `op` compiled for `chip`. Interpreted kernels are never timed."""
    words = [word for word in ALGORITHMS[op] if word not in ("auto", "in_order", "torus", "hierarchical")]
    has_kernels = chip.platform == "tpu" or (op == "matmul" and chip.name in GPUS)
    return [word for word in words if word in NO_KERNELS or (has_kernels and (word != "ring" or group <= LONGEST_RING))]


def measure(mesh: Mesh, sizes: Sequence[int], *, dtype: DTypeLike = "bfloat16", repeats: int = 20) -> list[Timing]:
    """Time each collective at payloads of `sizes` bytes, by each algorithm that compiles here, over a mesh with one axis."""
    group, chip = mesh.size, _chip_at_hand()
    found = []
    for op, size in itertools.product(MOVES, sizes):
        runs = {}
        for algorithm in algorithms_at_hand(op, group, chip):
            with contextlib.suppress(JShardError):  # one_shot of a payload too large for VMEM
                runs[algorithm] = _prepared(mesh, op, algorithm, size, dtype)
        payload = _elements(size, group, dtype) * jnp.dtype(dtype).itemsize
        sent = COLLECTIVES[op].wire(payload, group)
        for algorithm, seconds in _time_in_turns(runs, repeats).items():
            found.append(Timing(op, algorithm, group, payload, *seconds, repeats, sent, chip.link))
    return found


def measure_products(sides: Sequence[int], *, dtype: DTypeLike = "bfloat16", repeats: int = 20) -> list[Timing]:
    """Time products of two square matrices of each size in `sides` on a device, by each algorithm that compiles here."""
    chip = _chip_at_hand()
    peak = chip.peak(str(jnp.dtype(dtype))) if chip.flops else 0.0
    found = []
    for side in sides:
        chained = max(1, min(32, round(CALL_SECONDS * (peak or 1e11) / (2 * side**3))))
        runs = {word: _prepared_product(side, word, dtype, chained) for word in algorithms_at_hand("matmul", 1, chip)}
        for word, seconds in _time_in_turns(runs, repeats).items():
            median, low, high = (each / chained for each in seconds)
            found.append(Timing("matmul", word, 1, side, median, low, high, repeats, 2 * side**3, peak))
    return found


def _chip_at_hand() -> Chip:
    device = jax.devices()[0]
    return chip_called(device.device_kind, device.platform)


def _time_in_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float, float]]:
    """Time each of `runs`: median, lowest and highest seconds of `repeats` calls, each waiting for its result.

    The runs take turns, so that other load, and a clock that slows with heat, affect all alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(each), min(each), max(each)) for name, each in seconds.items()}


def _elements(size: int, group: int, dtype: DTypeLike) -> int:
    return max(size // jnp.dtype(dtype).itemsize // group, 1) * group


def _prepared(mesh: Mesh, op: str, algorithm: str, size: int, dtype: DTypeLike) -> Callable[[], Any]:
    """Compile a collective and run it once."""
    group, (mesh_axis,) = mesh.size, mesh.axis_names
    full = _elements(size, group, dtype)
    local = full // group if op == "all_gather" else full
    sharding = jax.NamedSharding(mesh, P(mesh_axis))
    x = jax.make_array_from_callback((group * local,), sharding, lambda index: np.ones(local, jnp.dtype(dtype)))

    body = lambda x: _run(op, x, mesh_axis, algorithm)
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(mesh_axis), out_specs=P(mesh_axis)))
    call = lambda: program(x).block_until_ready()
    call()
    return call


def _prepared_product(side: int, algorithm: Any, dtype: DTypeLike, chained: int) -> Callable[[], Any]:
    """Compile a chain of products and run it once, on numbers that neither vanish nor overflow along it."""
    random = np.random.default_rng(0)
    x, w = (random.standard_normal((side, side), np.float32) for _ in range(2))
    x, w = jnp.asarray(x, dtype), jnp.asarray(w / side**0.5, dtype)

    @jax.jit
    def chain(x: Array, w: Array) -> Array:
        for _ in range(chained):
            x = matmul(x, w, algorithm=algorithm)
        return x

    call = lambda: chain(x, w).block_until_ready()
    call()
    return call


def _run(op: str, x: Array, mesh_axis: str, algorithm: Any) -> Array:
    """Run an op on a device's shard; the result varies over `mesh_axis`."""
    if op == "matmul":
        return matmul(x, x.T, algorithm=algorithm)
    if op in PRODUCTS:
        return PRODUCTS[op](x, x.T[:, :3], mesh_axis, algorithm=algorithm)
    return pvary(MOVES[op](x, mesh_axis, algorithm=algorithm), (mesh_axis,))


# -- the test against XLA --


@dataclasses.dataclass(frozen=True)
class Proof:
    """An op by an algorithm, compared with XLA's on integers: the number of differences on all devices together."""

    op: str
    algorithm: str
    shape: tuple[int, ...]
    dtype: str
    wrong: int
    interpreted: bool

    def __str__(self) -> str:
        verdict = "exact on every device" if not self.wrong else f"{self.wrong:,} numbers are WRONG"
        how = " (interpreted)" if self.interpreted else ""
        return f"{self.op} by {self.algorithm} of {self.dtype}{list(self.shape)}: {verdict}{how}"


def self_test(mesh: Mesh) -> Iterator[Proof]:
    """Compare every op by every algorithm with XLA's, on integers, on the devices of all processes.

    On CPUs the kernels for TPUs are interpreted, with all devices in one
    process. On GPUs only the product has a kernel. Permutes run anywhere.
    """
    chip = _chip_at_hand()
    can_interpret = chip.platform == "cpu" and jax.process_count() == 1
    for op, words in ALGORITHMS.items():
        at_hand = algorithms_at_hand(op, mesh.size, chip)
        for word in words:
            if word == "xla":
                continue
            if word in at_hand:
                yield _compare(mesh, op, word, True, "bfloat16" if chip.name in GPUS else "float32")
            elif can_interpret and word not in (*NO_KERNELS, "torus"):
                yield _compare(mesh, op, word, False)
    yield _compare(mesh, "all_reduce", "xla", True)


def _compare(mesh: Mesh, op: str, algorithm: str, compiled: bool, dtype: str = "float32") -> Proof:
    group, (mesh_axis,) = mesh.size, mesh.axis_names
    local = (2 * group, 5) if op in PRODUCTS or op == "matmul" else (group, 7)
    numbers = (
        (np.arange(group * local[0] * local[1]) * 7 % 13 - 6)
        .reshape(group * local[0], local[1])
        .astype(jnp.dtype(dtype))
    )
    sharding = jax.NamedSharding(mesh, P(mesh_axis))
    x = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])

    def body(x: Array) -> Array:
        if op == "all_reduce" and algorithm == "xla":  # compare XLA's own with a gather and a sum
            expected = lax.all_gather(x, mesh_axis).sum(0)
        else:
            expected = _run(op, x, mesh_axis, "xla")
        wrong = (_run(op, x, mesh_axis, algorithm) != expected).sum()
        return lax.psum(pvary(wrong, mesh.axis_names), mesh_axis)

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(mesh_axis), out_specs=P()))
    with contextlib.nullcontext() if compiled else interpret(races=False):
        wrong = int(program(x))
    return Proof(op, algorithm, local, dtype, wrong, not compiled)
