"""What reads the inputs of a program: where that is one lookup or one product, less is gathered, or sent, than for all uses."""

from __future__ import annotations

from typing import Any

from jshard.layers.partition.planner import CASTS
from jshard.programs.jaxprs import Eqn, bare, called, is_in, scanned

OTHER = "other"


def readers(program: Any, *, through: bool = True) -> list[list[str]]:
    """Return of each input what reads it: "gather" for rows that are looked up in it, "dot_general", or OTHER. Casts and calls
    are looked `through`, or else are OTHER themselves."""
    jaxpr = bare(program)
    of = {variable: variable for variable in jaxpr.invars}
    found: dict[Any, list[str]] = {variable: [] for variable in jaxpr.invars}
    for eqn in jaxpr.eqns:
        insides = _inside(eqn) if through else [None] * len(eqn.invars)
        for at, (atom, inside) in enumerate(zip(eqn.invars, insides, strict=True)):
            if not is_in(atom, of):
                continue
            name = eqn.primitive.name
            if through and name in CASTS:
                of[eqn.outvars[0]] = of[atom]
            elif inside is not None:
                found[of[atom]] += inside
            else:
                found[of[atom]].append(name if name == "dot_general" or (name == "gather" and not at) else OTHER)
    for atom in jaxpr.outvars:
        if is_in(atom, of):
            found[of[atom]].append(OTHER)
    return [found[variable] for variable in jaxpr.invars]


def _inside(eqn: Eqn) -> list[list[str] | None]:
    """What reads each operand in the program that an equation calls, or in a loop of one turn that closes over it."""
    if (body := called(eqn)) is not None:
        return [*readers(body)]
    if is_one_turn(eqn):
        consts, _ = scanned(eqn)
        return [*readers(eqn.params["jaxpr"])[:consts], *[None] * (len(eqn.invars) - consts)]
    return [None] * len(eqn.invars)


def is_one_turn(eqn: Eqn) -> bool:
    return eqn.primitive.name == "scan" and eqn.params["length"] == 1
