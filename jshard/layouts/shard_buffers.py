"""The parts of an array on this process's devices, written and read block by block, to the bit."""

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
    """An array whose parts on this process's devices come into being block by block."""

    def __init__(self, sharding: Sharding, shape: Sequence[int], dtype: DTypeLike):
        self.sharding, self.shape, self.dtype = sharding, tuple(shape), np.dtype(dtype)
        here = sharding.addressable_devices
        self.boxes = {device: box for device, box in boxes_of(sharding, shape).items() if device in here}
        self.parts: dict[Device, jax.Array] = {}

    def put(self, block: Box, words: object) -> None:
        """The block, as `carry` hands it on, into every part that has it."""
        for device, box in self.boxes.items():
            if is_inside(block, box):
                part = self.parts.pop(device) if device in self.parts else self._new(device)
                corner = tuple(each.start for each in index(block, box))
                self.parts[device] = _written(part, jax.device_put(words, device), corner, lengths(block))
        jax.block_until_ready(list(self.parts.values()))

    def finished(self) -> jax.Array:
        """The array."""
        parts = [self.parts.pop(device) if device in self.parts else self._new(device) for device in self.boxes]
        parts = [part if part.dtype == self.dtype else _as_numbers(part, self.dtype) for part in parts]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts, dtype=self.dtype)

    def _new(self, device: Device) -> jax.Array:
        held = _bits_dtype(self.dtype) if _is_widened(self.dtype, device) else self.dtype
        return jnp.zeros(lengths(self.boxes[device]), held, device=device)


def taking(x: jax.Array) -> Callable[[Box], jax.Array]:
    """What takes blocks, as `carry` wants them, from the parts of `x` on this process's devices."""
    boxes = boxes_of(x.sharding, x.shape)
    parts = {boxes[shard.device]: shard.data for shard in x.addressable_shards}

    def take(block: Box) -> jax.Array:
        box = next(box for box in parts if is_inside(block, box))
        corner = tuple(each.start for each in index(block, box))
        return _cut(parts[box], corner, lengths(block), word_count(block, x.dtype.itemsize))

    return take


def _is_widened(dtype: np.dtype, device: Device) -> bool:
    """Whether XLA writes such numbers by way of wider ones, as it does narrow floats on CPU, which changes NaNs. They are
    written as bits, and at the end a part is there twice for a moment."""
    return dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating) and device.platform == "cpu"


def _bits_dtype(dtype: DTypeLike) -> np.dtype:
    """Whole numbers of the same width."""
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
    numbers = lax.bitcast_convert_type(words.reshape(-1, 2), held).reshape(-1)  # two are one of 64 bits
    if jnp.iscomplexobj(part):
        numbers = lax.complex(numbers[::2], numbers[1::2])
    numbers = numbers[: math.prod(shape)].astype(part.dtype)
    return lax.dynamic_update_slice(part, numbers.reshape(shape), corner)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _cut(part: jax.Array, corner: tuple[int, ...], shape: tuple[int, ...], count: int) -> jax.Array:
    bits = lax.dynamic_slice(_as_bits(part), corner, shape).reshape(-1)
    if jnp.iscomplexobj(bits):
        bits = lax.bitcast_convert_type(jnp.stack([bits.real, bits.imag], -1).reshape(-1), _bits_dtype(part.real.dtype))
    several = -(-4 // bits.dtype.itemsize)  # to a word, or one that is wider
    bits = jnp.pad(bits, (0, -bits.size % several)).reshape(-1, several)
    words = lax.bitcast_convert_type(bits, np.uint32).reshape(-1)
    return jnp.pad(words, (0, count - words.size))
