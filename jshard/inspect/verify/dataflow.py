"""What a jaxpr holds, read without running it: every equation, the meshes, and where numbers are made coarser to be summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jshard.inspect.verify.exact_surrogates import COLLECTIVE_SUMS, NONLINEAR, OPAQUE, POSITIVE, SIGNED, SUMS, is_float
from jshard.jaxprs import bare, called, equations, inner, scanned


def inexact_operations(jaxpr: Any) -> list[str]:
    """The names of the operations of a jaxpr that run by a stand-in."""
    return sorted({name for eqn in equations(jaxpr) for name in _stood_in(eqn)})


Names = frozenset[str]
NONE: Names = frozenset()


def inexact_on_the_way(jaxpr: Any) -> list[Names]:
    """Find for each result the operations on its way that run by a stand-in."""
    return _reached(bare(jaxpr), [NONE] * len(bare(jaxpr).invars))


def _stood_in(eqn: Any) -> Names:
    name = eqn.primitive.name
    if (name in POSITIVE or name in SIGNED or name == "div") and is_float(eqn.outvars[0].aval) and not is_identity(eqn):
        return frozenset(["division" if name == "div" else name])
    return NONE


def is_identity(eqn: Any) -> bool:
    """A first power, as moments of a gradient are written."""
    return eqn.primitive.name == "integer_pow" and eqn.params["y"] == 1


def _reached(jaxpr: Any, given: Sequence[Names]) -> list[Names]:
    known: dict[Any, Names] = dict(zip(jaxpr.invars, given, strict=True))

    def of(variable: Any) -> Names:
        return NONE if isinstance(variable, Literal) else known.get(variable, NONE)

    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [of(variable) for variable in eqn.invars]
        body = eqn.params["jaxpr"] if name == "shard_map" else called(eqn)
        if body is not None:
            results = _reached(bare(body), operands)
        elif name == "cond":
            branches = [_reached(bare(branch), operands[1:]) for branch in eqn.params["branches"]]
            results = [operands[0].union(*each) for each in zip(*branches, strict=True)]
        elif name == "scan":
            results = _reached_in_loop(eqn, operands)
        else:  # a while loop among them: each of its results by all that is in it
            inside = [each for body in inner(eqn) for each in inexact_operations(body)]
            results = [_stood_in(eqn).union(inside, *operands)] * len(eqn.outvars)
        known |= zip(eqn.outvars, results, strict=True)
    return [of(variable) for variable in jaxpr.outvars]


def _reached_in_loop(eqn: Any, operands: list[Names]) -> list[Names]:
    body, (consts, carried) = bare(eqn.params["jaxpr"]), scanned(eqn)
    while True:
        results = _reached(body, operands)
        carry = [one | other for one, other in zip(operands[consts:], results[:carried], strict=False)]
        if carry == operands[consts : consts + carried]:
            return results
        operands = [*operands[:consts], *carry, *operands[consts + carried :]]


def meshes_in(jaxpr: Any) -> list[Any]:
    """The meshes of the shard_maps of a jaxpr."""
    return [eqn.params["mesh"] for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map"]


def sums_in(jaxpr: Any) -> bool:
    return any(eqn.primitive.name in SUMS | OPAQUE and is_float(eqn.outvars[0].aval) for eqn in equations(jaxpr))


def narrowed_for_a_sum(jaxpr: Any) -> set[Any]:
    """What is made narrower only to be summed over devices: a reduction in a lower precision than its terms."""
    consumers: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for variable in eqn.invars:
            if not isinstance(variable, Literal):
                consumers.setdefault(variable, []).append(eqn)
    for variable in jaxpr.outvars:
        if not isinstance(variable, Literal):
            consumers.setdefault(variable, []).append(None)
    found: set[Any] = set()

    def only_summed(variable: Any) -> bool:
        after = consumers.get(variable, [])
        return bool(after) and all(
            eqn is not None
            and (
                eqn.primitive.name in COLLECTIVE_SUMS or (eqn.primitive.name == "pvary" and only_summed(eqn.outvars[0]))
            )
            for eqn in after
        )

    for eqn in jaxpr.eqns:
        source: Any = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name == "convert_element_type":
            before, after = source.aval.dtype, eqn.params["new_dtype"]
            floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
            narrowed = floats and jnp.finfo(after).nmant < jnp.finfo(before).nmant
        else:
            narrowed = eqn.primitive.name == "pvary" and not isinstance(source, Literal) and source in found
        if narrowed and only_summed(eqn.outvars[0]):
            found.add(eqn.outvars[0])
    return found


def needed_whole(jaxpr: Any) -> set[Any]:
    """The variables that something not linear is computed from, here or in a call: no terms of a sum are left to add."""
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        needed = eqn.invars if eqn.primitive.name in NONLINEAR else []
        if (body := called(eqn)) is not None:
            inside = needed_whole(bare(body))
            needed = [outer for outer, given in zip(eqn.invars, bare(body).invars, strict=True) if given in inside]
        found |= {variable for variable in needed if not isinstance(variable, Literal)}
    return found
