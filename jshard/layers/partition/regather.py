"""A program cut at its loops: what stands between them gathers what is stored again for the backward pass, as layers do."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence, Set
from typing import Any

from jax._src import source_info_util
from jax.extend.core import Primitive

from jshard.layers.partition.planner import STAYS
from jshard.programs.jaxprs import (
    CHECKPOINTS,
    LOOPS,
    Eqn,
    OpenJaxpr,
    bare,
    holds,
    inner,
    is_in,
    part_of,
    read_by,
    variables,
)

regathered_p = Primitive("regathered")  # only the partition meets it: nothing binds it
regathered_p.multiple_results = True


def regathering(program: Any, stored: Sequence[bool]) -> Any:
    """Return a program whose equations between loops are one each, `regathered`, where they read inputs that are stored: a
    policy around a loop would take the place of its own. What several pieces read, as a tied table, is gathered once for
    all: by each it would be gathered and its gradient scattered. One that says itself what is computed anew stays as it is."""
    jaxpr = bare(program)
    if not any(stored) or holds(jaxpr, CHECKPOINTS):
        return program
    roots = {v: {v} for v, is_stored in zip(jaxpr.invars, stored, strict=True) if is_stored}
    made = []  # what only casts or shapes what is stored is done in the piece that reads it, or it would be kept
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in STAYS and (reads := read_by([eqn])) and reads <= roots.keys():
            roots.update((variable, set().union(*map(roots.__getitem__, reads))) for variable in eqn.outvars)
            made.append(eqn)
    once = set(map(id, made))
    eqns = [eqn for eqn in jaxpr.eqns if id(eqn) not in once]
    roots_of = lambda eqns: set().union(*(roots.get(variable, ()) for variable in read_by(eqns)))
    shared: set[Any] = set()
    is_border = lambda eqn: _is_own(eqn) or not shared.isdisjoint(roots_of([eqn]))
    while True:
        groups = _cut(eqns, is_border)
        readers = collections.Counter(root for group in groups for root in roots_of(group))
        if shared.issuperset(several := {root for root, count in readers.items() if count >= 2}):
            break
        shared.update(several)
    found = list(made)
    for number, group in enumerate(groups):
        read = read_by(eqn for some in groups[number + 1 :] for eqn in some).union(variables(jaxpr.outvars))
        found += group if number % 2 else _wrapped(jaxpr, made, group, read, roots.keys())
    bodies: dict[Any, Any] = {}
    found = [_regathering_call(eqn, roots.keys(), bodies) for eqn in found]
    cut = jaxpr.replace(eqns=found)
    return cut if program is jaxpr else program.replace(jaxpr=cut)


def _is_own(eqn: Eqn) -> bool:
    """Whether an equation says itself what is gathered again: a loop, and a call that others share."""
    return eqn.primitive.name in (*LOOPS, "folded") or any(holds(each, LOOPS) for each in inner(eqn))


def _regathering_call(eqn: Eqn, at_rest: Set[Any], bodies: dict[Any, Any]) -> Eqn:
    """The same call, of a program that gathers again; calls of one program stay calls of one."""
    if eqn.primitive.name != "folded":
        return eqn
    body, stored = eqn.params["jaxpr"], tuple(is_in(atom, at_rest) for atom in eqn.invars)
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


def _wrapped(jaxpr: OpenJaxpr, made: Sequence[Any], group: list[Any], read: Set[Any], at_rest: Set[Any]) -> list[Any]:
    needed, wanted = list(group), read_by(group)
    for eqn in reversed(made):
        if wanted.intersection(eqn.outvars):
            needed.insert(0, eqn)
            wanted |= read_by([eqn])
    born = {variable for eqn in needed for variable in eqn.outvars}
    given = list(dict.fromkeys(v for eqn in needed for v in variables(eqn.invars) if v not in born))
    if at_rest.isdisjoint(given):
        return group
    results = [variable for eqn in group for variable in eqn.outvars if variable in read]
    last = group[-1]
    source = last.source_info.replace(name_stack=source_info_util.new_name_stack())  # each equation has its own
    params = {"jaxpr": part_of(jaxpr, needed, given, results)}
    return [last.replace(primitive=regathered_p, invars=given, outvars=results, params=params, source_info=source)]
