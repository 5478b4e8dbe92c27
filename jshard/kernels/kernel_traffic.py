"""What a Pallas kernel moves between devices, declared where it is called: the ledger can't see into a kernel.

A declaration is the entry "jshard" of `pallas_call`'s `metadata`: JSON with `op` and `algorithm` (words), `mesh_axes`,
`payload` (bytes of the array that the table of collectives counts), `wire` (bytes that one device sends) and `schedule`
(what the kernel computes while they travel).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jshard.chips import Chip
from jshard.errors import JShardError
from jshard.kernels.collectives import COLLECTIVES

KEY = "jshard"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a kernel computes while its bytes travel: they go in `hops` one after the other, each over `ways` links at once;
    from where a hop begins to where the kernel waits for it lie products of `flops` operations on operands of `dtype`."""

    hops: int
    ways: int
    flops: int
    dtype: str

    def hidden(self, wire: int, chip: Chip) -> int:
        """Of `wire` bytes those that travel under the products, by the rates that the chip's maker states: products take
        the time of their operations at the peak, and each hop shows where its bytes take longer than that on their links."""
        if not chip.link or not self.hops:
            return 0
        hop = wire / self.hops / self.ways / (chip.link / chip.devices)
        return int(wire * min(1.0, self.flops / chip.peak(self.dtype) / hop)) if wire else 0


def declare(
    op: str,
    mesh_axis: str | Sequence[str],
    payload: Any,
    *,
    algorithm: str,
    wire: int,
    schedule: Schedule | None = None,
) -> dict[str, str]:
    """The `metadata` of a `pallas_call` that moves data between the devices along `mesh_axis`, so that the ledger counts it
    as it counts XLA's own collectives:

        pl.pallas_call(..., metadata=declare("all_reduce", "tensor", x, algorithm="one_shot", wire=x.nbytes * (n - 1)))

    `op` holds the name of a collective ("all_gather_matmul" is an all-gather). `payload` is the array (or its shape and
    dtype) that the table's price counts: what an all-reduce or reduce-scatter takes in, what an all-gather gives out.
    Without a `schedule` nothing runs while the bytes travel, as far as a plan knows.
    """
    if collective_of(op) is None:
        raise JShardError(
            f'a kernel declares "{op}", which names no collective of the ledger',
            mend=f"use one of {', '.join(COLLECTIVES)}",
        )
    shape, dtype = tuple(payload.shape), jax.numpy.dtype(payload.dtype)
    said = {
        "op": op,
        "algorithm": algorithm,
        "mesh_axes": [mesh_axis] if isinstance(mesh_axis, str) else list(mesh_axis),
        "payload": math.prod(shape) * dtype.itemsize,
        "wire": wire,
        "shape": shape,
        "dtype": str(dtype),
    }
    if schedule is not None:
        said["schedule"] = dataclasses.asdict(schedule)
    return {KEY: json.dumps(said)}


def declared(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the kernel of a `pallas_call` equation declares, by the equation's parameters; None if it declares nothing."""
    text = (parameters.get("metadata") or {}).get(KEY)
    return None if text is None else json.loads(text)


def collective_of(op: str) -> str | None:
    """The collective that `op` names, alone or fused with a product."""
    return next((name for name in COLLECTIVES if name in op), None)
