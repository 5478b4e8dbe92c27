"""Claims that do not fit each other: what one signal leaves split, and the next has to move before it can use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal

from jshard.inspect.ledger.jaxpr_walk import KIND_OF, Around, mesh_axes_of
from jshard.programs.jaxprs import Eqn, Jaxpr, bare, inner
from jshard.programs.provenance import Cause
from jshard.signals.active_config import configuration
from jshard.signals.keys import blamed


@dataclasses.dataclass(frozen=True)
class Misfit:
    """An array that `taken` has to move by `collective`, as `left` left it split. Values are right; one of both claims is not,
    or the model mixes there what they split."""

    left: Cause
    taken: Cause
    collective: str
    mesh_axes: tuple[str, ...]
    array: str  # float32[4,8,32]

    def __str__(self) -> str:
        axes, where = "+".join(self.mesh_axes), f" at {self.taken.source}" if self.taken.source else ""
        left = _named(self.left) if self.left.path else "the program"
        takes = f"{_named(self.taken)} takes it otherwise: {self.collective} of {self.array}{where}"
        return f"{left} leaves an array split over {axes}, and {takes}"


def _named(cause: Cause) -> str:
    return f'signal "{cause.signal}" ({cause.place})'


def misfits(jaxpr: Jaxpr) -> tuple[Misfit, ...]:
    """Every move of the forward pass that a claim needs and no word of it asks for, one for each two signals."""
    present = configuration()
    if present is None or not present.has_claims:
        return ()
    found: dict[Any, Misfit] = {}
    for each in _moves(bare(jaxpr), Around()):
        if present.lookup(each.taken.path).match:
            found.setdefault((each.left.path, each.taken.path), each)
    return tuple(found.values())


def _moves(jaxpr: Any, around: Around) -> Iterator[Misfit]:
    made: dict[Any, tuple[Any, Around]] = {}
    for eqn in jaxpr.eqns:
        here = around.entering(eqn)
        made |= dict.fromkeys(eqn.outvars, (eqn, here))
        cause, kind = here.cause, KIND_OF.get(eqn.primitive.name)
        if kind is not None and cause.redistributed and cause.path and cause.phase == "forward":
            mesh_axes, result = mesh_axes_of(eqn), eqn.outvars[0].aval
            array = f"{result.dtype}[{','.join(map(str, result.shape))}]"
            yield Misfit(
                _left_by(eqn, cause, made, mesh_axes), here.blamed(eqn, mesh_axes), kind.name, mesh_axes, array
            )
        for each in inner(eqn):
            yield from _moves(each, here.within())


def _left_by(eqn: Eqn, cause: Cause, made: dict[Any, tuple[Any, Around]], mesh_axes: tuple[str, ...]) -> Cause:
    """The nearest signal before, along the largest operands."""
    while True:
        variables = [v for v in eqn.invars if not isinstance(v, Literal) and v in made]
        if not variables:
            return Cause()
        eqn, here = made[max(variables, key=lambda variable: getattr(variable.aval, "size", 0))]
        if here.cause.path and here.cause.path != cause.path:
            return blamed(here.cause, mesh_axes)
