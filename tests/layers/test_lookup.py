"""Rules of lookups: which ask each row for something of its own, and what is found in a table that two mesh axes split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from jshard.layers import partition
from jshard.layers.partition.lookup import _by_place, _counts
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import bare, equations, makers
from jshard.signals.claims import Claim
from tests.support import cases

X, PLACES = np.arange(4 * 4 * 8.0, dtype=np.float32).reshape(4, 4, 8), np.array([3, 0, 3, 1], np.int32)


def at(*columns):
    """A lookup of one number for each row of indices."""

    def f(x, i):
        made = [column(i).astype(np.int32)[:, None] for column in columns]
        return look_up(x, lax.concatenate(made, 1), tuple(range(len(columns))))

    return f


def look_up(x, indices, axes, **how):
    kept = tuple(axis for axis in range(x.ndim) if axis not in axes)
    numbers = lax.GatherDimensionNumbers(tuple(range(1, 1 + len(kept))), axes, axes)
    sizes = [x.shape[axis] if axis in kept else 1 for axis in range(x.ndim)]
    return lax.gather(x, indices, numbers, sizes, indices_are_sorted=True, **how)


count = lambda i: lax.iota(np.int32, 4)
count_rows = lambda i: lax.broadcasted_iota(np.int32, (2, 2), 0)
given = lambda i: i
BY_PLACE = {  # and the axes of the table that have a place of their own for each row
    "its own": (at(count, given), (0,)),
    "behind what is given": (at(given, count), (1,)),
    "counted from the end": (lambda x, i: x[jnp.arange(4), i], (0,)),
    "the same twice": (at(count, count, given), (0,)),
    "none": (at(given, given), None),
    "all": (at(count, count), (0,)),
    "one column": (lambda x, i: look_up(x, i[:, None], (0,)), None),
    "of fewer rows": (at(lambda i: lax.iota(np.int32, 2), lambda i: i[:2]), None),
    "reversed": (at(lambda i: 3 - count(i), given), None),
    "above 0": (at(lambda i: lax.select(count(i) > 0, count(i), count(i)), given), None),
    "below 1": (at(lambda i: lax.select(count(i) < 1, 3 - count(i), count(i)), given), None),
    "below -1": (at(lambda i: lax.select(count(i) < -1, 3 - count(i), count(i)), given), None),
    "below what is given": (at(lambda i: lax.select(count(i) < i, 3 - count(i), count(i)), given), None),
    "of a mask that is given": (at(lambda i: lax.select(i < 0, 3 - count(i), count(i)), given), None),
    "joined of two and one": (lambda x, i: look_up(x, jnp.concatenate([jnp.stack([i, i], 1), count(i)[:, None]], 1), (0, 1, 2)), None),
    "counted along two axes": (lambda x, i: look_up(x, lax.concatenate([each.reshape(2, 2, 1) for each in (count(i), i)], 2), (0, 1)), None),
    "joined along rows": (lambda x, i: look_up(x[:2], lax.concatenate([count_rows(i), count_rows(i)], 0), (0, 1)), None),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_PLACE)
def test_rows_that_have_a_place_of_their_own_are_looked_up_apart(case):
    f, axes = BY_PLACE[case]
    jaxpr = bare(jax.make_jaxpr(f)(X, PLACES))
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "gather"]
    found = _by_place(jaxpr, eqn)
    if axes is None:
        assert found is None
        return
    *_, rewritten = bare(found).eqns
    numbers = rewritten.params["dimension_numbers"]
    assert numbers.operand_batching_dims == axes
    assert not rewritten.params["indices_are_sorted"]
    assert not set(axes) & {*numbers.collapsed_slice_dims, *numbers.start_index_map}


def test_an_axis_that_two_mesh_axes_split_is_that_of_the_whole_array(mesh):
    """Each device knows its place among all: in a table, in a mask and in random numbers."""
    on, split = mesh(data=2, tensor=4), (("data", "tensor"), ())
    x, places = np.arange(1.0, 33, dtype=np.float32).reshape(8, 4), np.array([-5, -1, 0, 3, 4, 7, 8, 12], np.int32)

    def f(x, places):
        found = [look_up(x, places[:, None], (0,), mode=mode, fill_value=3.0) for mode in ("fill", "clip")]
        return *found, jnp.tril(x), jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)

    program = partition.Program(on, jax.make_jaxpr(f)(x, places), [partition.Input(split), partition.Input(((),))])
    with jax.set_mesh(on):
        got = jax.jit(program)(jax.device_put(x, Layout(on, *split).sharding), places)
    for one, other in zip(got, f(x, places), strict=True):
        np.testing.assert_array_equal(one, other)


def looked_up(on, words, rows, split, f=lambda w, i: w[i]):
    """The collectives of a lookup in a table of 40 words, each under the key that asks for it."""
    loaded = jshard.load({"jshard": {"mesh": dict(on.shape)}, "a": {**words, "match": ["**"]}})
    table, places = np.ones((40, 16), np.float32), np.zeros(rows, np.int32)
    inputs = [partition.Input(claim=Claim(loaded.signals["a"], "**"), path="w"), partition.Input(split)]
    program = partition.Program(on, jax.make_jaxpr(f)(table, places), inputs)
    given = [
        jax.device_put(each, Layout(on, *axes).sharding)
        for each, axes in zip((table, places), program.in_axes, strict=True)
    ]
    return program, cases.keys_of_collectives(jax.make_jaxpr(program)(*given))


ROWS, WHOLE = (("data",),), ((),)
TRAVELS, GATHERED = ["all_gather", "all_to_all"], ["all_gather"]
STORED = {  # the mesh, the word that splits the words, the rows and how they are split; what is moved then
    "few rows": ({"data": 4, "tensor": 2}, "reduction", 16, ROWS, TRAVELS),
    "over two devices": ({"data": 2, "tensor": 4}, "reduction", 8, ROWS, TRAVELS),
    "over one device": ({"data": 1, "tensor": 4}, "reduction", 8, ROWS, []),
    "a row less than its numbers": ({"data": 4, "tensor": 2}, "reduction", 76, ROWS, TRAVELS),
    "as many as its numbers": ({"data": 4, "tensor": 2}, "reduction", 80, ROWS, GATHERED),
    "rows that all devices ask for": ({"data": 4, "tensor": 2}, "reduction", 16, WHOLE, GATHERED),
    "words that are stored": ({"data": 4, "tensor": 2}, "column", 16, ROWS, GATHERED),
}


@pytest.mark.parametrize("case", STORED)
def test_answers_travel_where_they_are_fewer_than_what_would_be_gathered(mesh, case):
    sizes, word, rows, split, moved = STORED[case]
    _, found = looked_up(mesh(**sizes), {"row": "data", word: "tensor", "store": "data"}, rows, split)
    assert [name for name, key in found if key == "store"] == moved


READ = {  # how a table is used; what is moved then
    "frozen": (lambda w, i: lax.stop_gradient(w)[i], TRAVELS),
    "and multiplied": (lambda w, i: w[i] @ w.T, GATHERED),
}


@pytest.mark.parametrize("case", READ)
def test_a_table_is_looked_up_where_it_rests_unless_something_else_reads_it(mesh, case):
    f, moved = READ[case]
    _, found = looked_up(mesh(data=4, tensor=2), {"row": "data", "reduction": "tensor", "store": "data"}, 16, ROWS, f)
    assert [name for name, key in found if key == "store"] == moved


def test_answers_are_scattered_as_the_sequence_of_the_table_says(mesh):
    words = {"reduction": "tensor", "sequence": "tensor"}
    program, found = looked_up(mesh(data=2, tensor=4), words, (2, 8), ((), ()))
    assert program.out_axes == [((), ("tensor",), ())]
    assert found == [("reduce_scatter", "sequence")]


COUNTS = {  # how an iota is shaped; the axis along which it counts then
    "rows": (lambda i: jnp.broadcast_to(i[:, None], (4, 4)), 0),
    "columns": (lambda i: jnp.broadcast_to(i[None], (4, 4)), 1),
    "behind": (lambda i: jnp.broadcast_to(i[:, None, None], (4, 4, 4)).reshape(4, 4, 2, 2), 0),
    "two axes in one": (lambda i: jnp.broadcast_to(i[:, None], (4, 4)).reshape(16), None),
}


@pytest.mark.parametrize("case", COUNTS)
def test_it_is_known_along_which_axis_an_array_counts(case):
    f, axis = COUNTS[case]
    program = jax.make_jaxpr(lambda: f(lax.iota(np.int32, 4)))().jaxpr
    assert _counts(makers(program), program.outvars[0]) == axis


def test_places_that_are_moved_into_a_devices_part_are_not_told_to_be_sorted_or_distinct(mesh):
    """What is not here is looked up in a row that is: the gradient of that row would be added to as if it were alone."""
    f = lambda x, i: look_up(x, i, (0,), unique_indices=True)
    for way, distinct in ((("data",), ()), False), (((), ("data",)), True):
        inputs = [partition.Input(way), partition.Input(((), ()))]
        program = partition.Program(mesh(data=4), jax.make_jaxpr(f)(X[0], PLACES[:, None]), inputs)
        given = jax.device_put(X[0], Layout(mesh(data=4), *way).sharding)
        (eqn,) = [
            each
            for each in equations(jax.make_jaxpr(program)(given, PLACES[:, None]))
            if each.primitive is lax.gather_p
        ]
        assert (eqn.params["unique_indices"], eqn.params["indices_are_sorted"]) == (distinct, distinct)
