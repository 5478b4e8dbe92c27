"""Gather and scatter by permutes, both ways round a ring, in plain JAX: alone, or overlapped with a product.

They run on any backend. XLA for TPUs overlaps permutes with computation, but no reduce-scatters. A number
passes n // 2 devices to the right, (n - 1) // 2 to the left. A scatter adds and rounds at each hop, to its
dtype: the order is the same in every run, but differs from XLA's, and between the devices that keep parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jshard.kernels.chip import present_chip
from jshard.kernels.collectives import axis_index, axis_size, permute, pvary
from jshard.kernels.local_matmul import matmul
from jshard.kernels.slices import devices_of_a_slice, size_along

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Ring:
    """`size` devices, each `stride` places after the last along mesh axes."""

    names: Names
    size: int
    stride: int = 1

    def device(self, away: int) -> Array:
        """Return the place in the ring of the device `away` places to the right."""
        here = axis_index(self.names) if self.stride == 1 else axis_index(self.names) // self.stride
        return lax.rem(here + away % self.size, self.size)

    def groups(self) -> list[list[int]] | None:
        """Return the devices of each ring along these mesh axes, in order; None for a single ring."""
        n = axis_size(self.names)
        firsts = [at for at in range(n) if at // self.stride % self.size == 0]
        rings = [[first + place * self.stride for place in range(self.size)] for first in firsts]
        return rings if len(rings) > 1 else None

    def send(self, x: Array, shift: int) -> Array:
        places = range(axis_size(self.names))
        moved = lambda at: (at // self.stride + shift) % self.size - at // self.stride % self.size
        return permute(x, self.names, pairs=[(at, at + self.stride * moved(at)) for at in places])


def rings(name: str) -> list[Ring]:
    """Return the rings of a gather or scatter along a mesh axis, major first. If the axis is all of a
    TPU's slice, each axis of its torus is a ring: 256 devices in 16 rows are 16 hops apart, not 128."""
    n, chip = size_along(name), present_chip()
    is_slice = chip.axes and n == devices_of_a_slice()
    found, stride = [], n
    for size in _torus(n, chip.axes) if is_slice else [n]:
        stride //= size
        found.append(Ring((name,), size, stride))
    return found


def _torus(n: int, axes: int) -> list[int]:
    """Return the shape of a slice of n devices: as equal as possible, the longest axis last."""
    shape = []
    for left in range(axes, 0, -1):
        shape.append(max(size for size in range(1, n + 1) if n % size == 0 and size**left <= n))
        n //= shape[-1]
    return [size for size in shape if size > 1]


def all_gather(
    x: Array, ring: Ring, axis: int, use: Callable[[Array, Array], None] = lambda part, device: None
) -> Array:
    """Gather `x` of all devices along `axis`. It calls `use(part, device)` on each part while others travel."""
    n, to_right, to_left, arrived = ring.size, x, x, [(x, 0)]
    full = _empty(x, n, axis)
    for hop in range(1, n // 2 + 2):
        underway = []
        if hop <= n // 2:
            to_right = ring.send(to_right, 1)
            underway.append((to_right, -hop))
        if hop <= (n - 1) // 2:
            to_left = ring.send(to_left, -1)
            underway.append((to_left, hop))
        for part, away in arrived:
            device = ring.device(away)
            use(part, device)
            full = _put(full, part, device, axis)
        arrived = underway
    return full


def reduce_scatter(part: Callable[[Array], Array], ring: Ring, dtype: DTypeLike) -> Array:
    """Sum a part for each device; each device keeps its own sum.

    `part(device)` returns this device's term of the sum for `device`. It is computed
    while sums travel, and may be wider than `dtype`, the dtype of the sums.
    """
    n = ring.size
    right = left = None
    for hop in range(n // 2, 0, -1):
        right = ring.send(_plus(right, part(ring.device(hop)), dtype), 1)
        if hop <= (n - 1) // 2:
            left = ring.send(_plus(left, part(ring.device(-hop)), dtype), -1)
    mine = part(ring.device(0))
    return _plus(right, mine if left is None else mine + left, dtype)


def all_gather_matmul(x: Array, w: Array, names: Names, axis: int, out: Any) -> tuple[Array, Array]:
    """Return `all_gather(x, axis) @ w`, and the gathered x."""
    y: list[Array] = []

    def multiply(part: Array, device: Array) -> None:
        product = matmul(part, w, out_dtype=out, algorithm="xla")
        y[:] = [_put(y[0] if y else _empty(product, axis_size(names), axis), product, device, axis)]

    gathered = all_gather(x, Ring(names, axis_size(names)), axis, multiply)
    return y[0], gathered


def matmul_reduce_scatter(x: Array, w: Array, names: Names, axis: int, out: Any) -> Array:
    """Return `reduce_scatter(x @ w, axis)`."""
    wide, n = jnp.float32 if jnp.issubdtype(out, jnp.floating) else out, axis_size(names)
    multiply = lambda device: matmul(part(x, n, axis, device), w, out_dtype=wide, algorithm="xla")
    return reduce_scatter(multiply, Ring(names, n), out)


def part(x: Array, n: int, axis: int, device: Array) -> Array:
    """Return a device's part of `x`, of n along `axis`."""
    size = x.shape[axis] // n
    return lax.dynamic_slice_in_dim(x, device * size, size, axis)


def _put(full: Array, part: Array, device: Array, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(full, part, device * part.shape[axis], axis)


def _empty(part: Array, n: int, axis: int) -> Array:
    """Return room for n parts along `axis`, uninitialized: each part is written later."""
    shape = tuple(n * size if at == axis else size for at, size in enumerate(part.shape))
    return pvary(lax.empty(shape, part.dtype), tuple(jax.typeof(part).mat.varying))


def _plus(total: Array | None, part: Array, dtype: DTypeLike) -> Array:
    return (part if total is None else total + part).astype(dtype)
