"""A kernel under `jax.vmap`: run once on the whole batch, as one that copies to another device can't be repeated by a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from jshard.errors import JShardError


def call_batched(kernel: Callable[..., Any], x: Array, axis: int, *others: Array, op: str = "") -> Any:
    """`kernel(x, axis, *others)`; of a batch of x, one axis further on. `others` are weights of `op`, which have no batch."""
    run = jax.custom_batching.custom_vmap(lambda x, *others: kernel(x, axis, *others))

    def batch(size: int, batched: list[bool], x: Array, *others: Array) -> tuple[Any, Any]:
        if any(batched[1:]):
            fault = f'{op} by "fused" is under a jax.vmap over w, and takes one w'
            raise JShardError(fault, mend='use algorithm="xla"')
        done = call_batched(kernel, x, axis + 1, *others, op=op)
        return done, jax.tree.map(lambda _: True, done)

    run.def_vmap(batch)
    return run(x, *others)
