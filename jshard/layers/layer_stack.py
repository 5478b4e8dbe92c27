"""`jshard.stack`: equal layers in a scan, so that tracing, listing, compiling and verifying cost as much as a single layer."""

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
    """Build `depth` layers `Block(*args, rngs=rngs, **kwargs)` as a module of class `Block`, run by a scan.

        self.blocks = jshard.stack(Block, 12, config, rngs=rngs)
        x = self.blocks(x, positions)

    The module's arrays have the layers along their first axis. A call passes `x` through all layers, and the other arguments
    to each. Parameters have the paths of a single layer: `blocks/attn/q/kernel`. Each layer draws its own numbers, and keeps
    its own changed variables (statistics, the count of a Dropout); the scan carries the `KVCache` of all layers, and writes
    it in place. The backward pass keeps the values named by `remat`, in the signals of the parameters or in the signal around
    this call. `unroll` layers form an iteration of the scan: compilation takes longer, and small layers run faster on CPUs.
    """
    for count, of in ((depth, "layers"), (unroll, "layers unrolled")):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise JShardError(f"jshard.stack of {count!r} {of}", hint="give it 1 or more")
    layers = nnx.vmap(lambda rngs: Block(*args, rngs=rngs, **kwargs))(rngs.split(depth))
    layers.__class__ = _stacked(type(layers), depth, unroll, active_path())
    return layers


@functools.cache
def _stacked(cls: type, depth: int, unroll: int, path: tuple[str, ...]) -> type:
    """Return a subclass of `cls` with a call through all layers."""

    def call(self: object, x: Any, *args: object, **kwargs: object) -> Any:
        graphdef, parameters, caches, state = nnx.split(self, nnx.Param, KVCache, ...)

        def layer(carry: Sequence[Any], arrays: Any) -> tuple[Any, Any]:
            (x, caches), (number, parameters, state) = carry, arrays
            one = nnx.merge(graphdef, parameters, of_layer(caches, number), state)
            x = cls.__call__(one, x, *args, **kwargs)
            _, _, caches, state = nnx.split(one, nnx.Param, KVCache, ...)
            return (x, of_all(caches)), state

        signal, _ = resolve(path)  # not entered: layers use the signals they were built under
        layer = recomputed(layer, signal.remat if signal is not None else "", in_scan=unroll < depth)
        numbers = jnp.arange(depth) if jax.tree.leaves(caches) else None
        per_layer = (numbers, parameters, state)
        (x, caches), state = jax.lax.scan(layer, (x, caches), per_layer, length=depth, unroll=min(unroll, depth))
        nnx.update(self, caches, state)
        return x

    functools.update_wrapper(call, cls.__call__)
    names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), names)


# -- caches of keys and values: of a single layer, or of all layers in a scan --


class OfStack(NamedTuple):
    """The cache of a layer in a stack: the array of all layers, and the layer's number in each stack around it."""

    stacked: Array
    layer: tuple[Array, ...] = ()


class KVCache(nnx.Cache):
    """A cache of keys or values `[rows, heads, length, size]`, after an axis of layers in a stack.

    `jshard.stack` carries the cache of all layers through its scan, and each layer writes only its new entries. Heads come
    before the length because attention's products would else transpose the whole cache.
    """

    @classmethod
    def zeros(cls, layers: Sequence[int], rows: int, length: int, heads: int, size: int, dtype: DTypeLike) -> KVCache:
        """Allocate a cache for `length` tokens in each row; `layers` are the sizes of the stacks around it."""
        return cls(jnp.zeros((*layers, rows, heads, length, size), dtype))

    def read(self) -> Array:
        """Return this layer's keys or values, `[rows, length, heads, size]`."""
        stacked, layer = _of_stack(self.get_value())
        for number in layer:
            stacked = lax.dynamic_index_in_dim(stacked, number, keepdims=False)
        return stacked.swapaxes(1, 2)

    def write(self, new: Array, positions: Array | None) -> None:
        """Write `new[rows, places, heads, size]` to `positions` of each row, by default the first; places beyond are lost."""
        stacked, layer = _of_stack(self.get_value())
        at, new = len(layer), new.astype(stacked.dtype)
        rows, _, length, _ = stacked.shape[at:]
        if new.shape[0] != rows or (positions is None and new.shape[1] > length):
            raise JShardError(
                f"a cache for {rows} rows of {length} tokens was given {new.shape[0]} of {new.shape[1]}",
                hint=f"call init_cache({new.shape[0]}, {max(length, new.shape[1])}) first",
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
    """Return the caches of layer `number`, as views of the stacked caches."""

    def one(value: Array) -> OfStack:
        stacked, layer = _of_stack(value)
        return OfStack(stacked, (*layer, number))

    return jax.tree.map(one, caches, is_leaf=_is_of_stack)


def of_all(caches: T) -> T:
    """Return the stacked caches of all layers from a layer's caches."""
    one = lambda value: OfStack(value.stacked, value.layer[:-1]) if value.layer[1:] else value.stacked
    return jax.tree.map(one, caches, is_leaf=_is_of_stack)


def _of_stack(value: Any) -> OfStack:
    return value if _is_of_stack(value) else OfStack(value)


def _is_of_stack(value: object) -> bool:
    return isinstance(value, OfStack)
