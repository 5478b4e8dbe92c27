"""Kernels under `jax.vmap`: a single call on the full batch. A grid can't repeat a kernel with remote copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array


def call_batched(kernel: Callable[[Array, int], Any], x: Array, axis: int) -> Any:
    """Call `kernel(x, axis)`; under vmap call it once, with `axis` increased by 1."""
    run = jax.custom_batching.custom_vmap(lambda x: kernel(x, axis))

    def batch(size: int, batched: list[bool], x: Array) -> tuple[Any, Any]:
        y = call_batched(kernel, x, axis + 1)  # custom_vmap moves the batch to the front
        return y, jax.tree.map(lambda _: True, y)

    run.def_vmap(batch)
    return run(x)
