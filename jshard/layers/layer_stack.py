"""`jshard.stack`: equal layers as one, run by one scan: what is traced, listed, compiled and proven is one layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.errors import JShardError
from jshard.layers.kv_cache import KVCache, of_all, of_layer
from jshard.layers.remat import recomputed
from jshard.signals.scope import active_path, resolve

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
