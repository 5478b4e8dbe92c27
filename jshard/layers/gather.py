"""The gather of a shard in its compute dtype, with a gradient scattered in the shard's own dtype."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jshard.kernels.collectives import check_vma_enabled
from jshard.kernels.gather_scatter import all_gather, reduce_scatter
from jshard.kernels.select_algorithm import resolve_algorithm
from jshard.layouts.redistribution import take_slice

Gathers = tuple[tuple[int, str, bool], ...]  # axis, mesh axis, True if the use varies over the mesh axis
Kernels = tuple[tuple[str, str], ...]  # op -> algorithm, from a signal


def gather(x: Array, steps: Gathers, *, dtype: DTypeLike | None = None, kernels: Kernels = ()) -> Array:
    """Gather `x` in `dtype`, beginning with the last step. The gradient has the dtype of `x`. Over
    a mesh axis along which the use varies, the gradient is scattered; over the others, where it is
    equal on all devices, it is sliced. Algorithms not named in `kernels` are "auto"."""
    words = {op: dict(kernels).get(op, "auto") for op in ("all_gather", "reduce_scatter")}
    narrow = jnp.dtype(x.dtype if dtype is None else dtype)
    # JAX transposes XLA's gather to XLA's scatter itself, and differentiates it forward too.
    by_xla = all(
        resolve_algorithm("all_gather", words["all_gather"], x, (name,)) in ("in_order", "xla")
        and not (varies and resolve_algorithm("reduce_scatter", words["reduce_scatter"], x, (name,)) != "xla")
        for _, name, varies in steps
    )
    if by_xla and (x.dtype == narrow or not steps):
        return _gathered(x.astype(narrow), steps, "xla")
    return _gather(x, steps, narrow, x.dtype, words["all_gather"], words["reduce_scatter"])


def _gathered(x: Array, steps: Gathers, algorithm: Any) -> Array:
    for axis, name, varies in reversed(steps):
        result = "varying" if varies else "invariant"
        x = all_gather(x, name, axis=axis, result=result, algorithm=algorithm)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _gather(x: Array, steps: Gathers, dtype: DTypeLike, wide: DTypeLike, algorithm: str, scatters_by: object) -> Array:
    return _gathered(x.astype(dtype), steps, algorithm)


def _gather_bwd(
    steps: Gathers, dtype: DTypeLike, wide: DTypeLike, algorithm: Any, scatters_by: Any, _: None, cotangent: Array
) -> tuple[Array]:
    cotangent = cotangent.astype(wide)
    for axis, name, varies in steps:
        if varies or not check_vma_enabled():  # without the check, equal gradients are not known
            cotangent = reduce_scatter(cotangent, name, axis=axis, algorithm=scatters_by)
        else:
            cotangent = take_slice(cotangent, name, axis)
    return (cotangent,)


_gather.defvjp(lambda x, *static: (_gather(x, *static), None), _gather_bwd)
