"""Names for the operations of a program that is left to XLA: each stands under the claim nearest to it, as in the partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jshard.jaxprs import CALLS, bare
from jshard.layers.partition.engine import STAYS
from jshard.provenance import placed_in

# The parameters that hold what an equation runs. Functions with a derivative of their own are named as a whole.
HELD = {**{name: (key,) for name, key in CALLS.items() if not name.startswith("custom")},
        "scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}  # fmt: skip


def named(jaxpr: Any, claims: Sequence[str | None]) -> Any:
    """Put the signals that claim the arguments of a jaxpr into the name stacks of its equations."""
    return _Naming().jaxpr(jaxpr, claims)


class _Naming:
    nearest: str | None = None  # the claim of the parameter used last

    def jaxpr(self, jaxpr: Any, claims: Sequence[str | None]) -> Any:
        opened = bare(jaxpr)
        known = dict(zip(opened.invars, claims, strict=True))
        eqns = []
        for eqn in opened.eqns:
            given = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
            self.nearest = next(filter(None, given), self.nearest)
            if eqn.primitive.name in STAYS:
                known.update(dict.fromkeys(eqn.outvars, given[0]))
            eqns.append(self._equation(eqn, given))
        made = opened.replace(eqns=eqns)
        return made if opened is jaxpr else jaxpr.replace(jaxpr=made)

    def _equation(self, eqn: Any, given: Sequence[str | None]) -> Any:
        keys = [key for key in HELD.get(eqn.primitive.name, ()) if key in eqn.params]
        if keys:
            return eqn.replace(params={**eqn.params, **{key: self._held(eqn, key, given) for key in keys}})
        if self.nearest is None:
            return eqn
        stack = placed_in(eqn.source_info.name_stack, self.nearest)
        return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))

    def _held(self, eqn: Any, key: str, given: Sequence[str | None]) -> Any:
        held = eqn.params[key]
        if key == "branches":
            return tuple(self.jaxpr(each, given[1:]) for each in held)
        if eqn.primitive.name == "while":  # constants of the test, of the body, what is carried
            tests, bodies = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            given = [*given[:tests], *given[bodies:]] if key == "cond_jaxpr" else given[tests:]
        return self.jaxpr(held, given)
