"""The sum over the devices along mesh axes, added in the order of devices, out of messages that all send at once.

Inside one process XLA's own all-reduce and reduce-scatter add in that order, so these are the same to the last bit. Between
CPU processes gloo's go around a ring, in an order that differs from part to part, and wait for a neighbour 2 (n - 1) times;
here each waits once, or twice for what is large. A reduce-scatter of gloo's also makes the buffer of its socket so small that
what follows may wait 40 ms for an acknowledgement (docs/design/0015-processes.md).
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

ONE_STEP_BYTES = 4 << 20  # bytes from all devices together, up to which each gets all of them whole
BUCKET_BYTES = 1 << 20  # bytes of several arrays together, up to which they are summed as one


def between_processes() -> bool:
    """Whether the program is traced for CPU devices of processes that have joined: collectives are gloo's there."""
    return jax.distributed.is_initialized() and present_chip().platform == "cpu"


def ordered_psum(x: Array, mesh_axes: tuple[str, ...]) -> Array:
    """The sum of `x` over the devices along `mesh_axes`, to the same bit on each. What has 16 bits is added in float32 and
    rounded once, as XLA's own does on a CPU."""
    n, varying = collectives.axis_size(mesh_axes), jax.typeof(x).mat.varying - {*mesh_axes}
    if n * x.size * x.dtype.itemsize <= ONE_STEP_BYTES:
        copies = jnp.broadcast_to(x, (n, *x.shape))
        total = _total(lax.all_to_all(copies, mesh_axes, 0, 0, tiled=True), mesh_axes)
    else:
        flat, size = x.reshape(-1), -(-x.size // n)
        flat = flat if n * size == x.size else jnp.pad(flat, (0, n * size - x.size))
        part = _total(lax.all_to_all(flat.reshape(n, size), mesh_axes, 0, 0, tiled=True), mesh_axes)
        total = lax.all_gather(part, mesh_axes, axis=0, tiled=True)[: x.size].reshape(x.shape)
    return set_varying(total, varying)  # which no type can tell of an all-to-all


def ordered_psum_scatter(parts: Array, mesh_axis: str) -> Array:
    """Of `parts[n, ...]`, one for each device along `mesh_axis`, the sum of those for this one."""
    return _total(lax.all_to_all(parts, mesh_axis, 0, 0, tiled=True), (mesh_axis,))


def _total(parts: Array, mesh_axes: Sequence[str]) -> Array:
    """Of `parts[n, ...]` the sum, from the first to the last."""
    wide = jnp.float32 if parts.dtype in (jnp.bfloat16, jnp.float16) else parts.dtype

    def added(*parts: Array) -> Array:
        return functools.reduce(jnp.add, [part.astype(wide) for part in parts]).astype(parts[0].dtype)

    # A branch is not fused with what follows, which compiles as it does behind a psum, and so computes to the same bit; an
    # optimization_barrier is dropped by jax 0.10.2. The other branch is never taken, which the compiler can't know. Parts go
    # in one by one, as a slice of what has arrived costs no copy and the whole of it does.
    always = lax.axis_index(mesh_axes[0]) < len(parts)
    return lax.cond(always, added, lambda *parts: parts[0], *parts)
