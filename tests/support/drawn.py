"""Models of tests, whose numbers are drawn once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jshard.signals.scope import outside


def drawn(kind: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """A new `kind(*args, rngs=nnx.Rngs(0), **how)`. Who asks first may be traced, or under a signal, and others ask later."""
    with jax.core.eval_context(), outside():
        graph, state = _numbers(kind, args, tuple(how.items()))
    return nnx.merge(graph, state, copy=True)


@functools.cache
def _numbers(kind: Callable[..., Any], args: tuple[Any, ...], how: tuple[tuple[str, Any], ...]) -> Any:
    return nnx.split(kind(*args, rngs=nnx.Rngs(0), **dict(how)))
