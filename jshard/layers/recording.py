"""Find where the arguments of a function rest, from one abstract trace of it.

Each array that goes into a partitioned call is marked by an equation `name` with a number. The layout that the call takes the
array in belongs to the argument that the marked variable comes from.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
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
from jshard.programs.jaxprs import Jaxpr, OpenJaxpr, bare, bodies

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
        _follow(bare(jaxpr), {v: number for number, v in enumerate(bare(jaxpr).invars)}, found)
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


def _follow(jaxpr: OpenJaxpr, source: dict[Any, int], found: dict[int, int]) -> None:
    """Follow arguments to their first marks, through calls, loops, and operations that keep the shape."""
    for eqn in jaxpr.eqns:
        operands = {at: source[v] for at, v in enumerate(eqn.invars) if not hasattr(v, "val") and v in source}
        if not operands:
            continue
        first = next(iter(operands))
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(MARK):
            found.setdefault(operands[first], int(eqn.params["name"].removeprefix(MARK)))
        for inner, given in bodies(eqn, range(len(eqn.invars))):
            pairs = (
                (v, eqn.invars[at], operands[at]) for v, at in zip(inner.invars, given, strict=True) if at in operands
            )
            # the slices that a scan runs over have other shapes
            _follow(inner, {v: number for v, of, number in pairs if v.aval.shape == of.aval.shape}, found)
        if len(eqn.outvars) == 1 and eqn.outvars[0].aval.shape == eqn.invars[first].aval.shape:
            source.setdefault(eqn.outvars[0], operands[first])
