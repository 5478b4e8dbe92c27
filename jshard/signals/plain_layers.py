"""The warning for a plain layer replicated on every device, under a signal with split arrays."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jax._src.core import trace_ctx
from jax._src.lax.lax import ragged_dot_general_p
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p, gather_p
from jax.sharding import NamedSharding

from jshard.layouts.layout import Layout
from jshard.layouts.mesh import is_explicit
from jshard.programs.jaxprs import Eqn, called, equations
from jshard.programs.provenance import is_inside, line_here
from jshard.signals.active_config import mesh
from jshard.signals.signal import AXIS_KEYS, Signal

# Primitives that multiply by a parameter, or look up its rows.
PRODUCTS = conv_general_dilated_p, dot_general_p, gather_p, ragged_dot_general_p
LAYERS = frozenset(each.name for each in PRODUCTS)
BUILDERS = frozenset(("__init__", "setup", "init"))  # functions that build layers, and may call them to find shapes


class Watch:
    """The plain layers run in the scope of a signal, traced or evaluated by JAX."""

    def __init__(self, signal: Signal):
        self.signal = signal
        self.split: list[set[str]] = []  # per layer, the mesh axes of its operands
        self.frame = _frame()
        self.begin = 0 if self.frame is None else len(self.frame.tracing_eqns)

    def warn(self, *, has_split: bool) -> None:
        """Warn if layers ran and all of them were replicated. In a trace, types show layouts only on explicit mesh
        axes. On automatic axes, `has_split` means the signal has split arrays before, and there is no warning."""
        if self.frame is not None:
            if has_split and not is_explicit(mesh()):
                return
            for each in self.frame.tracing_eqns[self.begin :]:
                if (eqn := each() if isinstance(each, weakref.ref) else each) is not None:
                    self.split += [_mesh_axes([v.aval for v in layer.invars]) for layer in _layers(eqn)]
        if not self.split or not splits(self.signal).isdisjoint(set().union(*self.split)) or is_inside(BUILDERS):
            return
        warnings.warn(
            f"{self.signal} is entered at {line_here()}, and the plain layer under it runs whole on every device; write "
            "@jshard.jit above the step, or loss = jshard.shard(loss)",
            stacklevel=3,
        )


_watching = ContextVar[Watch | None]("watching", default=None)


@contextlib.contextmanager
def watching(watch: Watch | None) -> Iterator[None]:
    """Record the layers evaluated by JAX inside."""
    if watch is not None:
        _note_evaluation()
    token = _watching.set(watch)
    try:
        yield
    finally:
        _watching.reset(token)


@functools.cache
def _note_evaluation() -> None:
    """Wrap JAX's evaluation of products, once per process."""

    def noting(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*xs: object, **params: object) -> Any:
            if (watch := _watching.get()) is not None and watch.frame is None:
                watch.split.append(_mesh_axes(xs))
            return evaluate(*xs, **params)

        return call

    for each in PRODUCTS:
        each.def_impl(noting(each.impl))


def splits(signal: Signal) -> set[str]:
    """Return the mesh axes of a signal's parameters, or of its other arrays if it splits no parameters."""
    of_shard = () if signal.shard is None else signal.shard.mesh or mesh().axis_names
    every = *of_shard, *(name for key in AXIS_KEYS for name in signal.axes(key))
    return {name for name in (*signal.column, *signal.reduction) or every if mesh().shape[name] >= 2}


def _layers(eqn: Eqn) -> Iterator[Any]:
    inside = [eqn] if called(eqn) is None else equations(called(eqn))
    return (each for each in inside if each.primitive.name in LAYERS)


def _mesh_axes(xs: Iterable[Any]) -> set[str]:
    """Return the mesh axes in the shardings of arrays or of their types."""
    given = [(x.sharding, x.ndim) for x in xs if isinstance(getattr(x, "sharding", None), NamedSharding)]
    return {name for sharding, rank in given for name in Layout.from_sharding(sharding, rank).mesh_axes}


def _frame() -> Any:
    """Return JAX's record of the program being traced, or None outside a trace."""
    trace = trace_ctx.trace
    while not hasattr(trace, "frame") and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    return getattr(trace, "frame", None)
