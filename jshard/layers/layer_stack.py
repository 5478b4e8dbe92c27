"""`jshard.stack`: equal layers as one, run by one scan: what is traced, listed, compiled and proven is one layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from jshard.errors import JShardError
from jshard.layers.remat import recomputed
from jshard.signals.scope import active_path, resolve

T = TypeVar("T")
B = TypeVar("B", bound=nnx.Module)


def stack(Block: Callable[..., B], depth: int, *args: object, rngs: nnx.Rngs, unroll: int = 1, **kwargs: object) -> B:
    """Build `depth` layers `Block(*args, rngs=rngs, **kwargs)` as one module of that class, whose arrays have the layers along
    their first axis, and whose call runs all of them: `x` goes through, what else is given is given to each.

        self.blocks = jshard.stack(Block, 12, config, rngs=rngs)
        x = self.blocks(x, positions)

    Its parameters have the paths that one layer's would have: `blocks/attn/q/kernel`. Each layer draws its own numbers. What a
    layer changes of itself (a cache, statistics, the count of a Dropout) is kept for each; a `KVCache` of all is carried, and
    written in place. The backward pass keeps what the signals of its parameters say by `remat`, or the signal that it is
    built under. `unroll` layers are compiled as one turn of the scan, which takes longer to compile and is faster where a
    turn's own cost shows, as on CPUs.
    """
    for count, of in ((depth, "layers"), (unroll, "layers unrolled")):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise JShardError(f"jshard.stack of {count!r} {of}", hint="give it 1 or more")
    layers = nnx.vmap(lambda rngs: Block(*args, rngs=rngs, **kwargs))(rngs.split(depth))
    layers.__class__ = _stacked(type(layers), depth, unroll, active_path())
    return layers


@functools.cache
def _stacked(cls: type, depth: int, unroll: int, path: tuple[str, ...]) -> type:
    """A subclass whose call goes through all layers: instances of it are instances of `cls`."""

    def call(self: object, x: Any, *args: object, **kwargs: object) -> Any:
        graphdef, parameters, caches, state = nnx.split(self, nnx.Param, KVCache, ...)

        def layer(carry: Sequence[Any], arrays: Any) -> tuple[Any, Any]:
            (x, caches), (number, parameters, state) = carry, arrays
            one = nnx.merge(graphdef, parameters, of_layer(caches, number), state)
            x = cls.__call__(one, x, *args, **kwargs)
            _, _, caches, state = nnx.split(one, nnx.Param, KVCache, ...)
            return (x, of_all(caches)), state

        signal, _ = resolve(path)  # not entered: layers see the signals that they were built under
        layer = recomputed(layer, signal.remat if signal is not None else "", in_scan=unroll < depth)
        numbers = jnp.arange(depth) if jax.tree.leaves(caches) else None
        each = (numbers, parameters, state)
        (x, caches), state = jax.lax.scan(layer, (x, caches), each, length=depth, unroll=min(unroll, depth))
        nnx.update(self, caches, state)
        return x

    functools.update_wrapper(call, cls.__call__)
    names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), names)


# -- keys and values that attention keeps: of one layer, or of all that a scan carries --


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
