"""Calls of Pallas TPU kernels inside a shard_map with `check_vma` on, compiled or interpreted.

A compiled kernel states the mesh axes over which its results vary (`manual_axis_type`). The interpreter turns a kernel
into JAX operations that mix varying and invariant values, which `check_vma` refuses. So operands of an interpreted
kernel are cast to invariant before the call and its results to varying after it; the check stays on around the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from jshard.kernels.chip import interpretation, present_chip
from jshard.kernels.collectives import pvary
from jshard.kernels.invariant_cast import invariant_cast_p
from jshard.kernels.kernel_traffic import declare
from jshard.kernels.tpu import dma
from jshard.kernels.tpu.dma import SMEM, VMEM, Group


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """The traffic and arithmetic of a kernel; neither XLA nor the ledger can see into it.

    `payload` has the shape and dtype of the array that the table of collectives counts. `wire` is
    the bytes that each device sends, padding included; `vmem` the bytes of VMEM that it needs.
    """

    op: str
    algorithm: str
    payload: Any = None
    wire: int = 0
    flops: int = 0
    vmem: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """The shape and dtype of a result, and the mesh axes over which it is invariant."""

    shape: tuple[int, ...]
    dtype: Any
    invariant_over: tuple[str, ...] = ()


def launch(
    body: Callable[..., None],
    operands: Sequence[Array],
    result: Result,
    grid_spec: pl.GridSpec,
    *,
    cost: KernelCost,
    group: Group | None = None,
    parallel: int = 0,
) -> Array:
    """Run a Pallas kernel and return its result.

    A kernel with a `group` sends to other devices of it; its first operand is then the device's
    coordinates in the group. The first `parallel` axes of the grid may run in any order.
    """
    mode = interpretation()
    # Coordinates alone make no result vary.
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in operands)) - {*result.invariant_over}
    operands = operands if group is None else (group.coordinates(), *operands)
    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * (len(grid_spec.grid) - parallel)
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(
            result.shape,
            result.dtype,
            manual_axis_type=ManualAxisType(varying=varying if mode is None else frozenset()),
        ),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(
            collective_id=None if group is None else group.collective_id,
            has_side_effects=group is not None,  # a device whose result is unused still has to send to the others
            # 1.5 times the kernel's need, within the chip
            vmem_limit_bytes=min(max(cost.vmem * 3 // 2, 16 << 20), (present_chip().vmem or 128) << 20),
            # in interpret mode, vmap adds an axis to the grid but no entry here
            dimension_semantics=semantics if semantics and mode is None else None,
        ),
        cost_estimate=pl.CostEstimate(
            flops=cost.flops,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands),
            remote_bytes_transferred=cost.wire,
        ),
        interpret=False
        if mode is None
        else pltpu.InterpretParams(detect_races=mode.races, dma_execution_mode=mode.copies),
        name=f"{cost.op}_{cost.algorithm}",
        metadata=None
        if group is None
        else declare(cost.op, group.mesh_axes, cost.payload, algorithm=cost.algorithm, wire=cost.wire),
    )
    if mode is None:
        return call(*operands)
    return pvary(call(*(invariant_cast_p.bind(x) for x in operands)), tuple(sorted(varying)))


def launch_once(
    body: Callable[..., None], x: Array, result: Result, group: Group, cost: KernelCost, scratch: Sequence[Any],
    *, partners: Literal["everyone", "neighbours"], memory: pl.BlockSpec = VMEM,
) -> Array:  # fmt: skip
    """Run `body(group, rank, x_ref, y_ref, *scratch)` between two barriers, without a grid: x and y are in `memory`."""

    def kernel(coordinates_ref: Any, *refs: object) -> None:
        inside, rank = group.inside_kernel(coordinates_ref)
        dma.barrier(inside, rank, partners)
        body(inside, rank, *refs)
        dma.barrier(inside, rank, partners)  # all have read their input: the next call may overwrite it

    spec = pl.GridSpec(in_specs=[SMEM, memory], out_specs=memory, scratch_shapes=scratch)
    return launch(kernel, [x], result, spec, cost=cost, group=group)
