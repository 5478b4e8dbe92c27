"""Rules of maxima and minima over split axes, whose gradient is shared among all elements that attain them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jshard.layers.partition.local_sizes import axes_of
from jshard.layers.partition.part import Part
from jshard.layers.partition.plan import Step
from jshard.layers.partition.planner import known
from jshard.layers.partition.run import Rule, Run, shape_of
from jshard.layers.reduce import ReductionBody
from jshard.layouts.axes import REDUCTIONS
from jshard.programs.jaxprs import Eqn


def _extreme(run: Run, eqn: Eqn, parts: list[Part], step: Step) -> list[Part]:
    """Reduce over elements and devices in one step: by two, the gradient would be shared among devices, whatever each has."""
    found = known(eqn)
    kind: Any = REDUCTIONS[eqn.primitive.name]
    names = [name for factor, some in step.choice.items() if found.kinds[factor] == kind for name in some]
    if not names or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return run.by_table(eqn, parts, step)
    (x,) = run.placed(parts, found, step)
    over = tuple(name for name in names if run.sizes[name] >= 2)
    out = ReductionBody(kind, tuple(eqn.params["axes"]), keepdims=False, mesh_axes=over)(x)
    out = run.reduce(out, tuple(name for name in names if name not in over), kind, step.claim)
    return [Part(shape_of(eqn), axes_of(found.results[0], step.choice), out)]


RULES: dict[str, Rule] = {"reduce_max": _extreme, "reduce_min": _extreme}
