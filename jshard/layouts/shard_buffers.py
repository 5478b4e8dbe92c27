"""Buffers for the shards on this process's devices, read and written block by block, exact to the bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jshard.layouts.index_ranges import Box, Device, boxes_of, index, is_inside, lengths, word_count


class Filling:
    """An array to be filled block by block on this process's devices."""

    def __init__(self, sharding: Sharding, shape: Sequence[int], dtype: DTypeLike):
        self.sharding, self.shape, self.dtype = sharding, tuple(shape), np.dtype(dtype)
        here = sharding.addressable_devices
        self.boxes = {device: box for device, box in boxes_of(sharding, shape).items() if device in here}
        self.parts: dict[Device, jax.Array] = {}

    def put(self, block: Box, words: object) -> None:
        """Write a block, as received by `carry`, to every shard with it."""
        for device, box in self.boxes.items():
            if is_inside(block, box):
                part = self.parts.pop(device) if device in self.parts else self._new(device)
                corner = tuple(each.start for each in index(block, box))
                self.parts[device] = _written(part, jax.device_put(words, device), corner, lengths(block))
        jax.block_until_ready(list(self.parts.values()))

    def finished(self) -> jax.Array:
        """Return the array."""
        parts = [self.parts.pop(device) if device in self.parts else self._new(device) for device in self.boxes]
        parts = [part if part.dtype == self.dtype else _as_numbers(part, self.dtype) for part in parts]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts, dtype=self.dtype)

    def _new(self, device: Device) -> jax.Array:
        held = _bits_dtype(self.dtype) if _is_widened(self.dtype, device) else self.dtype
        return jnp.zeros(lengths(self.boxes[device]), held, device=device)


def taking(x: jax.Array) -> Callable[[Box], jax.Array]:
    """Return a function for `carry`: it reads blocks from the shards of `x` on this process's devices."""
    boxes = boxes_of(x.sharding, x.shape)
    parts = {boxes[shard.device]: shard.data for shard in x.addressable_shards}

    def take(block: Box) -> jax.Array:
        box = next(box for box in parts if is_inside(block, box))
        corner = tuple(each.start for each in index(block, box))
        return _cut(parts[box], corner, lengths(block), word_count(block, x.dtype.itemsize))

    return take


def _is_widened(dtype: np.dtype, device: Device) -> bool:
    """Return whether XLA writes a dtype by way of a wider dtype, as for narrow floats on CPU. This
    would change NaNs, so such shards are written as bits, and exist twice for a moment at the end."""
    return dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating) and device.platform == "cpu"


def _bits_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the unsigned integer dtype of the same width; complex dtypes stay."""
    dtype = np.dtype(dtype)
    return dtype if dtype.kind == "c" else np.dtype(f"uint{8 * dtype.itemsize}")


def _as_bits(x: jax.Array) -> jax.Array:
    if x.dtype.kind == "b":
        return x.astype(np.uint8)
    return x if x.dtype.kind == "c" else lax.bitcast_convert_type(x, _bits_dtype(x.dtype))


@functools.partial(jax.jit, static_argnums=1)
def _as_numbers(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    return lax.bitcast_convert_type(bits, dtype)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _written(part: jax.Array, words: jax.Array, corner: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    held = np.dtype(np.uint8) if jnp.isdtype(part.dtype, "bool") else part.real.dtype
    numbers = lax.bitcast_convert_type(words.reshape(-1, 2), held).reshape(-1)  # two words each for 64 bits
    if jnp.iscomplexobj(part):
        numbers = lax.complex(numbers[::2], numbers[1::2])
    numbers = numbers[: math.prod(shape)].astype(part.dtype)
    return lax.dynamic_update_slice(part, numbers.reshape(shape), corner)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _cut(part: jax.Array, corner: tuple[int, ...], shape: tuple[int, ...], count: int) -> jax.Array:
    bits = lax.dynamic_slice(_as_bits(part), corner, shape).reshape(-1)
    if jnp.iscomplexobj(bits):
        bits = lax.bitcast_convert_type(jnp.stack([bits.real, bits.imag], -1).reshape(-1), _bits_dtype(part.real.dtype))
    several = -(-4 // bits.dtype.itemsize)  # per word; 1 for wider numbers
    bits = jnp.pad(bits, (0, -bits.size % several)).reshape(-1, several)
    words = lax.bitcast_convert_type(bits, np.uint32).reshape(-1)
    return jnp.pad(words, (0, count - words.size))
