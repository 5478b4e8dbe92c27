"""Sums over mesh axes in device order, by all-to-all: bitwise equal to XLA's sum inside a process.

Between CPU processes XLA's collectives are gloo's. They go around a ring: each part is added in another
order, and each device waits for a neighbour 2 (n - 1) times. Here all messages leave at once, and a
device waits once, or twice for large arrays. gloo's reduce-scatter also makes the buffer of its socket
so small that later messages may wait 40 ms for an acknowledgement (docs/design/0015-processes.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshard.kernels import collectives
from jshard.kernels.chip import present_chip
from jshard.kernels.invariant_cast import set_varying

ONE_STEP_BYTES = 4 << 20  # up to this sum over all devices, each device receives every whole array
BUCKET_BYTES = 1 << 20  # up to this sum, several arrays are summed as one


def between_processes() -> bool:
    """Return True if the program is traced for CPU devices of several processes, with gloo's collectives."""
    return jax.distributed.is_initialized() and present_chip().platform == "cpu"


def ordered_psum(x: Array, mesh_axes: tuple[str, ...]) -> Array:
    """Sum `x` over `mesh_axes` in device order: results are bitwise reproducible and equal on every device.

    16-bit numbers are added in float32 and rounded once, as XLA does on a CPU. It costs an
    all-to-all of n times x, or above `ONE_STEP_BYTES` an all-to-all and an all-gather of x.
    """
    n, varying = collectives.axis_size(mesh_axes), jax.typeof(x).mat.varying - {*mesh_axes}
    if n * x.size * x.dtype.itemsize <= ONE_STEP_BYTES:  # one wait, for n / 2 times the bytes
        copies = jnp.broadcast_to(x, (n, *x.shape))
        total = _sum_in_order(lax.all_to_all(copies, mesh_axes, 0, 0, tiled=True), mesh_axes)
    else:
        flat, size = x.reshape(-1), -(-x.size // n)
        flat = flat if n * size == x.size else jnp.pad(flat, (0, n * size - x.size))
        part = _sum_in_order(lax.all_to_all(flat.reshape(n, size), mesh_axes, 0, 0, tiled=True), mesh_axes)
        total = lax.all_gather(part, mesh_axes, axis=0, tiled=True)[: x.size].reshape(x.shape)
    return set_varying(total, varying)  # to JAX the result of an all-to-all varies


def ordered_psum_scatter(parts: Array, mesh_axis: str) -> Array:
    """Sum `parts[n, ...]` over `mesh_axis` in device order; each device gets the sum of its own part."""
    return _sum_in_order(lax.all_to_all(parts, mesh_axis, 0, 0, tiled=True), (mesh_axis,))


def _sum_in_order(parts: Array, mesh_axes: Sequence[str]) -> Array:
    """Sum `parts[n, ...]` from the first to the last."""
    wide = jnp.float32 if parts.dtype in (jnp.bfloat16, jnp.float16) else parts.dtype

    def total(*parts: Array) -> Array:
        return functools.reduce(jnp.add, [part.astype(wide) for part in parts]).astype(parts[0].dtype)

    # XLA fuses additions with later operations, which may then round otherwise than after a psum. It does not fuse across
    # a branch, so the sum is a branch; the other is never taken, but the compiler can't know. (jax 0.10.2 drops an
    # optimization_barrier.) Parts go in one by one: a slice of the received array costs no copy, the whole array does.
    always = lax.axis_index(mesh_axes[0]) < len(parts)
    return lax.cond(always, total, lambda *parts: parts[0], *parts)
