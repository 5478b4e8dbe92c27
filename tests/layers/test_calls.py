"""Loops, branches and functions with a derivative of their own: how what they carry is split, and what is gathered or summed once
and before them. Nothing is compiled but where numbers are compared."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

import jshard
from jshard.programs.jaxprs import equations
from jshard.signals.claims import Claim, Stage
from tests.support.partitioned import built, counted

SIZES = {"data": 2, "tensor": 4}
D, T = ("data",), ("tensor",)
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
XS = np.random.default_rng(1).normal(size=(4, 8, 8)).astype(np.float32)


def handed_on(x):
    """Each carries what the one before it did."""
    zero = jnp.zeros((8, 8))
    return lax.scan(lambda c, _: ((x, c[0], c[1], c[2]), None), (zero, zero, zero, zero), length=5)[0]


def exchanged(c, x):
    return lax.scan(lambda c, _: (x, None), c, length=2)[0]


CARRIED = {  # how arrays are split, and then what a loop carries
    "further, by three turns": (handed_on, [(T, ())], [(T, ())] * 3 + [((), ())]),
    "not otherwise": (exchanged, [(D, ()), (T, ())], [(D, ())]),
    "nor otherwise": (exchanged, [(T, ()), (D, ())], [(T, ())]),
    "nor less": (exchanged, [(T, ()), ((), ())], [(T, ())]),
    "further": (exchanged, [((), T), (D, T)], [(D, T)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CARRIED)
def test_what_a_loop_carries_is_split_as_it_goes_in_or_further(mesh, case):
    f, ways, expected = CARRIED[case]
    assert built(mesh(**SIZES), f, [X] * len(ways), ways)[0].out_axes == expected


def looped(turn):
    """Three turns of what closes over an array."""
    return lambda w, x: lax.scan(lambda x, _: (turn(w, x), None), x, length=3)[0]


def multiplied(w, x):
    return jnp.sin(x @ w)


def summed_so_far(w, x):
    return jnp.sin(x + jnp.cumsum(w, 0))


def until(w, x):
    """The test and the body each close over something."""
    return lax.while_loop(lambda x: x.sum() < w[0].sum() + 9, lambda x: jnp.abs(x) + multiplied(w, x) ** 2, x)


STORED = {"row": "data", "store": "data"}
NARROW = {**STORED, "dtype": {"compute": "bfloat16"}}
CLOSED_OVER = {  # how the array that is closed over lies, and the other; what is sent forward, and for its gradient too
    "whole": (looped(multiplied), ((), ()), (D, ()), {}, {"psum": 1}),
    "stored": (looped(multiplied), STORED, (D, ()), {"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1}),
    "stored, cast": (looped(multiplied), NARROW, (D, ()), {"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1}),
    "in a loop in a loop": (looped(looped(multiplied)), STORED, (D, ()), {"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1}),
    "in a checkpoint": (looped(jax.checkpoint(multiplied)), NARROW, (D, ()), {"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1}),
    "whole where a turn needs a part": (
        looped(multiplied), ((), ()), (D, T), {"scan psum": 1},
        {"scan psum": 1, "scan all_gather": 1, "psum": 1, "all_gather": 1},
    ),
    "stored where a turn needs a part": (
        looped(multiplied), STORED, (D, T), {"all_gather": 1, "scan psum": 1},
        {"all_gather": 2, "scan psum": 1, "scan all_gather": 1, "reduce_scatter": 1},
    ),
    "in parts where a turn needs all": (
        looped(summed_so_far), (T, ()), (D, ()), {"all_gather": 1}, {"all_gather": 1, "scan all_gather": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CLOSED_OVER)
def test_what_each_turn_would_gather_and_sum_is_gathered_and_summed_once(mesh, case):
    f, *ways, forward, both = CLOSED_OVER[case]
    program, given = built(mesh(**SIZES), f, [X, X], ways)
    assert (counted(program, given), counted(program, given, by=(0,))) == (forward, both)


def multiplied_before(w, x):
    return lax.scan(lambda c, row: (jnp.sin(c + row), None), (x @ w).sum(0), w)[0]


def of_one_turn(w, x):
    return lax.scan(lambda x, w: (multiplied(w, x), x), x, w.reshape(1, 8, 8))


SENT = {  # how a parameter rests that a loop goes along, and what is sent
    "further along the loop": (multiplied_before, {"column": "tensor", "store": "data"}, (D, T), {"all_gather": 1}),
    "along the loop by a word": (
        multiplied_before, {"reduction": "tensor", "store": "data"}, (T, D), {"all_gather": 2, "psum": 1},
    ),
    "along no axis of its own": (of_one_turn, {"column": "tensor", "store": "data"}, (D, T), {"all_gather": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", SENT)
def test_a_loop_goes_along_what_is_whole_whatever_other_uses_say(mesh, case):
    f, words, rests, sent = SENT[case]
    program, given = built(mesh(**SIZES), f, [X, X], [words, ((), ())])
    assert (program.in_axes[0], counted(program, given)) == (rests, sent)


@pytest.mark.parametrize("axes", [(D, ()), (T, ())])
def test_a_loop_goes_along_what_is_whole(mesh, axes):
    program, given = built(
        mesh(**SIZES), lambda xs, c: lax.scan(lambda c, x: (c + x, c), c, xs), [X, X], [axes, ((), T)]
    )
    assert counted(program, given) == {"all_gather": 1}
    assert [y.shape for y in jax.eval_shape(program, *given)] == [(8, 8), (8, 8, 8)]


def test_the_test_and_the_body_of_a_loop_each_close_over_something(mesh):
    program, given = built(mesh(**SIZES), until, [X, X], [STORED, (D, ())])
    assert counted(program, given) == {"all_gather": 1, "while all_gather": 1}
    np.testing.assert_allclose(jax.jit(program)(*given)[0], until(X, X), rtol=1e-6)


@pytest.mark.parametrize(("one", "other"), [(D, T), (T, D)])
def test_all_branches_leave_what_the_first_does(mesh, one, other):
    f = lambda number, x, y: lax.cond(number > 0, lambda x, y: x * 1, lambda x, y: y * 1, x, y)
    assert built(mesh(**SIZES), f, [X[0, 0], X, X], [(), (one, ()), (other, ())])[0].out_axes == [(other, ())]


def layers(w, xs, scale, x, unroll=1):
    return lax.scan(lambda x, each: (jnp.sin(x @ each[0]) * scale + each[1], None), x, (w, xs), unroll=unroll)[0]


S = ("stage",)
STAGED = {  # which layers each stage has, how what the loop goes along too is split, and what is sent
    "equal": ("equal", ((), ()), {"scan ppermute": 1, "psum": 1}, {"scan ppermute": 2, "psum": 3}),
    "unequal": (
        {"0..2": 0, "3": 1}, ((), ()), {"scan all_gather": 1}, {"scan all_gather": 2, "psum": 1},
    ),
    "unequal, and split over something else": (
        {"0..2": 0, "3": 1}, (T, ()), {"all_gather": 1, "scan all_gather": 1},
        {"all_gather": 1, "scan all_gather": 2, "psum": 1},
    ),
}  # fmt: skip


def staged(mesh, f, numbers, axes, **words):
    """A program of layers on two stages, of what the loop goes along too, of what it closes over, and of what it carries."""
    asked = {"train": {"microbatches": 2}, "pipeline": {"axis": "stage", "schedule": "1f1b"}}
    signals = jshard.load({
        "jshard": {"mesh": {"stage": 2, "tensor": 4}, **asked},
        "blocks": {"stage": numbers}, "a": {"row": "tensor", **words, "match": ["**"]},
    }).signals  # fmt: skip
    claim = Claim(signals["a"], "**", Stage("stage", signals["blocks"]))
    return built(mesh(stage=2, tensor=4), f, [XS, XS[:, 0], X[0], X], [claim, axes, ((),), (T, ())])


@pytest.mark.parametrize("case", STAGED)
def test_stages_that_have_their_layers_run_one_after_the_other_and_others_all(mesh, case):
    """What the layers close over has a gradient that is summed behind the loop."""
    numbers, axes, forward, both = STAGED[case]
    program, given = staged(mesh, layers, numbers, axes)
    assert (counted(program, given), counted(program, given, by=(2,))) == (forward, both)


@pytest.mark.parametrize(("unroll", "guarded"), [(1, False), (2, True), (3, True)])
def test_layers_of_a_stage_that_are_no_loop_are_kept_from_being_merged(mesh, unroll, guarded):
    """Of four layers two are on each stage."""
    f = lambda *given: layers(*given, unroll=unroll)
    program, given = staged(mesh, f, "equal", ((), ()), remat="full")
    traced = jax.make_jaxpr(jax.grad(lambda *given: program(*given)[0].sum()))(*given)
    assert {eqn.params["prevent_cse"] for eqn in equations(traced) if "prevent_cse" in eqn.params} == {guarded}


@jax.custom_jvp
def ruled(x):
    return jnp.tanh(x)


ruled.defjvp(lambda x, t: (jnp.tanh(*x), t[0] * lax.linalg.householder_product(x[0], jnp.ones(8))))


def test_in_a_derivative_that_jax_runs_later_the_claim_of_the_function_is_the_nearest(mesh):
    """What it allows is gathered there, whatever the claim allows that the program has used last."""
    words = {"a": {"row": "data", "allow": ["householder_product"]}, "b": {"row": "data"}}
    signals = jshard.load({"jshard": {"mesh": SIZES}, **words}).signals
    claims = [Claim(signals[name], name) for name in "ab"]
    program, given = built(mesh(**SIZES), lambda w, u, x: ruled(x @ w) @ u, [X] * 3, [*claims, (D, ())])
    assert counted(program, given) == {}
    assert counted(jax.jit(program), given, by=(0,)) == {"all_gather": 1, "psum": 1}


@jax.custom_vjp
def halved_backward(x, number, y):
    return number + 1, jnp.sin(x) * number * y


def halved_forward(x, number, y):
    return (number + 1, jnp.sin(x) * number * y), (x, number, y)


def halved_pull(kept, cts):
    x, number, y = kept
    return cts[1] * jnp.cos(x) * number * y / 2, np.zeros(number.shape, jax.dtypes.float0), cts[1] * jnp.sin(x) * number


halved_backward.defvjp(halved_forward, halved_pull)


def test_whole_numbers_go_through_a_derivative_of_the_models_own(mesh):
    numbers = np.arange(8, dtype=np.int32)[:, None]

    def loss(x, number, y):
        number, made = halved_backward(x, number, y)
        return (made * number).sum()

    of = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 2)))
    program, given = built(mesh(**SIZES), loss, [X, numbers, XS[0]], [(D, T), (D, ()), ((), T)])
    found, expected = of(lambda *args: program(*args)[0])(*given), of(loss)(X, numbers, XS[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


def kernel(x):
    return pl.pallas_call(lambda x, y: y.__setitem__(..., x[...]), out_shape=jax.typeof(x), interpret=True)(x)


def test_a_kernel_of_the_models_own_is_left_to_xla_where_all_is(mesh):
    jshard.load({"jshard": {"mesh": SIZES, "axis_types": "auto"}})
    program, given = built(mesh(**SIZES, axis_types="auto"), kernel, [X], [(D, ())])
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(program)(*given).eqns]
    jshard.unload()  # other tests here ask for an explicit mesh, in whichever order they run
    assert names == ["pallas_call"]


def test_of_branches_by_platform_one_is_compiled(mesh):
    """The others may be in words of a chip that is not here."""
    elsewhere = Primitive("elsewhere")
    elsewhere.def_abstract_eval(lambda x: x)
    program, given = built(
        mesh(**SIZES),
        lambda x: jnp.cos(lax.platform_dependent(x, cpu=jnp.sin, default=elsewhere.bind)),
        [X],
        [((), ())],
    )
    with jax.set_mesh(mesh(**SIZES)):
        (found,) = jax.jit(program)(*given)
    np.testing.assert_allclose(found, np.cos(np.sin(X)), rtol=1e-5)
