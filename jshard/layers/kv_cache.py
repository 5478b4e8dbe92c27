"""Keys and values that attention keeps, written in place: of one layer, or of all those that a scan carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from jshard.errors import JShardError

T = TypeVar("T")


class OfStack(NamedTuple):
    """What a layer of a stack has for its cache: that of all layers, and its number in each stack around it."""

    stacked: Array
    layer: tuple[Array, ...] = ()


class KVCache(nnx.Cache):
    """Keys or values `[rows, heads, length, size]`, behind an axis of layers where they are stacked. `jshard.stack` carries
    those of all layers through its scan, and each layer writes its new ones there: nothing else is copied. Heads come first,
    as products of attention want them: behind the length, each would transpose all of it."""

    @classmethod
    def zeros(cls, layers: Sequence[int], rows: int, length: int, heads: int, size: int, dtype: DTypeLike) -> KVCache:
        """Make room for `length` tokens in each row, for each of so many layers."""
        return cls(jnp.zeros((*layers, rows, heads, length, size), dtype))

    def read(self) -> Array:
        """Return this layer's keys or values, `[rows, length, heads, size]`."""
        stacked, layer = _of_stack(self.get_value())
        for number in layer:
            stacked = lax.dynamic_index_in_dim(stacked, number, keepdims=False)
        return stacked.swapaxes(1, 2)

    def write(self, new: Array, positions: Array | None) -> None:
        """Write `new[rows, places, heads, size]` to these positions of each row, or without to the first. What is written
        beyond the length is lost."""
        stacked, layer = _of_stack(self.get_value())
        at, new = len(layer), new.astype(stacked.dtype)
        rows, _, length, _ = stacked.shape[at:]
        if new.shape[0] != rows or (positions is None and new.shape[1] > length):
            raise JShardError(
                f"a cache for {rows} rows of {length} tokens was given {new.shape[0]} of {new.shape[1]}",
                hint=f"call init_cache({new.shape[0]}, {max(length, new.shape[1])}) before",
            )
        if positions is None:
            start = (*layer, *(0,) * new.ndim)
            stacked = lax.dynamic_update_slice(stacked, jnp.expand_dims(new.swapaxes(1, 2), range(at)), start)
        else:
            numbers = lax.ScatterDimensionNumbers(
                update_window_dims=(2, 3), inserted_window_dims=(*range(at), at + 2), operand_batching_dims=(at,),
                scatter_indices_batching_dims=(0,), scatter_dims_to_operand_dims=(*range(at), at + 2),
            )  # fmt: skip
            to = jnp.stack([*(jnp.broadcast_to(number, positions.shape) for number in layer), positions], -1)
            stacked = lax.scatter(stacked, to, new, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)
        self.set_value(OfStack(stacked, layer) if layer else stacked)


def of_layer(caches: T, number: Any) -> T:
    """Return the caches of all layers as those of one."""

    def one(value: Array) -> OfStack:
        stacked, layer = _of_stack(value)
        return OfStack(stacked, (*layer, number))

    return jax.tree.map(one, caches, is_leaf=_is_of_stack)


def of_all(caches: T) -> T:
    """Return the caches of one layer as those of all."""
    one = lambda value: OfStack(value.stacked, value.layer[:-1]) if value.layer[1:] else value.stacked
    return jax.tree.map(one, caches, is_leaf=_is_of_stack)


def _of_stack(value: Any) -> OfStack:
    return value if _is_of_stack(value) else OfStack(value)


def _is_of_stack(value: object) -> bool:
    return isinstance(value, OfStack)
