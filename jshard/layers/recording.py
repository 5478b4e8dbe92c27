"""The layouts at rest of a function's arguments, recorded in an abstract trace.

Each array passed to a partitioned call is marked by an equation `name` with a number. The array's layout in the call is
assigned to the argument from which the marked variable comes.
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
    """The layout and dtype of an array in a partitioned call; a parameter has `placed`."""

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
    """The layouts of the arrays in a trace's partitioned calls, and the mesh axes of the rows of their batches."""

    found: list[Taken] = dataclasses.field(default_factory=list)
    rows: tuple[str, ...] = ()

    def mark(self, x: jax.Array, taken: Taken) -> Any:
        """Return the array after an equation with the number of `taken`."""
        self.found.append(taken)
        return checkpoint_name(x, f"{MARK}{len(self.found) - 1}")

    def of_arguments(self, jaxpr: Jaxpr) -> dict[int, Taken]:
        """Return the layouts of the trace's arguments, by number."""
        marks: dict[int, int] = {}
        _follow(jaxpr, range(len(bare(jaxpr).invars)), marks)
        return {argument: self.found[mark] for argument, mark in marks.items()}


_recording = ContextVar[Recording | None]("recording", default=None)
recorder = _recording.get


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Record the layouts of arrays in partitioned calls."""
    token = _recording.set(recorded := Recording())
    try:
        yield recorded
    finally:
        _recording.reset(token)


def _follow(program: Jaxpr, sources: Sequence[int | None], marks: dict[int, int]) -> None:
    """Follow arguments to their first marks, through calls, loops, and shape-preserving operations."""

    def step(eqn: Eqn, sources: list[int | None]) -> list[int | None]:
        source = next((number for number in sources if number is not None), None)
        if source is None:
            return [None] * len(eqn.outvars)
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(MARK):
            marks.setdefault(source, int(eqn.params["name"].removeprefix(MARK)))
        for inner, given in bodies(eqn, [*zip(eqn.invars, sources, strict=True)]):
            pairs = zip(inner.invars, given, strict=True)
            # a scan's slices have other shapes
            _follow(inner, [n if v.aval.shape == of.aval.shape else None for v, (of, n) in pairs], marks)
        shape = eqn.invars[sources.index(source)].aval.shape
        return [source if eqn.outvars[1:] == [] and v.aval.shape == shape else None for v in eqn.outvars]

    flow(program, sources, step, None, inside=False)
