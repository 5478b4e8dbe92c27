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
from jshard.layouts.paths import slashed
from jshard.programs.jaxprs import Shaped
from jshard.signals.active_config import configuration
from jshard.signals.claims import ranges
from jshard.signals.config import Configuration
from jshard.signals.scope import active_path, resolve

B = TypeVar("B", bound=nnx.Module)
M = TypeVar("M", bound=nnx.Module)


def stack(Block: Callable[..., B], depth: int, *args: object, rngs: nnx.Rngs, unroll: int = 1, **kwargs: object) -> B:
    """Build `depth` layers `Block(*args, rngs=rngs, **kwargs)` as one module of that class, whose arrays have the layers along
    their first axis, and whose call runs all of them: `x` goes through, what else is given is given to each.

        self.blocks = jshard.stack(Block, 12, config, rngs=rngs)
        x = self.blocks(x, positions)

    Its parameters have the paths that one layer's would have: `blocks/attn/q/kernel`. Each layer draws its own numbers. What a
    layer changes of itself (a cache, statistics, the count of a Dropout) is kept for each; a `KVCache` of all is carried, and
    written in place. The backward pass keeps what the
    signals of its parameters say by `remat`, or the signal that it is built under. Where globs name layers, `blocks[0:12]/**`,
    each range of them lies as it is claimed, and is a scan of its own. `unroll` layers are compiled as one turn of it, which
    takes longer to compile and is faster where a turn's own cost shows, as on CPUs.
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
    names = {
        "__call__": call,
        "_jshard_stack": (cls, depth, unroll, path),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls)(cls.__name__, (cls,), names)


def in_ranges(model: M) -> M:
    """Take each stack apart into the ranges of layers that globs name, in place."""
    present = configuration()
    if present is not None and present.has_claims:
        _take_apart(model, (), 0, present)
    return model


def _take_apart(root: nnx.Module, place: tuple[Any, ...], axis: int, present: Configuration) -> None:
    """The stacks inside `root`, which stands at `place` inside `axis` other stacks; those inside a stack after it."""
    modules = dict(nnx.iter_modules(root))
    for path in sorted(filter(None, modules), key=len):
        stacked = getattr(type(modules[path]), "_jshard_stack", None)
        found = stacked and ranges(present, slashed((*place, *path)), stacked[1])
        if found and len(found) >= 2:
            inside = axis + sum(hasattr(type(modules.get(path[:end])), "_jshard_stack") for end in range(len(path)))
            pieces = _Ranges(modules[path], found, inside)
            setattr(modules[path[:-1]], str(path[-1]), pieces)
            for name in pieces.names:
                _take_apart(getattr(pieces, name), (*place, *path, name), inside, present)


class _Ranges(nnx.Module):
    """The layers of a stack, which are its `axis`, in ranges that lie each in its own way: they run one after the other."""

    def __init__(self, layers: nnx.Module, ranges: Sequence[tuple[int, int]], axis: int):
        cls, _, unroll, path = getattr(type(layers), "_jshard_stack")  # noqa: B009
        graphdef, state = nnx.split(layers)
        self.names = tuple(f"[{first}:{last}]" for first, last in ranges)
        for name, (first, last) in zip(self.names, ranges, strict=True):
            at = (*[slice(None)] * axis, slice(first, last))
            some = nnx.merge(graphdef, jax.tree.map(functools.partial(_some, at=at), state))
            some.__class__ = _stacked(cls, last - first, unroll, path)
            setattr(self, name, some)

    def __call__(self, x: Any, *args: object, **kwargs: object) -> Any:
        for name in self.names:
            x = getattr(self, name)(x, *args, **kwargs)
        return x


def _some(array: Shaped, at: tuple[slice, ...]) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda array: array[at], array)
    return array[at]
