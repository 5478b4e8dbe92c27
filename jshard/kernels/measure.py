"""Time the collectives on the devices at hand, algorithm beside algorithm, and test them there against XLA's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
from jshard.errors import JShardError, did_you_mean
from jshard.kernels import product_times
from jshard.kernels.all_reduction import all_reduce
from jshard.kernels.chip import chip_called, interpret
from jshard.kernels.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from jshard.kernels.collectives import COLLECTIVES, pvary
from jshard.kernels.gather_scatter import all_gather, reduce_scatter
from jshard.kernels.local_matmul import matmul
from jshard.kernels.product_times import Timing
from jshard.kernels.select_algorithm import LONGEST_RING, NO_KERNELS

MOVES = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
PRODUCTS = {"all_gather_matmul": all_gather_matmul, "matmul_reduce_scatter": matmul_reduce_scatter}


def algorithms_at_hand(op: str, group: int, platform: str) -> list[str]:
    """List the algorithms of `op` that compile for the devices at hand. What is only interpreted is never timed."""
    words = [word for word in ALGORITHMS[op] if word not in ("auto", "in_order", "torus", "hierarchical")]
    if platform != "tpu":
        return [word for word in words if word in NO_KERNELS]
    return [word for word in words if word == "xla" or word != "ring" or group <= LONGEST_RING]


def measure(
    mesh: Mesh, mesh_axis: str, sizes: Sequence[int], *, dtype: DTypeLike = "bfloat16", repeats: int = 20
) -> list[Timing]:
    """Time each collective at each of `sizes`, bytes of its payload, by each algorithm that compiles here."""
    _check_mesh_axis(mesh, mesh_axis)
    group, device = mesh.shape[mesh_axis], mesh.devices.flat[0]
    limit = chip_called(device.device_kind, device.platform).link
    found = []
    for op, size in itertools.product(MOVES, sizes):
        runs = {}
        for algorithm in algorithms_at_hand(op, group, device.platform):
            try:
                runs[algorithm] = _prepared(mesh, mesh_axis, op, algorithm, size, dtype)
            except JShardError:  # one_shot of what does not fit VMEM: the others can still be timed
                continue
        payload = _elements(op, size, group, dtype) * jnp.dtype(dtype).itemsize
        sent = COLLECTIVES[op].wire(payload, group)
        for algorithm, seconds in product_times.time_in_turns(runs, repeats).items():
            found.append(Timing(op, algorithm, payload, *seconds, repeats, sent, limit, group))
    return found


def _elements(op: str, size: int, group: int, dtype: DTypeLike) -> int:
    return max(size // jnp.dtype(dtype).itemsize // group, 1) * group


def _prepared(mesh: Mesh, mesh_axis: str, op: str, algorithm: str, size: int, dtype: DTypeLike) -> Callable[[], Any]:
    """Compile a collective and run it once."""
    group = mesh.shape[mesh_axis]
    full = _elements(op, size, group, dtype)
    local = full // group if op == "all_gather" else full
    sharding = jax.NamedSharding(mesh, P(mesh_axis))
    x = jax.make_array_from_callback((group * local,), sharding, lambda index: np.ones(local, jnp.dtype(dtype)))

    body = lambda x: _run(op, x, mesh_axis, algorithm)
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(mesh_axis), out_specs=P(mesh_axis)))
    call = lambda: program(x).block_until_ready()
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
    """One op by one algorithm compared with XLA's on integers: how many numbers differ, on all devices together."""

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


def self_test(mesh: Mesh, mesh_axis: str) -> Iterator[Proof]:
    """Compare every op by every algorithm with XLA's, on integers, on the devices of one process or of many.

    On CPUs the kernels for TPUs are interpreted, which needs all devices in one process. On GPUs only the product has one.
    Permutes run anywhere.
    """
    _check_mesh_axis(mesh, mesh_axis)
    device = mesh.devices.flat[0]
    compiled = device.platform != "cpu"
    on_gpu = device.platform == "gpu"
    has_product = "pallas" in product_times.algorithms_at_hand(chip_called(device.device_kind, device.platform))
    for op, words in ALGORITHMS.items():
        for algorithm in words:
            if algorithm == "permute":
                yield _compare(mesh, mesh_axis, op, algorithm, True)
            elif algorithm in (*NO_KERNELS, "torus") or not (compiled or jax.process_count() == 1):
                continue
            elif not on_gpu or (op == "matmul" and has_product):
                yield _compare(mesh, mesh_axis, op, algorithm, compiled, "bfloat16" if on_gpu else "float32")
    yield _compare(mesh, mesh_axis, "all_reduce", "xla", True)


def _compare(mesh: Mesh, mesh_axis: str, op: str, algorithm: str, compiled: bool, dtype: str = "float32") -> Proof:
    group = mesh.shape[mesh_axis]
    local = (2 * group, 5) if op in PRODUCTS or op == "matmul" else (group, 7)
    numbers = (
        (np.arange(group * local[0] * local[1]) * 7 % 13 - 6)
        .reshape(group * local[0], local[1])
        .astype(jnp.dtype(dtype))
    )
    sharding = jax.NamedSharding(mesh, P(mesh_axis))
    x = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])

    def body(x: Array) -> Array:
        if op == "all_reduce" and algorithm == "xla":  # XLA's own is compared with a gather and a sum
            expected = lax.all_gather(x, mesh_axis).sum(0)
        else:
            expected = _run(op, x, mesh_axis, "xla")
        wrong = (_run(op, x, mesh_axis, algorithm) != expected).sum()
        return lax.psum(pvary(wrong, mesh.axis_names), mesh.axis_names)

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(mesh_axis), out_specs=P()))
    with contextlib.nullcontext() if compiled else interpret(races=False):
        wrong = int(program(x))
    return Proof(op, algorithm, local, dtype, wrong, not compiled)


def _check_mesh_axis(mesh: Mesh, mesh_axis: str) -> None:
    if mesh_axis not in mesh.axis_names:
        hint = did_you_mean(mesh_axis, mesh.axis_names, f"use {' or '.join(mesh.axis_names)}")
        raise JShardError(f'the mesh has no mesh axis "{mesh_axis}"', hint=hint)
