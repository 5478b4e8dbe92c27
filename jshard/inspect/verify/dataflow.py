"""Facts of a jaxpr, without running it: obstacles to a proof, and numbers cast to lower precision for a sum."""

from __future__ import annotations

import functools
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
from jshard.programs.jaxprs import (
    Atom,
    Eqn,
    Jaxpr,
    OpenJaxpr,
    bare,
    bodies,
    called,
    equations,
    inner,
    is_in,
    run,
    scanned,
    variables,
)
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
    return _reached(bare(jaxpr), [NONE] * len(bare(jaxpr).invars), told)


def _reached(jaxpr: Jaxpr, given: Sequence[Names], told: Told) -> list[Names]:
    step = functools.partial(_reached_by, told=told)
    return run(jaxpr, [*[NONE] * len(jaxpr.constvars), *given], step, constant=lambda literal: NONE)


def _reached_by(eqn: Eqn, operands: list[Names], told: Told) -> list[Names]:
    name = eqn.primitive.name
    if name == "scan":
        return _reached_in_loop(eqn, operands, told)
    if name != "while" and (inside := [_reached(*each, told) for each in bodies(eqn, operands)]):
        chosen_by = operands[0] if name == "cond" else NONE
        return [chosen_by.union(*each) for each in zip(*inside, strict=True)]
    # each result of a while loop depends on all equations in it
    inside = (told(each) for body in inner(eqn) for each in equations(body))
    return [told(eqn).union(*inside, *operands)] * len(eqn.outvars)


def _reached_in_loop(eqn: Eqn, operands: list[Names], told: Told) -> list[Names]:
    body, (consts, carried) = bare(eqn.params["jaxpr"]), scanned(eqn)
    while True:
        results = _reached(body, operands, told)
        carry = [one | other for one, other in zip(operands[consts:], results[:carried], strict=False)]
        if carry == operands[consts : consts + carried]:
            return results
        operands = [*operands[:consts], *carry, *operands[consts + carried :]]


def obstacles(jaxpr: Jaxpr, platform: str) -> dict[int, str]:
    """Return the operations without an exact stand-in on `platform`, by the `id` of the equation, in words."""
    found: dict[int, str] = {}
    for outer in bare(jaxpr).eqns:
        for eqn, here in leaves([outer]):
            if is_opaque(eqn, platform):
                cause = here.blamed(eqn)
                source = cause.source or source_of(outer)
                at = f' in signal "{cause.signal}"' if cause.path else f" at {source}" if source else ""
                found.setdefault(id(eqn), f"{eqn.primitive.name}{at} has no exact stand-in")
    return found


def last_bit(jaxpr: Jaxpr) -> float:
    """Return the coarsest rounding of the operations in their own dtypes; 0 if there are none."""
    kept = (eqn for eqn, _ in leaves(bare(jaxpr).eqns) if keeps_its_dtypes(eqn))
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
            yield from leaves(each.eqns, here)


def narrowed_for_a_sum(jaxpr: OpenJaxpr) -> set[Any]:
    """Return the variables cast to lower precision only to be summed over devices."""
    readers: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for variable in variables(eqn.invars):
            readers.setdefault(variable, []).append(eqn)
    returned, found = set(variables(jaxpr.outvars)), set[Any]()

    def only_summed(variable: Atom) -> bool:
        after = readers.get(variable, [])
        return variable not in returned and bool(after) and all(map(is_sum, after))

    def is_sum(eqn: Eqn) -> bool:
        name = eqn.primitive.name
        return name in COLLECTIVE_SUMS or (name == "pvary" and only_summed(eqn.outvars[0]))

    for eqn in jaxpr.eqns:
        narrowed = eqn.primitive.name == "pvary" and is_in(eqn.invars[0], found)
        if eqn.primitive.name == "convert_element_type":
            before, after = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
            floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
            narrowed = floats and jnp.finfo(after).nmant < jnp.finfo(before).nmant
        if narrowed and only_summed(eqn.outvars[0]):
            found.add(eqn.outvars[0])
    return found


def asked_dtypes(path: tuple[str, ...]) -> frozenset[str]:
    """Return the dtypes named by the signal of this path."""
    present = configuration()
    if present is None or not path:
        return frozenset()
    dtype = present.lookup(path).dtype
    return frozenset(str(jnp.dtype(name)) for name in (dtype.compute, dtype.reduce) if name is not None)
