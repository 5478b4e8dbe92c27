"""Declare what a Pallas kernel moves between devices, where it is called: the ledger can't see into a kernel.

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

from jshard.errors import JShardError
from jshard.hardware.chips import Chip
from jshard.kernels.collectives import COLLECTIVES
from jshard.programs.jaxprs import Shaped

KEY = "jshard"  # of pallas_call's metadata, which other tools may write to as well


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a kernel computes while its bytes travel.

    They go in `hops` one after the other, each over `ways` links at once. Between the start of a hop and the wait for it are
    products of `flops` operations on operands of `dtype`.
    """

    hops: int
    ways: int
    flops: int
    dtype: str

    def hidden(self, wire: int, chip: Chip) -> int:
        """Return how many of `wire` bytes travel under the products, at the peak and the link that the chip's maker states.

        A hop shows for as long as its bytes take longer on their links than its products take at the peak.
        """
        if not chip.link or not self.hops:
            return 0
        hop = wire / self.hops / self.ways / (chip.link / chip.devices)
        return int(wire * min(1.0, self.flops / chip.peak(self.dtype) / hop)) if wire else 0


def declare(
    op: str,
    mesh_axis: str | Sequence[str],
    payload: Shaped,
    *,
    algorithm: str,
    wire: int,
    schedule: Schedule | None = None,
) -> dict[str, str]:
    """Return the `metadata` of a `pallas_call` that sends along `mesh_axis`, so that the ledger counts it like XLA's own:

        pl.pallas_call(..., metadata=declare("all_reduce", "tensor", x, algorithm="one_shot", wire=x.nbytes * (n - 1)))

    `op` contains the name of a collective ("all_gather_matmul" is an all-gather). `payload` is the array (or its shape and
    dtype) that the table's price counts: the operand of an all-reduce or reduce-scatter, the result of an all-gather.
    Without a `schedule` a plan assumes that nothing runs while the bytes travel.
    """
    if collective_of(op) is None:
        raise JShardError(
            f'a kernel declares "{op}", which names no collective of the ledger',
            hint=f"use one of {', '.join(COLLECTIVES)}",
        )
    shape, dtype = tuple(payload.shape), jax.numpy.dtype(payload.dtype)
    entry = {
        "op": op,
        "algorithm": algorithm,
        "mesh_axes": [mesh_axis] if isinstance(mesh_axis, str) else list(mesh_axis),
        "payload": math.prod(shape) * dtype.itemsize,
        "wire": wire,
        "shape": shape,
        "dtype": str(dtype),
    }
    if schedule is not None:
        entry["schedule"] = dataclasses.asdict(schedule)
    return {KEY: json.dumps(entry)}


def declared(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read what the kernel of a `pallas_call` equation declares, from the equation's parameters; None if nothing."""
    text = (parameters.get("metadata") or {}).get(KEY)
    return None if text is None else json.loads(text)


def collective_of(op: str) -> str | None:
    """Return the collective that `op` names, alone or fused with a product."""
    return next((name for name in COLLECTIVES if name in op), None)
