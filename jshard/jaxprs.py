"""Walking a jaxpr: its equations, and the jaxprs that lie in their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def bare(jaxpr: Any) -> Any:
    """The open jaxpr of a closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs that one equation runs: bodies, branches, calls."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(bare(each), "eqns"):
                yield bare(each)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation in program order, those of loops and branches where they stand."""
    for eqn in bare(jaxpr).eqns:
        yield eqn
        for each in inner(eqn):
            yield from equations(each)
