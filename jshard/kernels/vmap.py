"""Run a kernel under `jax.vmap`: once, on the full batch. A grid can't repeat a kernel that copies to other devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from jshard.errors import JShardError


def call_batched(kernel: Callable[..., Any], x: Array, axis: int, *weights: Array, op: str = "") -> Any:
    """Call `kernel(x, axis, *weights)`; under vmap over x once, one axis further on. `weights` of `op` have no batch."""
    run = jax.custom_batching.custom_vmap(lambda x, *weights: kernel(x, axis, *weights))

    def batch(size: int, batched: list[bool], x: Array, *weights: Array) -> tuple[Any, Any]:
        if any(batched[1:]):
            fault = f'{op} by "fused" is under a jax.vmap over w, and takes one w'
            raise JShardError(fault, hint='use algorithm="xla"')
        y = call_batched(kernel, x, axis + 1, *weights, op=op)  # custom_vmap moves the batch to the front
        return y, jax.tree.map(lambda _: True, y)

    run.def_vmap(batch)
    return run(x, *weights)
