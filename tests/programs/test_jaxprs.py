"""The tools for jaxprs: an evaluator, a dataflow through loops and branches, a cutter, one equation for several."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from jshard.programs.jaxprs import (
    bound,
    call_of,
    called,
    cut,
    dependent,
    evaluate,
    flow,
    flow_back,
    level,
    makers,
    outline,
    pruned,
    settled,
    uses,
    with_equations,
)

X = np.arange(3.0, dtype=np.float32)
NONE = frozenset()


def turns(x, y, z):
    """Hand `z` on to `y` and `y` on to `x`: two turns until the first result depends on `z`."""
    return lax.scan(
        lambda carry, _: ((carry[0] + carry[1], carry[1] + carry[2], carry[2]), carry[0]), (x, y, z), length=3
    )


def branches(x, y, z):
    return lax.cond(x[0] > 0, lambda y, z: (y, z * 2), lambda y, z: (y + z, z * 3), y, z)


def one_branch(x, y, z):
    return lax.cond(True, lambda y, z: (y, z), lambda y, z: (y, z * 2), y, z)


def counted(x, y, z):
    return lax.while_loop(lambda carry: carry[0][0] < 3, lambda carry: (carry[0] + 1, carry[1] * 2), (x, y))


@pytest.mark.parametrize(
    ("f", "reached"),
    [
        (lambda x, y, z: (x + y, y * 2, jnp.ones(3)), ["xy", "y", ""]),
        (jax.jit(lambda x, y, z: (z, y + 1)), ["z", "y"]),
        (turns, ["xyz", "yz", "z", "xyz"]),
        (branches, ["xyz", "xz"]),
        (one_branch, ["y", "z"]),
        (counted, ["xy", "xy"]),
    ],
)
def test_facts_flow_through_calls_branches_and_loops(f, reached):
    jaxpr, known = jax.make_jaxpr(f)(X, X, X), {}
    join = lambda eqn, given: [NONE.union(*given)] * len(eqn.outvars)
    facts = flow(jaxpr, [frozenset("x"), frozenset("y"), frozenset("z")], join, NONE, known=known)
    assert ["".join(sorted(each)) for each in facts] == reached
    assert [known[v] for v in jaxpr.jaxpr.invars] == [{"x"}, {"y"}, {"z"}]
    assert set(makers(jaxpr)) < set(known)


def test_a_flow_of_one_level_takes_each_equation_as_one_step():
    jaxpr = jax.make_jaxpr(jax.jit(lambda x, y: (x, y)))(X, X).jaxpr
    (call,) = level(jaxpr)
    assert call.outvars[0] in dependent(jaxpr, [False, True], inside=False)
    assert call.outvars[0] not in dependent(jaxpr, [False, True])
    assert call.outvars[1] in dependent(jaxpr, [False, True])


def test_facts_flow_back_in_the_order_of_the_uses():
    jaxpr = jax.make_jaxpr(lambda x, y: (jnp.sin(x) + x * x, x))(X, X).jaxpr
    reads = lambda eqn, after: [f"{eqn.primitive.name}{at} " for at in range(len(eqn.invars))]
    found = flow_back(jaxpr, ["a", "b"], reads, "", operator.add)
    assert [found[v] for v in jaxpr.invars] == ["sin0 mul0 mul1 b", ""]
    passed = flow_back(jaxpr, [{1}, {2}], lambda eqn, after: after * len(eqn.invars), NONE)
    assert [passed[v] for v in jaxpr.invars] == [{1, 2}, NONE]


def test_settled_is_the_first_that_a_step_leaves_as_it_is():
    assert settled(lambda n: min(n + 2, 7), 0) == 7


def test_a_cut_has_the_equations_and_inputs_of_its_results_alone():
    jaxpr = jax.make_jaxpr(lambda x, y, z: (jnp.sin(y) * z, jnp.cos(x)))(X, X, X).jaxpr
    first, second = jaxpr.outvars
    piece, inputs = cut(jaxpr, [second])
    assert ([eqn.primitive.name for eqn in level(piece)], inputs) == (["cos"], [0])
    assert [eqn.primitive.name for eqn in level(cut(jaxpr, [first]).jaxpr)] == ["sin", "mul"]
    between = level(jaxpr)[0].outvars
    assert level(cut(jaxpr, between, between).jaxpr) == []
    piece, inputs = cut(jaxpr, [first], between)
    assert ([eqn.primitive.name for eqn in level(piece)], inputs) == (["mul"], [2])
    assert piece.invars == [jaxpr.invars[2], *between]
    np.testing.assert_array_equal(evaluate(piece, [X, X + 1], bound)[0], X * (X + 1))


def test_a_pruned_program_has_no_dead_equation_inside_of_others():
    f = jax.jit(lambda x, y: (jnp.sin(x), jnp.cos(y)))
    jaxpr = jax.make_jaxpr(lambda x, y: f(x, y))(X, X).jaxpr
    live, inputs = pruned(jaxpr, [False, True])
    assert ([eqn.primitive.name for eqn in level(called(*level(live)))], inputs) == (["cos"], [1])
    assert pruned(jaxpr).inputs == [0, 1]


def test_uses_end_with_the_results():
    jaxpr = jax.make_jaxpr(lambda x: (x * x, x))(X).jaxpr
    (product,) = level(jaxpr)
    assert uses(jaxpr)[jaxpr.invars[0]] == [product, product, None]
    assert uses(jaxpr)[product.outvars[0]] == [None]


def test_one_equation_stands_for_several():
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.cos(jnp.sin(x) * y))(X, X).jaxpr
    *several, last = level(jaxpr)
    several_p = Primitive("several")
    one = call_of(several_p, jaxpr, several, last.invars)
    assert (one.invars, one.outvars) == (jaxpr.invars, last.invars)
    shorter = with_equations(jaxpr, [one, last])
    step = lambda eqn, xs: evaluate(eqn.params["jaxpr"], xs, bound) if eqn.primitive is several_p else bound(eqn, xs)
    np.testing.assert_array_equal(evaluate(shorter, [X, X], step), evaluate(jaxpr, [X, X], bound))


def test_outlines_are_equal_but_for_variables():
    by_name = lambda f: outline(jax.make_jaxpr(f)(X, X), lambda eqn: eqn.primitive.name)
    assert by_name(lambda x, y: x * y + 1) == by_name(lambda a, b: a * b + 1)
    others = [lambda x, y: y * x + 1, lambda x, y: x * y + 2, lambda x, y: x * y - 1, lambda x, y: (x * y + 1, x)]
    assert by_name(lambda x, y: x * y + 1) not in map(by_name, others)


def test_known_values_are_those_of_all_variables():
    jaxpr, known = jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)))(X).jaxpr, {}
    (result,) = evaluate(jaxpr, [X], bound, known=known)
    assert known[jaxpr.outvars[0]] is result
    assert set(known) == {*jaxpr.invars, *makers(jaxpr)}
