"""Functions with a hand-written rule under `jshard.shard`, because rules of primitives find no good collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from jshard.layers.partition.planner import PlanRule
from jshard.layers.partition.run import Rule
from jshard.programs.jaxprs import OpenJaxpr, Tree

by_hand_p = Primitive("by_hand")
by_hand_p.multiple_results = True
by_hand_p.def_abstract_eval(lambda *_, jaxpr, rule: jaxpr.out_avals)
by_hand_p.def_impl(lambda *xs, jaxpr, rule: jax.jit(jaxpr_as_fun(jaxpr))(*xs))
mlir.register_lowering(
    by_hand_p, mlir.lower_fun(lambda *xs, jaxpr, rule: jaxpr_as_fun(jaxpr)(*xs), multiple_results=True)
)


def _batched(xs: Tree, axes: Any, *, jaxpr: OpenJaxpr, rule: Any) -> Any:
    outs = jax.vmap(jaxpr_as_fun(jaxpr), axes)(*xs)  # plain JAX
    return outs, [0] * len(outs)


batching.primitive_batchers[by_hand_p] = _batched


class HandRule(NamedTuple):
    """The plan and the run of a function under `jshard.shard`."""

    plan: PlanRule
    run: Rule
    sent: Callable[..., Any] | None = None  # returns the bytes that no move sends


def by_hand(whole: Callable[..., Any], rule: HandRule) -> Callable[..., list[Array]]:
    """Return `whole`, a function of global arrays in plain JAX with a tuple as result, as an equation of a traced
    program.

    On one device, and where a program is left to XLA, the equation is that function; `jshard.shard` plans and runs
    its rule. The equation has no derivative: a differentiable function is two of these, forward and backward, in a
    `jax.custom_vjp`. Under `jax.vmap` it is plain JAX.
    """

    def call(*xs: Array) -> list[Array]:
        return by_hand_p.bind(*xs, jaxpr=jax.make_jaxpr(whole)(*xs), rule=rule)

    return call


PLANS: dict[str, PlanRule] = {"by_hand": lambda plan, eqn, values: eqn.params["rule"].plan(plan, eqn, values)}
RULES: dict[str, Rule] = {"by_hand": lambda run, eqn, parts, step: eqn.params["rule"].run(run, eqn, parts, step)}
