"""`jshard.stack`: equal layers as one, run by one scan: what is traced, listed, compiled and proven is one layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from jshard.errors import JShardError
from jshard.layers.remat import recomputed
from jshard.signals.scope import active_path, resolve

B = TypeVar("B", bound=nnx.Module)


def stack(Block: Callable[..., B], depth: int, *args: Any, rngs: nnx.Rngs, **kwargs: Any) -> B:
    """Build `depth` layers `Block(*args, rngs=rngs, **kwargs)` as one module of that class, whose arrays have the layers along
    their first axis, and whose call runs all of them: `x` goes through, what else is given is given to each.

        self.blocks = jshard.stack(Block, 12, config, rngs=rngs)
        x = self.blocks(x, positions)

    Its parameters have the paths that one layer's would have: `blocks/attn/q/kernel`. Each layer draws its own numbers. What a
    layer changes of itself (a cache, statistics, the count of a Dropout) is kept for each. The backward pass keeps what the
    signals of its parameters say by `remat`, or the signal that it is built under.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise JShardError(f"jshard.stack of {depth!r} layers", hint="give it 1 or more")
    layers = nnx.vmap(lambda rngs: Block(*args, rngs=rngs, **kwargs))(rngs.split(depth))
    layers.__class__ = _stacked(type(layers), depth, active_path())
    return layers


@functools.cache
def _stacked(cls: type, depth: int, path: tuple[str, ...]) -> type:
    """A subclass whose call goes through all layers: instances of it are instances of `cls`."""

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        graphdef, parameters, state = nnx.split(self, nnx.Param, ...)

        def layer(x: Any, arrays: Any) -> tuple[Any, Any]:
            one = nnx.merge(graphdef, *arrays)
            x = cls.__call__(one, x, *args, **kwargs)
            return x, nnx.split(one, nnx.Param, ...)[2]

        signal, _ = resolve(path)  # not entered: layers see the signals that they were built under
        layer = recomputed(layer, signal.remat if signal is not None else "", in_scan=True)
        x, state = jax.lax.scan(layer, x, (parameters, state), length=depth)
        nnx.update(self, state)
        return x

    functools.update_wrapper(call, cls.__call__)
    names = {"__call__": call, "_jshard_layer": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), names)
