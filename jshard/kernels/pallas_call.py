"""A Pallas call inside a shard_map with `check_vma` on: compiled as it is, interpreted on an island.

A compiled kernel says by `manual_axis_type` over which mesh axes its results vary. An interpreted one is taken apart into
JAX operations that mix varying and unvarying numbers, which the check refuses. Its operands are therefore declared
unvarying on the way in, by a primitive that only changes the type, and its results varying on the way out; all around it
the check stays on. The device's own place is an operand, never asked for inside a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from jshard.kernels.chip import interpretation, present_chip
from jshard.kernels.collectives import check_vma_enabled
from jshard.kernels.invariant_cast import unvary_p
from jshard.kernels.kernel_traffic import Schedule, declare


@dataclasses.dataclass(frozen=True)
class Told:
    """What a kernel says of itself: nobody can see what its copies move. `payload` has the shape and dtype of the array that
    the table of collectives counts, `wire` counts the bytes that each device sends, padding included; `schedule` is what it
    computes meanwhile."""

    op: str
    algorithm: str
    mesh_axes: tuple[str, ...] = ()
    payload: Any = None
    wire: int = 0
    schedule: Schedule | None = None

    def metadata(self) -> dict[str, str] | None:
        """For the ledger; of a kernel that stays on its device there is nothing to tell."""
        if not self.mesh_axes:
            return None
        return declare(
            self.op, self.mesh_axes, self.payload, algorithm=self.algorithm, wire=self.wire, schedule=self.schedule
        )


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape and dtype of a result, and the mesh axes over which it is the same on every device."""

    shape: tuple[int, ...]
    dtype: Any
    same_over: tuple[str, ...] = ()


def launch(
    body: Callable[..., None],
    operands: Sequence[Array],
    results: Sequence[Shape],
    *,
    told: Told,
    here: Array | None = None,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    scratch: Sequence[Any] = (),
    grid: tuple[int, ...] = (),
    prefetched: int = 0,
    collective_id: int | None = None,
    flops: int = 0,
    vmem: int = 0,
    parallel: int = 0,
) -> tuple[Array, ...]:
    """The results of a Pallas kernel. `here`, its first operand, says which device this is; results don't vary for that
    alone. The first `prefetched` operands are scalars that index maps may read; the first
    `parallel` axes of the grid may run in any order; `vmem` is what the kernel needs, in bytes."""
    how = interpretation()
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in operands))
    checked = check_vma_enabled()
    operands = operands if here is None else (here, *operands)
    moved = sum(x.size * x.dtype.itemsize for x in operands)
    order: Any = ("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
    call = pl.pallas_call(
        body,
        out_shape=tuple(
            jax.ShapeDtypeStruct(
                r.shape,
                r.dtype,
                manual_axis_type=ManualAxisType(
                    varying=varying - {*r.same_over} if checked and how is None else frozenset()
                ),
            )
            for r in results
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=prefetched,
            grid=grid,
            in_specs=list(in_specs),
            out_specs=tuple(out_specs),
            scratch_shapes=list(scratch),
        ),
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id,
            has_side_effects=collective_id is not None,
            vmem_limit_bytes=vmem_limit(vmem),
            dimension_semantics=order if grid and how is None else None,  # the interpreter's vmap counts no new axis
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=moved, remote_bytes_transferred=told.wire
        ),
        interpret=False
        if how is None
        else pltpu.InterpretParams(detect_races=how.races, dma_execution_mode=how.copies),
        name=f"{told.op}_{told.algorithm}",
        metadata=told.metadata(),
    )
    if how is None:
        return tuple(call(*operands))
    out = call(*(unvary_p.bind(x) for x in operands))
    return tuple(
        lax.pcast(y, tuple(sorted(varying - {*r.same_over})), to="varying")
        if checked and varying - {*r.same_over}
        else y
        for y, r in zip(out, results, strict=True)
    )


def vmem_limit(needed: int) -> int:
    """What to ask of Mosaic for a kernel that needs `needed` bytes of VMEM: half as much again, within the chip."""
    chip = present_chip()
    return min(max(needed * 3 // 2, 16 << 20), (chip.vmem or 128) << 20)
