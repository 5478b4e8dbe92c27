"""Which signals are active where a traced program uses its parameters: `with jshard.signal("up"): y = self.up(x)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jshard.programs.jaxprs import Eqn, Jaxpr, bare, bodies, run
from jshard.programs.provenance import Cause, source_of
from jshard.signals.claims import Claim
from jshard.signals.config import Configuration
from jshard.signals.plain_layers import LAYERS

Names = tuple[str, ...]  # of nested signals, outermost first
Source = frozenset[str] | None  # the parameters that a value is computed from; None: from data too


@dataclasses.dataclass(frozen=True)
class ActiveSignal:
    """The names of the signals that are active where an equation uses a parameter, and the line of the program."""

    names: Names
    line: str
    rank: int  # of the parameter where it is used first: in a loop without the axis of its trips
    is_layer: bool  # whether the equation is a product or a lookup


def active_signals(
    program: Any, paths: Sequence[str], lines: Mapping[Names, Collection[str]], around: Names
) -> dict[str, list[ActiveSignal]]:
    """Find the signals that each parameter is used under, in program order.

    `paths` names the parameters among the inputs ("" for data), `lines` has the lines of each `with`, and the signals `around`
    are active for the whole program. A use combines a parameter with data. A parameter without such a use under a signal has
    the signals that it is cast, reshaped or scaled under.
    """
    walk = _Walk(lines)
    walk.run(bare(program), [frozenset((path,)) if path else None for path in paths], Cause(around))
    return {path: list((walk.uses.get(path) or walk.changes[path]).values()) for path in {**walk.uses, **walk.changes}}


def claims_by_use(present: Configuration, found: Mapping[str, Sequence[ActiveSignal]]) -> dict[str, list[Claim]]:
    """Return the claim of each parameter by the signal that its first use is under, then those of products and lookups under
    signals that say something else. A name that the configuration does not have claims nothing."""
    claimed: dict[str, list[Claim]] = {}
    for path, uses in found.items():
        for use in uses:
            if not present.names(use.names):
                continue
            claims = claimed.setdefault(path, [])
            claim = Claim(present.lookup(use.names), "", line=use.line)
            if not claims or (use.is_layer and claim.signal not in [each.signal for each in claims]):
                claims.append(claim)
    return claimed


class _Walk:
    """A walk over a program that follows its parameters, through casts, loops and calls, to where they are used."""

    def __init__(self, lines: Mapping[Names, Collection[str]]):
        self.lines = lines
        self.uses: dict[str, dict[tuple[Names, bool], ActiveSignal]] = {}
        self.changes: dict[str, dict[tuple[Names, bool], ActiveSignal]] = {}
        self.ranks: dict[str, int] = {}

    def run(self, jaxpr: Jaxpr, sources: Sequence[Source], around: Cause) -> list[Source]:
        step = lambda eqn, operands: self.results(eqn, operands, around.inside(eqn.source_info.name_stack.stack))
        return run(jaxpr, [*[frozenset()] * len(jaxpr.constvars), *sources], step, constant=lambda literal: frozenset())

    def results(self, eqn: Eqn, sources: list[Source], here: Cause) -> list[Source]:
        if not any(sources):  # no parameter goes in
            return [None if None in sources else frozenset()] * len(eqn.outvars)
        outs: list[Source] = []
        for body, operands in bodies(eqn, sources):
            outs = self.run(body, operands, here)
        if outs:
            return outs
        parameters = frozenset[str]().union(*filter(None, sources))
        table = self.uses if None in sources else self.changes
        for path in parameters:
            at = next(at for at, of in enumerate(sources) if path in (of or ()))
            rank = self.ranks.setdefault(path, len(eqn.invars[at].aval.shape))
            if here.path:
                key = here.path, eqn.primitive.name in LAYERS
                line = _nearest(source_of(eqn), self.lines.get(here.path, ()))
                table.setdefault(path, {}).setdefault(key, ActiveSignal(here.path, line, rank, key[1]))
        if None in sources:
            return [None] * len(eqn.outvars)
        # a number that is computed from a parameter, as its norm, is no layer's array
        return [parameters if getattr(v.aval, "ndim", 0) else frozenset() for v in eqn.outvars]


def _nearest(source: str, lines: Collection[str]) -> str:
    """The line of the `with` around a line of the program: the last above it in its file, else any, else that line itself."""
    number = lambda line: int(line.rpartition(":")[2] or 0)
    above = [
        each
        for each in lines
        if each.rpartition(":")[0] == source.rpartition(":")[0] and number(each) <= number(source)
    ]
    return max(above, key=number, default=min(lines, default=source))
