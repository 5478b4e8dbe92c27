"""Find where the arguments of a function rest, from one abstract trace of it.

Each array that goes into a partitioned call is marked by an equation `name` with a number. The layout that the call takes the
array in belongs to the argument that the marked variable comes from.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from jshard.layers.creating import Uncreated
from jshard.layers.roles import Placed
from jshard.layouts.layout import Layout
from jshard.layouts.redistribution import redistribute
from jshard.programs.jaxprs import Eqn, Jaxpr, bare, bodies, flow

MARK = "jshard at rest "


@dataclasses.dataclass(frozen=True)
class Taken:
    """An array as a partitioned call takes it; `placed` is known of a parameter."""

    layout: Layout
    dtype: Any = None  # None: its own
    placed: Placed | None = None

    def put(self, x: Any, label: str) -> Any:
        """Return the array, or its description, in this layout and dtype."""
        if isinstance(x, Uncreated):
            return x.at(self.layout.sharding, self.dtype)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, self.dtype or x.dtype, sharding=self.layout.sharding)
        x = x if hasattr(x, "dtype") else jnp.asarray(x)  # a number among parameters
        if self.dtype is not None and x.dtype != self.dtype:
            x = x.astype(self.dtype)
        if not isinstance(x, Tracer) and getattr(x, "sharding", None) == self.layout.sharding:
            return x
        return redistribute(x, self.layout, label=label)


@dataclasses.dataclass
class Recording:
    """The arrays that the partitioned calls of one trace take, and the mesh axes that split the rows of their batches."""

    found: list[Taken] = dataclasses.field(default_factory=list)
    rows: tuple[str, ...] = ()

    def mark(self, x: jax.Array, taken: Taken) -> Any:
        """Return the array behind an equation that holds the number of `taken`."""
        self.found.append(taken)
        return checkpoint_name(x, f"{MARK}{len(self.found) - 1}")

    def of_arguments(self, jaxpr: Jaxpr) -> dict[int, Taken]:
        """Return how the trace takes its arguments, by their numbers."""
        found: dict[int, int] = {}
        _follow(jaxpr, range(len(bare(jaxpr).invars)), found)
        return {argument: self.found[mark] for argument, mark in found.items()}


_recording = ContextVar[Recording | None]("recording", default=None)
recorder = _recording.get


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Record how partitioned calls take their arrays."""
    token = _recording.set(found := Recording())
    try:
        yield found
    finally:
        _recording.reset(token)


def _follow(program: Jaxpr, sources: Sequence[int | None], found: dict[int, int]) -> None:
    """Follow arguments to their first marks, through calls, loops, and operations that keep the shape."""

    def step(eqn: Eqn, sources: list[int | None]) -> list[int | None]:
        source = next((number for number in sources if number is not None), None)
        if source is None:
            return [None] * len(eqn.outvars)
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(MARK):
            found.setdefault(source, int(eqn.params["name"].removeprefix(MARK)))
        for inner, given in bodies(eqn, [*zip(eqn.invars, sources, strict=True)]):
            pairs = zip(inner.invars, given, strict=True)
            # the slices that a scan runs over have other shapes
            _follow(inner, [n if v.aval.shape == of.aval.shape else None for v, (of, n) in pairs], found)
        shape = eqn.invars[sources.index(source)].aval.shape
        return [source if eqn.outvars[1:] == [] and v.aval.shape == shape else None for v in eqn.outvars]

    flow(program, sources, step, None, inside=False)
