"""Declarations of a Pallas kernel's traffic between devices, at its call: the ledger can't see into a kernel.

A declaration is the entry "jshard" of `pallas_call`'s `metadata`: JSON with `op` and `algorithm` (words), `mesh_axes`,
`payload` (bytes of the array that the table of collectives counts) and `wire` (bytes that one device sends).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jshard.errors import JShardError
from jshard.kernels.collectives import COLLECTIVES
from jshard.programs.jaxprs import Shaped

KEY = "jshard"  # the entry in pallas_call's metadata; other tools may have entries too


def declare(
    op: str,
    mesh_axis: str | Sequence[str],
    payload: Shaped,
    *,
    algorithm: str,
    wire: int,
) -> dict[str, str]:
    """Return the `metadata` of a `pallas_call` that sends along `mesh_axis`: the ledger counts it like XLA's own.

        pl.pallas_call(..., metadata=declare("all_reduce", "tensor", x, algorithm="one_shot", wire=x.nbytes * (n - 1)))

    `op` contains the name of a collective ("all_gather_matmul" is an all-gather). `payload` is the array
    (or its shape and dtype) that the table's price counts: the operand of an all-reduce or
    reduce-scatter, the result of an all-gather. A plan assumes that nothing runs while the bytes travel.
    """
    if collective_of(op) is None:
        raise JShardError(
            f'a kernel declares "{op}", but the ledger has no such collective',
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
    return {KEY: json.dumps(entry)}


def declared(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the declaration in the parameters of a `pallas_call` equation; None if there is none."""
    text = (parameters.get("metadata") or {}).get(KEY)
    return None if text is None else json.loads(text)


def collective_of(op: str) -> str | None:
    """Return the collective in the name `op`, alone or fused with a product."""
    return next((name for name in COLLECTIVES if name in op), None)
