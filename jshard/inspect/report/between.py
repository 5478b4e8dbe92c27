"""The arrays between the layers: what each signal's shard_map hands on, read from a forward's jaxpr."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jshard.jaxprs import inner
from jshard.layouts.layout import Layout
from jshard.provenance import Cause

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Between:
    """A result of a shard_map that stands under signals."""

    signals: Path
    role: str  # result, or redistributed: brought to where the next layer wants it
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    axes: tuple[tuple[str, ...], ...]
    mesh: Any


def between(jaxpr: Any) -> Iterator[Between]:
    """In program order. A program that is differentiated already shows none: its results are mixed with what the
    backward keeps."""
    yield from _walk(jaxpr, Cause())


def _walk(jaxpr: Any, outside: Cause) -> Iterator[Between]:
    for equation in jaxpr.eqns:
        stack = equation.source_info.name_stack.stack
        if any(type(part).__name__ == "Transform" for part in stack):
            continue
        cause = outside.inside(stack)
        if equation.primitive.name != "shard_map":
            for each in inner(equation):
                yield from _walk(each, cause)
        elif cause.path:
            role = "redistributed" if cause.redistributed else "result"
            for variable, spec in zip(equation.outvars, equation.params["out_specs"], strict=True):
                aval = variable.aval
                if aval.ndim:
                    layout = Layout(equation.params["mesh"], *spec, *(None,) * (aval.ndim - len(spec)))
                    shape, dtype = tuple(aval.shape), aval.dtype
                    yield Between(cause.path, role, shape, str(dtype), dtype.itemsize, layout.axes, layout.mesh)
