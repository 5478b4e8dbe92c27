"""A program cut at its loops: what stands between them is one equation each where it reads what is stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.layers.partition.regather import regathering
from jshard.programs.jaxprs import bare, bound, evaluate

X, W, U = (np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32) for seed in range(3))


def loop(x):
    return lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x)


def step(eqn, given):
    return evaluate(eqn.params["jaxpr"], given, step) if eqn.primitive.name == "regathered" else bound(eqn, given)


def named(jaxpr):
    """Its equations, what is regathered in brackets with how many operands and results it has."""
    return " ".join(
        f"[{named(eqn.params['jaxpr'])}]{len(eqn.invars)}{len(eqn.outvars)}"
        if eqn.primitive.name == "regathered" else eqn.primitive.name for eqn in jaxpr.eqns
    )  # fmt: skip


CASES = {  # a program of w, u and x, of which w and u are stored, and its equations then
    "before and behind a loop": (lambda w, u, x: loop(jnp.cos(x @ w)) @ u, "[dot_general cos]21 scan [dot_general]21"),
    "beside a loop that reads it": (
        lambda w, u, x: lax.fori_loop(0, 2, lambda _, x: x @ w, x + u), "[add]21 scan",
    ),
    "what reads nothing that is stored": (lambda w, u, x: loop(jnp.cos(x)) @ u, "cos scan [dot_general]21"),
    "what is not stored, turned": (lambda w, u, x: loop(x.T @ w) @ u, "[transpose dot_general]21 scan [dot_general]21"),
    "what several read": (
        lambda w, u, x: jnp.cos(loop(jnp.cos(x @ w)) @ w) @ u, "dot_general cos scan dot_general [cos dot_general]21",
    ),
    "what three read": (lambda w, u, x: loop(loop(x @ w) @ w) @ w, "dot_general scan dot_general scan dot_general"),
    "beside a constant": (lambda w, u, x: (x @ w, 3.0), "[dot_general]21"),
    "what is made of it, and handed back": (
        lambda w, u, x: (jnp.sin(x @ w), loop(x), x @ u), "[dot_general sin]21 scan [dot_general]21",
    ),
    "cast where it is read": (
        lambda w, u, x: loop(x @ w.astype(jnp.bfloat16).T.astype(jnp.float32)) @ u,
        "convert_element_type transpose convert_element_type [convert_element_type transpose convert_element_type "
        "dot_general]21 scan [dot_general]21",
    ),
    "read again behind the loop": (
        lambda w, u, x: (lambda y: loop(y) + jnp.exp(y) @ u)(jnp.cos(x @ w)), "[dot_general cos]21 scan [exp dot_general add]31",
    ),
    "checkpointed by itself": (lambda w, u, x: jax.checkpoint(lambda w, x: x @ w)(w, x) @ u, "remat2 dot_general"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_pieces_between_loops_are_one_equation_each(case):
    f, wanted = CASES[case]
    found = bare(regathering(jax.make_jaxpr(f)(W, U, X), [True, True, False]))
    assert named(found).replace("checkpoint", "remat2") == wanted
    for one, other in zip(evaluate(found, [W, U, X], step), jax.tree.leaves(f(W, U, X)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_cast_of_all_that_is_stored_is_done_where_it_is_read():
    program = jax.make_jaxpr(lambda w, u, x: loop(x @ w.T))(W, U, X)
    assert named(bare(regathering(program, [True, False, False]))) == "transpose [transpose dot_general]21 scan"


def test_a_piece_stands_where_its_last_equation_stood():
    program = jax.make_jaxpr(CASES["before and behind a loop"][0])(W, U, X)
    piece, *_ = regathering(program, [True, True, False]).eqns
    assert [eqn.source_info.traceback is piece.source_info.traceback for eqn in program.eqns[:2]] == [False, True]


def test_a_program_of_nothing_stored_stays_as_it_is():
    program = jax.make_jaxpr(CASES["before and behind a loop"][0])(W, U, X)
    assert regathering(program, [False] * 3) is program
    open_one = regathering(program.jaxpr, [True, True, False])
    assert (
        named(open_one)
        == named(regathering(program, [True, True, False]).jaxpr)
        == CASES["before and behind a loop"][1]
    )
