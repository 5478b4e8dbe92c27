"""What the partition chooses where operands are split in different ways, what it puts off, and who is told to ask for what it
sends. Nothing is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.programs.jaxprs import equations
from tests.support import cases
from tests.support.partitioned import built, counted

SIZES = {"data": 2, "tensor": 4}
D, T = ("data",), ("tensor",)
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
XS, V = np.stack([X, X + 1]), X[0]
ROWS, STORED = {"row": "data"}, {"row": "data", "store": "data"}
row = lambda x: jnp.expand_dims(x, 0)
wide = lambda x: jnp.broadcast_to(x, (8, 8))
twice = lambda x: jnp.broadcast_to(x, (2, 8))
narrow = lambda x: x.astype(jnp.bfloat16)


def three(x, y, z):
    return x * y + z


def both_multiplied(w, u, x):
    return (x @ w).sum() + (x @ u).sum() + w * u


CHOSEN = {  # operands, how they are split, how the result is, and what is sent
    "what is put off comes last": (lambda b, x: wide(b) * x, [V, X], [(D,), (D, ())], (D, ()), {"all_gather": 1}),
    "of what is put off nothing is kept": (lambda b, x: wide(b) * x, [V, X], [(D,), ((), T)], ((), T), {"all_gather": 1}),
    "of parameters neither": (
        both_multiplied, [X, X, X], [{"column": "tensor"}, {"column": "data"}, ((), ())], ((), D), {"all_gather": 1},
    ),
    "what moves over stays, behind what is made of numbers too": (
        lambda x, y: lax.select(lax.broadcasted_iota(int, (8, 8), 0) < 3, x, y), [X, X], [((), T), ((), D)], (T, D),
        {"all_to_all": 1},
    ),
    "nothing moves to an axis that is summed": (
        lambda x, y: jnp.einsum("ab,ab->b", x, y), [X, X], [((), T), ((), D)], (D,), {"all_gather": 1},
    ),
    "nor to one that is fixed": (
        lambda x, y: jnp.concatenate([x, y], 0), [X, X], [((), T), ((), D)], ((), D), {"all_gather": 1},
    ),
    "what stands behind moves to where the first is": (
        three, [X, X, X], [(D, ()), (T, ()), ((), ("data", "tensor"))], (("data", "tensor"), ()), {"all_to_all": 1, "all_gather": 2},
    ),
    "what was moved before is taken as it lies there": (
        lambda x, y: (x + y) * (y - x), [X, X], [(D, ()), ((), D)], (D, ()), {"all_to_all": 1},
    ),
    "of no elements": (lambda x: x.sum(0), [X[:0]], [(D, ())], ((),), {"psum": 1}),
    "a maximum by no kernel": (
        lambda w, x: jax.nn.softmax(x @ w), [X, X], [{"column": "tensor", "kernel": {"all_reduce": "permute"}}, ((), ())],
        ((), T), {"pmax": 1, "ppermute": 6},
    ),
    "stored, and gathered before branches": (
        lambda w, x: lax.cond(x[0, 0] > 0, lambda w, x: x @ w, lambda w, x: x + w, w, x), [X, X], [STORED, ((), ())],
        ((), ()), {"all_gather": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOSEN)
def test_an_operation_is_split_by(mesh, case):
    f, args, ways, axes, sent = CHOSEN[case]
    program, given = built(mesh(**SIZES), f, args, ways)
    assert (program.out_axes, counted(program, given)) == ([axes], sent)


def joined(*some):
    return jnp.concatenate(list(map(row, some)), 0)


PUT_OFF = {  # what is made of arrays that all devices have, before it meets rows; how many sums its gradient takes
    "two": (lambda b, c, x: row(b) * row(c) * x, [(), ()], {"psum": 1}),
    "of which one is a parameter": (lambda b, c, x: row(b) * row(c) * x, [ROWS, ()], {"psum": 1}),
    "of which one is stored": (
        lambda b, c, x: row(b) * row(c) * x, [STORED, ()], {"all_gather": 2, "psum": 1, "reduce_scatter": 1},
    ),
    "more than both": (lambda b, c, x: jnp.concatenate([row(b), jnp.broadcast_to(c, (7, 8))], 0) * x, [(), ()], {"psum": 2}),
    "as many as both": (lambda b, c, x: joined(b, c)[:, None] * x, [(), ()], {"psum": 1}),
    "more than both, with numbers": (
        lambda b, c, x: jnp.concatenate([row(b), row(c), lax.broadcasted_iota(np.float32, (1, 1), 0)], 1)[:, :8] * x, [(), ()], {"psum": 2},
    ),
    "as many as both, chosen by numbers": (
        lambda b, c, x: lax.select(lax.broadcasted_iota(int, (2, 8), 0) < 1, twice(b), twice(c))[:1] * x, [(), ()], {"psum": 1},
    ),
    "one axis more": (lambda b, c, x: jnp.expand_dims(b * row(c), 1) * x, [(), ()], {"psum": 1}),
    "three, and less": (lambda b, c, d, x: joined(b, c, d)[:1] * x, [(), (), ()], {"psum": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", PUT_OFF)
def test_what_is_put_off_has_its_gradient_summed_where_that_is_least(mesh, case):
    f, ways, sums = PUT_OFF[case]
    x = (XS, ((), D, ())) if case == "as many as both" else (X, (D, ()))
    ways = [way or ((),) for way in ways]
    program, given = built(mesh(**SIZES), f, [*[V] * len(ways), x[0]], [*ways, x[1]])
    assert counted(program, given, by=range(len(ways))) == sums


SPLIT, SUMMED = {"column": "tensor", "store": "data"}, {"reduction": "tensor"}
RESTING = {  # what a product reads of a parameter of 8 by 8, or of a vector; how it rests, and what is sent for its gradient too
    "a copy": (lambda w, x: x @ jnp.copy(w), SUMMED, X, (T, ()), {"psum": 1}),
    "a cast": (lambda w, x: narrow(x) @ narrow(w) + narrow(x) * narrow(w), SPLIT, X, (D, T), {"all_gather": 1}),
    "columns that divide": (lambda w, x: x @ w[:, :4], SPLIT, X, (D, T), {"all_gather": 1, "ppermute": 4}),
    "columns that do not": (lambda w, x: x @ w[:, 2:4], SPLIT, X, (D, ()), {"all_gather": 1}),
    "columns, and no word": (lambda w, x: x @ w[:, :4], ROWS, X, ((), ()), {}),
    "one row": (lambda w, x: x @ w[0], SPLIT, X, ((), D), {"all_gather": 1}),
    "one row of some": (lambda w, x: x @ w[:1].reshape(8), SPLIT, X, ((), D), {"all_gather": 1}),
    "heads": (lambda w, x: jnp.einsum("bc,chd->bhd", x, w.reshape(8, 2, 4)), SPLIT, X, (D, ()), {"all_gather": 1}),
    "heads, where rows have a word": (
        lambda w, x: jnp.einsum("bc,chd->bhd", x, w.reshape(8, 2, 4)), SUMMED, X, ((), ()), {},
    ),
    "heads, three axes": (lambda w, x: jnp.einsum("bc,chde->bhde", x, w.reshape(8, 2, 2, 2)), SPLIT, X, (D, ()), {"all_gather": 1}),
    "rows in two axes": (lambda w, x: jnp.einsum("xac,bc->bxa", w.reshape(4, 2, 8), x), SUMMED, X, ((), ()), {}),
    "half of a vector": (lambda w, x: x[:, :4] * w[:4], SPLIT, V, (D,), {"all_gather": 1}),
    "half of a vector of two": (lambda w, x: x[:, :1] * w[:1], SPLIT, V[:2], (D,), {"all_gather": 1}),
    "a vector of one": (lambda w, x: x * w.reshape(()), ROWS, V[:1], ((),), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", RESTING)
def test_a_parameter_rests_as_its_shape_in_use_tells(mesh, case):
    f, words, w, rests, sent = RESTING[case]
    program, given = built(mesh(**SIZES), f, [w, X], [words, ((), ())])
    assert (program.in_axes[0], counted(program, given, by=(0,))) == (rests, sent)


def test_a_copy_of_a_parameter_is_one_still(mesh):
    program, given = built(mesh(**SIZES), RESTING["a copy"][0], [X, X], [SUMMED, ((), ())])
    assert cases.keys_of_collectives(jax.make_jaxpr(program)(*given)) == [("psum", "reduction")]


def test_a_place_that_one_use_decides_is_that_of_another_use(mesh):
    """Of a copy made before: what it is multiplied by is split as it is."""
    words = {"row": "data", "column": "tensor"}
    f = lambda w, b, x: (lambda copied: x @ w + x @ (copied * b))(jnp.copy(w))
    program, given = built(mesh(**SIZES), f, [X, V, X], [words, words, (D, ())])
    assert (program.in_axes[1], counted(program, given, by=(0, 1))) == ((T,), {"psum": 2})


def test_of_one_number_the_gradient_is_summed_as_it_lies(mesh):
    program, given = built(mesh(**SIZES), lambda w, x: x * w.reshape(()), [V[:1], X], [ROWS, (D, ())])
    assert counted(program, given, by=(0,)) == {"psum": 1}


def test_what_is_no_parameter_is_cast_where_it_is_written(mesh):
    program, given = built(mesh(**SIZES), lambda x: narrow(x) + jnp.sin(narrow(x)), [X], [(D, ())])
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(program)(*given))]
    assert names.count("convert_element_type") == 2


UNREDUCED = {  # what stands between a product and a sum with what is split; what is sent for the gradient
    "an operation": (jnp.sin, {"psum": 2}),
    "a function with a derivative of its own": (jax.nn.relu, {"psum": 2}),
    "a loop": (lambda y: lax.scan(lambda y, _: (jnp.sin(y), None), y, length=2)[0], {"psum": 2, "all_gather": 1}),
    "a branch": (lambda y: lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, y), {"psum": 3, "all_gather": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREDUCED)
def test_a_gradient_stays_unreduced_through(mesh, case):
    f, sent = UNREDUCED[case]
    args, words = [np.ones((4, 8), np.float32)] * 2, [ROWS, {"row": "data", "column": "tensor"}]
    rows = np.ones((64, 4), np.float32)
    program, given = built(mesh(**SIZES), lambda w, u, x: f(x @ w) + x @ u, [*args, rows], [*words, (D, ())])
    assert counted(program, given, by=(0, 1)) == sent


SEQUENCE = {"reduction": "tensor", "sequence": "tensor"}
ASKED_BY = {  # what is made of a product that `sequence` scatters; which key asks for the move
    "sequence": (lambda w, x: jnp.sort(x @ w, 1), ((), (), ()), "sequence"),
    "another mesh axis": (lambda w, x: jnp.sort(x @ w, 0), (D, (), ()), ""),
}


@pytest.mark.parametrize("case", ASKED_BY)
def test_sequence_asks_for_what_it_has_scattered_alone(mesh, case):
    f, axes, key = ASKED_BY[case]
    program, given = built(mesh(**SIZES), f, [X, XS], [{**SEQUENCE, "row": "data"}, axes])
    assert cases.keys_of_collectives(jax.make_jaxpr(program)(*given)) == [
        ("reduce_scatter", "sequence"), ("all_gather", key),
    ]  # fmt: skip


def test_over_one_device_a_sum_is_told_from_what_is_none(mesh):
    program, given = built(mesh(data=1, tensor=1), lambda x: (x.sum(0), x.max(0), x.min(0)), [X], [(D, ())])
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(program)(*given))]
    assert (names.count("one_device_sum"), names.count("one_device_cast")) == (1, 2)
    assert counted(program, given) == {}
    assert [y.shape for y in jax.eval_shape(program, *given)] == [(8,)] * 3


def test_an_axis_of_one_element_over_one_device_may_be_squeezed(mesh):
    program, given = built(mesh(data=1, tensor=1), lambda x: (x[:, 0], lax.squeeze(x[:1], (0,))), [X], [(D, T)])
    assert [y.shape for y in jax.eval_shape(program, *given)] == [(8,)] * 2


def test_the_body_of_a_loop_is_read_once_to_find_how_all_is_split(mesh):
    step = lambda x: lax.linalg.householder_product(x, jnp.ones(8))
    program, _ = built(mesh(**SIZES), lambda x: lax.scan(lambda x, _: (step(x), None), x, length=2)[0], [X], [((), ())])
    assert program.unruled == {"householder_product": 1}


def cut_behind(w, x, b):
    return [jnp.sin(each) for each in jnp.split(x @ w, 3, axis=1)]


def cut_behind_a_bias(w, x, b):
    y = x @ w
    return [jnp.sin(each) for each in jnp.split(y + lax.cumsum(b), 3, axis=1)]


@pytest.mark.parametrize("f", [cut_behind, cut_behind_a_bias])
@pytest.mark.parametrize(("kernel", "sent"), [({"column": "tensor"}, (8, 4)), (((), T), (4, 4))])
def test_where_a_product_is_cut_pieces_of_a_parameter_are_sent_and_else_of_the_result(mesh, f, kernel, sent):
    program, given = built(
        mesh(**SIZES), f, [np.ones((8, 48), np.float32), X, np.ones(48, np.float32)], [kernel, (D, ()), ((),)]
    )
    permutes = [eqn for eqn in equations(jax.make_jaxpr(program)(*given)) if eqn.primitive.name == "ppermute"]
    assert [eqn.invars[0].aval.shape for eqn in permutes] == [sent] * 2
    assert program.out_axes == [(D, T)] * 3


def test_of_a_vector_of_one_number_it_is_told_what_uses_the_number(mesh):
    program, _ = built(mesh(**SIZES), lambda w, x: jnp.squeeze(w) * x, [X[0, :1], X], [{"column": "tensor"}, (D, ())])
    assert program.placed["p0"].told_by.primitive.name == "mul"


@pytest.mark.parametrize(
    ("f", "first", "cut"),
    [
        (lambda y, z, s: jnp.sin(y * z) + s, X[:, :1], (1, 2)),  # one of the two that make a larger one
        (lambda y, z, s: jnp.sin(y + z) * s, X, (8, 2)),  # together they are more than what they make
    ],
)
def test_what_is_needed_in_parts_is_made_of_parts_where_these_are_less(mesh, f, first, cut):
    program, given = built(mesh(**SIZES), f, [first, X[:1], X], [((), ()), ((), ()), ((), T)])
    cuts = [eqn for eqn in equations(jax.make_jaxpr(program)(*given)) if eqn.primitive.name == "dynamic_slice"]
    assert [eqn.outvars[0].aval.shape for eqn in cuts] == [cut]


def test_places_that_are_made_count_as_no_numbers(mesh):
    f = lambda y, s: row(y) * lax.broadcasted_iota(jnp.float32, (1, 8, 8), 2) + s
    program, given = built(mesh(**SIZES), f, [X, jnp.stack([X, X])], [((), ()), (D, (), ())])
    (product,) = [eqn for eqn in equations(jax.make_jaxpr(program)(*given)) if eqn.primitive.name == "mul"]
    assert not product.outvars[0].aval.mat.varying  # it has no more than y: its gradient is summed, not y's
