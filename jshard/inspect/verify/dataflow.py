"""Facts of a jaxpr, without running it: obstacles to a proof, and numbers cast to lower precision for a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jshard.inspect.ledger.jaxpr_walk import Around
from jshard.inspect.ledger.tracing import is_inexact
from jshard.inspect.verify.residues import (
    COLLECTIVE_SUMS,
    ORDERED,
    is_opaque,
    is_scrambled,
    keeps_its_dtypes,
    touches_floats,
)
from jshard.programs.jaxprs import Eqn, Jaxpr, OpenJaxpr, bare, called, equations, flow, flow_back, inner, level
from jshard.programs.provenance import source_of
from jshard.signals.active_config import configuration

Names = frozenset[str]
NONE: Names = frozenset()
OUTSIDE = Around()
COMPARISON = "comparison"  # by the order of whole numbers: residues modulo a prime have no order
Told = Callable[[Any], Names]  # the names told of an equation


def stood_in(eqn: Eqn) -> Names:
    """Return the name of an operation with a stand-in, else no name."""
    name = eqn.primitive.name
    if is_scrambled(eqn):
        return frozenset([name])
    return frozenset([COMPARISON]) if name in ORDERED and name != "select_n" and touches_floats(eqn) else NONE


def on_the_way(jaxpr: Jaxpr, told: Told) -> list[Names]:
    """Return, for each result, the names that `told` gives to the operations before it."""

    def reached(eqn: Eqn, operands: list[Names]) -> list[Names]:
        inside = (told(each) for body in inner(eqn) for each in equations(body))  # of a while loop all
        return [told(eqn).union(*inside, *operands)] * len(eqn.outvars)

    return flow(jaxpr, [NONE] * len(bare(jaxpr).invars), reached, NONE)


def obstacles(jaxpr: Jaxpr, platform: str) -> dict[int, str]:
    """Return the operations without an exact stand-in on `platform`, by the `id` of the equation, in words."""
    found: dict[int, str] = {}
    for outer in level(jaxpr):
        for eqn, here in leaves([outer]):
            if is_opaque(eqn, platform):
                cause = here.blamed(eqn)
                source = cause.source or source_of(outer)
                at = f' in signal "{cause.signal}"' if cause.path else f" at {source}" if source else ""
                found.setdefault(id(eqn), f"{eqn.primitive.name}{at} has no exact stand-in")
    return found


def last_bit(jaxpr: Jaxpr) -> float:
    """Return the coarsest rounding of the operations in their own dtypes; 0 if there are none."""
    kept = (eqn for eqn, _ in leaves(level(jaxpr)) if keeps_its_dtypes(eqn))
    avals = (variable.aval for eqn in kept for variable in (*eqn.invars, *eqn.outvars) if is_inexact(variable.aval))
    return max((float(jnp.finfo(aval.dtype).eps) for aval in avals), default=0.0)


def leaves(eqns: Sequence[Any], around: Around = OUTSIDE) -> Iterator[tuple[Any, Around]]:
    """Yield the equations outside calls and bodies, and every while loop, with their contexts."""
    for eqn in eqns:
        here, name = around.entering(eqn), eqn.primitive.name
        held = name in ("shard_map", "scan", "while", "cond") or called(eqn) is not None
        if not held or name == "while":
            yield eqn, here
        for each in inner(eqn) if held else ():
            yield from leaves(level(each), here)


def narrowed_for_a_sum(jaxpr: OpenJaxpr) -> set[Any]:
    """Return the variables cast to lower precision only to be summed over devices."""

    def read(eqn: Eqn, after: list[Names]) -> list[Names]:
        name = eqn.primitive.name
        return (
            after if name == "pvary" else [frozenset(("sum" if name in COLLECTIVE_SUMS else name,))] * len(eqn.invars)
        )

    def is_narrower(eqn: Eqn) -> bool:
        before, after = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
        floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
        return floats and jnp.finfo(after).nmant < jnp.finfo(before).nmant

    reads = flow_back(jaxpr, [frozenset(("return",))] * len(jaxpr.outvars), read, NONE)
    casts = [eqn for eqn in level(jaxpr) if eqn.primitive.name == "convert_element_type"]
    return {eqn.outvars[0] for eqn in casts if reads[eqn.outvars[0]] == {"sum"} and is_narrower(eqn)}


def asked_dtypes(path: tuple[str, ...]) -> frozenset[str]:
    """Return the dtypes named by the signal of this path."""
    present = configuration()
    if present is None or not path:
        return frozenset()
    dtype = present.lookup(path).dtype
    return frozenset(str(jnp.dtype(name)) for name in (dtype.compute, dtype.reduce) if name is not None)
