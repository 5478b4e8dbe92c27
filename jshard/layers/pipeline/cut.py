"""A program of a loss, cut at the loop over its layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jshard.errors import JShardError
from jshard.layers.partition import Program
from jshard.programs.jaxprs import cut, is_in, level, scanned, uses
from jshard.programs.provenance import source_of
from jshard.signals.claims import Stage


class Cut:
    """A program of a loss, cut at the loop over its layers."""

    def __init__(self, program: Program, stage: Stage, of_data: Sequence[int]):
        jaxpr, self.program = program.jaxpr, program
        number_of = {v: n for n, v in enumerate(jaxpr.invars)}
        staged = {v for v, each in zip(jaxpr.invars, program.inputs, strict=True) if each.claim and each.claim.stage}
        using = [eqn for eqn in level(jaxpr) if any(is_in(v, staged) for v in eqn.invars)]
        says = f"{stage.signal} says stage ({stage.signal.at('stage')})"
        for eqn in using:
            if eqn.primitive.name != "scan" or eqn.params["reverse"]:
                raise JShardError(
                    f"{says}, and its layers are used by {eqn.primitive.name} ({source_of(eqn)}), and not by the loop of a "
                    "jshard.stack alone",
                    hint="call the stack as the model does, with no jax.jit, jax.checkpoint or other use of its parameters",
                )
        if len(using) > 1:
            raise JShardError(
                f"{says}, and its layers run in {len(using)} loops ({source_of(using[0])}, {source_of(using[1])})",
                hint="call one stack once, whose globs tell no layers apart",
            )
        self.loop = using[0]
        self.consts, count = scanned(self.loop)
        operands = list(self.loop.invars)
        start, over = operands[self.consts : self.consts + count], operands[self.consts + count :]
        self.carried = self.loop.outvars[:count]
        self.staged = [number_of[v] for v in over if is_in(v, staged)]
        self.over = [number_of[v] if v in staged else None for v in over]
        assert len(self.staged) == len(staged)
        self.first = cut(jaxpr, start)
        self.each = cut(jaxpr, [*operands[: self.consts], *(v for v in over if v not in staged)])
        outs = [jaxpr.outvars[0], *(jaxpr.outvars[1 + at] for at in of_data)]
        behind = uses(cut(jaxpr, outs, self.loop.outvars).jaxpr)
        self.left = [v for v in self.loop.outvars[count:] if v in behind]  # by each layer, and used behind the loop
        self.last = cut(jaxpr, outs, [*self.carried, *self.left])

    @functools.cache  # noqa: B019  # as long as the cut
    def of_length(self, layers: int) -> Any:
        """Return the loop over this number of layers."""
        return self.loop.replace(params={**self.loop.params, "length": layers})
