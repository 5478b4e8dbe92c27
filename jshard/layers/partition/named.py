"""Programs left to XLA, with the claims in their name stacks.

Each operation is under the nearest claim, as in the partition. Results of a `sequence` are constrained to be split
so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.layers.partition import product
from jshard.layers.partition.planner import STAYS
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import CALLS, Eqn, OpenJaxpr, flow, level, with_equations
from jshard.programs.provenance import placed_in
from jshard.signals.signal import Signal

# The parameters that hold what an equation runs. Functions with a derivative of their own are named as a whole.
HELD = {**{name: (key,) for name, key in CALLS.items() if not name.startswith("custom")},
        "scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}  # fmt: skip


def named(jaxpr: OpenJaxpr, claims: Sequence[Signal | None], mesh: Mesh, found: Mapping[Any, Axes]) -> Any:
    """Put the claims of a jaxpr's arguments into the name stacks of its equations, and constrain each product with a
    scattered sum in the partition. `found` has the split of each variable."""
    return _Naming(mesh, found).jaxpr(jaxpr, claims)


class _Naming:
    nearest: Signal | None = None  # the claim of the parameter used last

    def __init__(self, mesh: Mesh, found: Mapping[Any, Axes]):
        self.mesh, self.found = mesh, found

    def jaxpr(self, jaxpr: OpenJaxpr, claims: Sequence[Signal | None]) -> Any:
        eqns = list[Eqn]()

        def step(eqn: Eqn, given: list[Signal | None]) -> list[Signal | None]:
            claim = next(filter(None, given), None)
            self.nearest = claim or self.nearest
            eqns.extend(self._constrained(self._equation(eqn, given), claim))
            return [given[0] if eqn.primitive.name in STAYS else None] * len(eqn.outvars)

        flow(jaxpr, claims, step, None, inside=False)
        return with_equations(jaxpr, eqns)

    def _constrained(self, eqn: Eqn, claim: Signal | None) -> list[Any]:
        if claim is None or eqn.primitive.name not in product.PRODUCTS:
            return [eqn]
        (out,), scatters = eqn.outvars, set(claim.sequence) & set(claim.reduction)
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(names if scatters & set(names) else free for names in self.found.get(out, ())))
        if all(names is free for names in spec):
            return [eqn]
        (told,) = level(
            jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec)))(out.aval)
        )
        summed, source = Var(out.aval), eqn.source_info
        return [eqn.replace(outvars=[summed]), told.replace(invars=[summed], outvars=[out], source_info=source)]

    def _equation(self, eqn: Eqn, given: Sequence[Signal | None]) -> Any:
        keys = [key for key in HELD.get(eqn.primitive.name, ()) if key in eqn.params]
        if keys:
            return eqn.replace(params={**eqn.params, **{key: self._held(eqn, key, given) for key in keys}})
        if self.nearest is None:
            return eqn
        stack = placed_in(eqn.source_info.name_stack, self.nearest.name)
        return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))

    def _held(self, eqn: Eqn, key: str, given: Sequence[Signal | None]) -> Any:
        held = eqn.params[key]
        if key == "branches":
            return tuple(self.jaxpr(each, given[1:]) for each in held)
        if eqn.primitive.name == "while":  # constants of the test, of the body, what is carried
            tests, bodies = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            given = [*given[:tests], *given[bodies:]] if key == "cond_jaxpr" else given[tests:]
        return self.jaxpr(held, given)
