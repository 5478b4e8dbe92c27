"""Readers of a program's inputs: for a single lookup or product, less is gathered or sent than for all uses."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from jshard.layers.partition.planner import CASTS
from jshard.programs.jaxprs import Eqn, bare, called, flow_back, scanned

OTHER = "other"
LOOKUPS = ("gather", "dynamic_slice")  # in their first operand


def readers(program: Any, *, through: Collection[str] = CASTS) -> list[list[str]]:
    """Return what reads each input: "gather" and "dynamic_slice" for lookups in it, "dot_general",
    or OTHER.

    Casts, the primitives of `through`, count as what reads their results, and calls and loops of one
    turn as what they hold. With no `through` all three are OTHER.
    """

    def reads(eqn: Eqn, after: list[list[str]]) -> list[list[str]]:
        name = eqn.primitive.name
        if name in through:
            return after
        if through and (body := called(eqn)) is not None:
            return readers(body, through=through)
        is_known = lambda at: name == "dot_general" or (name in LOOKUPS and not at)
        own = [[name if is_known(at) else OTHER] for at in range(len(eqn.invars))]
        if through and is_one_turn(eqn):
            consts, _ = scanned(eqn)
            own[:consts] = readers(eqn.params["jaxpr"], through=through)[:consts]
        return own

    jaxpr = bare(program)
    found = flow_back(jaxpr, [[OTHER]] * len(jaxpr.outvars), reads, [], operator.add)
    return [found[variable] for variable in jaxpr.invars]


def is_one_turn(eqn: Eqn) -> bool:
    return eqn.primitive.name == "scan" and eqn.params["length"] == 1
