"""A program cut at its loops: what stands between them gathers what is stored again for the backward pass, as layers do."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence, Set
from typing import Any

from jax.extend.core import Primitive

from jshard.layers.partition.planner import STAYS
from jshard.programs import jaxprs
from jshard.programs.jaxprs import CHECKPOINTS, FOLDED, LOOPS, Eqn, OpenJaxpr, bare, holds, level, read_by

regathered_p = Primitive("regathered")  # only the partition meets it: nothing binds it
regathered_p.multiple_results = True


def regathering(program: Any, stored: Sequence[bool]) -> Any:
    """Return a program with the equations between loops grouped in `regathered` equations, where they read stored
    inputs.

    A policy around a loop would replace the loop's own. An input of several groups, such as a tied table, is gathered
    once for all: else each group would gather it and scatter its gradient. A program with its own checkpoints stays
    unchanged.
    """
    jaxpr = bare(program)
    if not any(stored) or holds(jaxpr, CHECKPOINTS):
        return program
    none, roots = frozenset[Any](), dict[Any, frozenset[Any]]()

    def shaped_from(eqn: Eqn, given: list[frozenset[Any]]) -> list[frozenset[Any]]:
        is_shaped = eqn.primitive.name in STAYS and all(given)
        return [none.union(*given) if is_shaped else none] * len(eqn.outvars)

    # The piece that reads a stored input also casts and shapes it: else the result would be kept.
    given = [frozenset((v,)) if each else none for v, each in zip(jaxpr.invars, stored, strict=True)]
    jaxprs.flow(jaxpr, given, shaped_from, none, inside=False, known=roots)
    at_rest = {variable for variable, of in roots.items() if of}
    made = [eqn for eqn in level(jaxpr) if not at_rest.isdisjoint(eqn.outvars)]
    shaped = jaxprs.part_of(jaxpr, made, jaxpr.invars, ())
    eqns = [eqn for eqn in level(jaxpr) if at_rest.isdisjoint(eqn.outvars)]
    roots_of = lambda eqns: frozenset().union(*(roots[variable] for variable in read_by(eqns)))
    is_border = lambda eqn, shared: _is_own(eqn) or not shared.isdisjoint(roots_of([eqn]))
    groups_at = lambda shared: _cut(eqns, lambda eqn: is_border(eqn, shared))

    def more(shared: frozenset[Any]) -> frozenset[Any]:
        readers = collections.Counter(v for group in groups_at(shared) for v in roots_of(group))
        return shared.union(root for root, count in readers.items() if count >= 2)

    groups, found, bodies = groups_at(jaxprs.settled(more, none)), list(made), dict[Any, Any]()
    results = jaxprs.variables(jaxpr.outvars)
    for number, group in enumerate(groups):
        read = read_by(eqn for some in groups[number + 1 :] for eqn in some).union(results)
        found += group if number % 2 else _wrapped(shaped, group, read, at_rest)
    return jaxprs.with_equations(program, [_regathering_call(eqn, at_rest, bodies) for eqn in found])


def _is_own(eqn: Eqn) -> bool:
    """Return whether an equation gathers again by itself: a loop, or a shared call."""
    return eqn.primitive.name in (*LOOPS, FOLDED) or any(holds(each, LOOPS) for each in jaxprs.inner(eqn))


def _regathering_call(eqn: Eqn, at_rest: Set[Any], bodies: dict[Any, Any]) -> Eqn:
    """Return the call of a regathering program; calls of a shared program stay shared."""
    if eqn.primitive.name != FOLDED:
        return eqn
    body, stored = eqn.params["jaxpr"], tuple(jaxprs.is_in(atom, at_rest) for atom in eqn.invars)
    key = id(body), stored
    if key not in bodies:
        bodies[key] = regathering(body, stored)
    return eqn.replace(params={"jaxpr": bodies[key]})


def _cut(eqns: Sequence[Any], is_border: Callable[[Any], bool]) -> list[list[Any]]:
    """Groups of equations: those between borders, and each border by itself, in turns."""
    groups: list[list[Any]] = [[]]
    for eqn in eqns:
        if is_border(eqn):
            groups += [[eqn], []]
        else:
            groups[-1].append(eqn)
    return groups


def _wrapped(shaped: OpenJaxpr, group: list[Any], read: Set[Any], at_rest: Set[Any]) -> list[Any]:
    needed = jaxprs.cut(shaped, [v for v in read_by(group) if v in at_rest]).jaxpr
    results = [variable for eqn in group for variable in eqn.outvars if variable in read]
    call = jaxprs.call_of(regathered_p, shaped, [*level(needed), *group], results) if group else None
    return group if call is None or at_rest.isdisjoint(call.invars) else [call]
