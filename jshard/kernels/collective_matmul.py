"""All-gather then matmul, matmul then reduce-scatter: by XLA in sequence, or by permutes under the products.

Each is the gradient of the other.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jshard.errors import JShardError
from jshard.kernels import collectives, permute_ring
from jshard.kernels.collectives import MeshAxis
from jshard.kernels.gather_scatter import all_gather, reduce_scatter
from jshard.kernels.local_matmul import check_contraction, matmul
from jshard.kernels.select_algorithm import default_algorithm, resolve_algorithm

Algorithm = Literal["auto", "permute", "xla"]


def all_gather_matmul(
    x: Array,
    w: Array,
    mesh_axis: MeshAxis,
    *,
    axis: int = 0,
    out_dtype: DTypeLike | None = None,
    algorithm: Algorithm = "auto",
) -> Array:
    """Compute `all_gather(x, axis) @ w`: x[..., K] is sharded over `mesh_axis` along array axis `axis`, not the last.

    "permute" multiplies the received rows while others travel. It keeps the gathered
    x for the gradient of w; the gradient of x is a `matmul_reduce_scatter`.
    """
    mesh_axes, x, axis = collectives.canonicalize_gather("all_gather_matmul", x, mesh_axis, axis, "varying")
    _check_operands("all_gather_matmul", x, w, axis, "joins")
    if resolve_algorithm("all_gather_matmul", algorithm, x, mesh_axes, lambda: _unsupported(w)) == "xla":
        full = all_gather(x, mesh_axes, axis=axis, algorithm=default_algorithm("all_gather"))
        return matmul(full, w, out_dtype=out_dtype, algorithm="xla")
    x, w = collectives.pvary_alike(x, w, mesh_axes=mesh_axes)
    return _all_gather_matmul(x, w, mesh_axes, axis, _dtype(x, w, out_dtype))


def matmul_reduce_scatter(
    x: Array,
    w: Array,
    mesh_axis: MeshAxis,
    *,
    axis: int = 0,
    out_dtype: DTypeLike | None = None,
    algorithm: Algorithm = "auto",
) -> Array:
    """Compute `reduce_scatter(x @ w, axis)`: K is sharded over `mesh_axis`; each device keeps its part of array axis `axis`.

    "permute" sends partial sums, in `out_dtype`, while it multiplies the next. The
    gradient of x is an `all_gather_matmul`; the gradient of w reuses its gathered rows.
    """
    mesh_axes, x, axis = collectives.canonicalize_scatter("matmul_reduce_scatter", x, mesh_axis, axis)
    _check_operands("matmul_reduce_scatter", x, w, axis, "splits")
    if resolve_algorithm("matmul_reduce_scatter", algorithm, x, mesh_axes, lambda: _unsupported(w)) == "xla":
        partial = matmul(x, w, out_dtype=out_dtype, algorithm="xla")
        return reduce_scatter(partial, mesh_axes, axis=axis, algorithm=default_algorithm("reduce_scatter"))
    x, w = collectives.pvary_alike(x, w, mesh_axes=mesh_axes)
    return _matmul_reduce_scatter(x, w, mesh_axes, axis, _dtype(x, w, out_dtype))


def _dtype(x: Array, w: Array, out_dtype: DTypeLike | None) -> jnp.dtype:
    return jnp.dtype(jnp.result_type(x, w) if out_dtype is None else out_dtype)


def _check_operands(op: str, x: Array, w: Array, axis: int, verb: str) -> None:
    if axis == x.ndim - 1:
        raise JShardError(
            f"{op} {verb} axis {axis} of x{x.shape}, but the product sums over that axis", hint="use axis=0"
        )
    check_contraction(op, x, w)


def _unsupported(w: Array) -> tuple[str, str] | None:
    """Return the reason why permutes can't run beside the product, and a hint; None if they can."""
    return None if w.ndim == 2 else (f"it takes a w of two axes, and w is {w.shape}", 'use algorithm="auto"')


# -- by permutes, with gradients --


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _all_gather_matmul(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: jnp.dtype) -> Array:
    return permute_ring.all_gather_matmul(x, w, mesh_axes, axis, out)[0]


def _all_gather_matmul_fwd(x, w, mesh_axes, axis, out):
    y, gathered = permute_ring.all_gather_matmul(x, w, mesh_axes, axis, out)
    return y, (gathered, w)


def _all_gather_matmul_bwd(mesh_axes, axis, out, residuals, cotangent):
    gathered, w = residuals
    cotangent = cotangent.astype(gathered.dtype)
    gradient_of_x = permute_ring.matmul_reduce_scatter(cotangent, w.T, mesh_axes, axis, gathered.dtype)
    return gradient_of_x, _gradient_of_w(gathered, cotangent, w.dtype)


_all_gather_matmul.defvjp(_all_gather_matmul_fwd, _all_gather_matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _matmul_reduce_scatter(x: Array, w: Array, mesh_axes: tuple[str, ...], axis: int, out: jnp.dtype) -> Array:
    return permute_ring.matmul_reduce_scatter(x, w, mesh_axes, axis, out)


def _matmul_reduce_scatter_bwd(mesh_axes, axis, out, residuals, cotangent):
    x, w = residuals
    gradient_of_x, gathered = permute_ring.all_gather_matmul(cotangent.astype(x.dtype), w.T, mesh_axes, axis, x.dtype)
    return gradient_of_x, _gradient_of_w(x, gathered, w.dtype)


_matmul_reduce_scatter.defvjp(
    lambda x, w, *static: (_matmul_reduce_scatter(x, w, *static), (x, w)), _matmul_reduce_scatter_bwd
)


def _gradient_of_w(x: Array, y: Array, dtype: DTypeLike) -> Array:
    rows = tuple(range(x.ndim - 1))  # contracted; both operands have all of them here, so nothing moves
    accumulator = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else None
    return jax.lax.dot_general(x, y, ((rows, rows), ((), ())), preferred_element_type=accumulator).astype(dtype)
