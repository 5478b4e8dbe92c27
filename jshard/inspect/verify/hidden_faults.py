"""Whether a tolerance would hide a fault: one collective is off by a factor, and no result shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jshard.inspect.ledger.jaxpr_walk import KIND_OF
from jshard.inspect.verify.dataflow import leaves, on_the_way
from jshard.inspect.verify.interpreter import Evaluation
from jshard.inspect.verify.side import Side
from jshard.inspect.verify.verification import Finding
from jshard.programs.jaxprs import bare


def held_to_faults(
    side: Side, how: Evaluation, findings: Sequence[Finding], offs: Callable[[Any, Any], list[float]]
) -> list[Finding]:
    """Return the findings; those are unproven that a fault in a collective before them would not change by more than their
    tolerance, nor any other result. `offs` says by how much results differ."""
    jaxpr, _, made = side.trace()
    crossing = {str(id(eqn)): (eqn, here) for eqn, here in leaves(bare(jaxpr).eqns) if eqn.primitive.name in KIND_OF}
    before = on_the_way(jaxpr, lambda eqn: frozenset(crossing.keys() & {str(id(eqn))}))
    reached = [before[n] for n in made]
    within = [n for n, finding in enumerate(findings) if finding.verdict == "within"]
    shown = [keys for keys, each in zip(reached, findings, strict=True) if each.verdict == "bitwise" and not each.zero]
    at_stake = sorted(frozenset().union(*(reached[n] for n in within)).difference(*shown), key=list(crossing).index)
    if not at_stake:
        return list(findings)
    numbers = side.program.natural()
    results, _ = side.run(how, numbers)
    found = list(findings)
    runs = side.with_faults(how, numbers, [crossing[key][0] for key in at_stake])
    for key, faulty in zip(at_stake, runs, strict=True):
        far = offs(results, faulty)
        if any(far) and all(far[n] <= findings[n].tolerance for n in within):  # what nobody reads changes nothing
            eqn, here = crossing[key]
            for n in within:
                if key in reached[n]:
                    found[n] = dataclasses.replace(findings[n], verdict="unproven", hidden=here.blamed(eqn))
    return found
