"""`jshard.place` to a layout: any layout to any layout, by collectives one can count."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jshard
from jshard.layers.matrix_product import Operand
from jshard.layouts import Layout
from jshard.layouts.redistribution import as_array, plan_moves, redistribute
from tests.support import cases

P = jax.P
NAMES = ("data", "tensor", "pipe")


@pytest.fixture(autouse=True)
def grid():
    with cases.loaded({"jshard": {"mesh": cases.MESHES["2x2x2"]}}) as mesh:
        yield mesh


def lies(rank):
    """Every mesh axis goes to an axis of the array, or to none, in any order."""

    def axes(drawn):
        names, places = drawn
        return tuple(
            tuple(name for name, place in zip(names, places, strict=True) if place == axis) for axis in range(rank)
        )

    return st.tuples(st.permutations(NAMES), st.tuples(*[st.integers(0, rank)] * len(NAMES))).map(axes)


PAIRS = st.integers(1, 3).flatmap(lambda rank: st.tuples(lies(rank), lies(rank)))


@pytest.mark.seconds
@given(PAIRS)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_layout_to_any_layout(pair):
    """Value, place, gradient and its place; the bytes of the ledger, of the compiled program and of the plan."""
    source, target = (Layout(jshard.mesh(), *axes) for axes in pair)
    shape = (8, 16, 24)[: source.rank]
    numbers, cotangent = cases.numbers(shape), cases.numbers(shape, 1)
    x = jax.device_put(numbers, source.sharding)
    moved = jshard.place(x, target)
    cases.assert_equal(moved, numbers)
    cases.assert_lies(moved, target.spec)

    def both(x, cotangent):
        y, pull = jax.vjp(lambda x: jshard.place(x, target), x)
        return y, *pull(cotangent)

    args = x, jax.device_put(cotangent, target.sharding)
    compiled = jax.jit(both).lower(*args).compile()
    y, gradient = compiled(*args)
    for array, expected, layout in ((y, numbers, target), (gradient, cotangent, source)):
        cases.assert_equal(array, expected)
        cases.assert_lies(array, layout.spec)
    ledger = cases.explain(both, *args)
    assert ledger.total == cases.wire_bytes(compiled)
    assert sum(line.total for line in ledger if line.phase == "forward") == Operand(source, shape, 4).moved(target)[0]
    assert all("redistribute" in line.via for line in ledger)


@pytest.mark.seconds
@given(PAIRS)
@settings(max_examples=300, deadline=None)
def test_a_plan_ends_where_it_should(pair):
    """Each step takes a mesh axis from the end of an array axis or puts one there, and no step is repeated."""
    have, want = ([list(names) for names in axes] for axes in pair)
    moves = plan_moves(*pair)
    for step in moves:
        if step.kind == "slice":
            assert not any(step.mesh_axis in names for names in have)
            have[step.axis].append(step.mesh_axis)
        elif step.kind == "all_gather":
            assert have[step.axis].pop() == step.mesh_axis
        else:
            assert have[step.source].pop() == step.mesh_axis
            have[step.axis].append(step.mesh_axis)
    assert have == want
    assert len(moves) <= 3 * len(NAMES)
    if pair[0] == pair[1]:
        assert moves == ()


def kinds(source, target):
    return [(step.kind, step.mesh_axis) for step in plan_moves(source, target)]


def test_a_plan_moves_as_little_as_it_can():
    assert kinds(((), ()), (("data",), ("tensor",))) == [("slice", "data"), ("slice", "tensor")]
    assert kinds((("data",), ()), ((), ("data",))) == [("all_to_all", "data")]
    assert kinds((("data", "tensor"), ()), (("data",), ())) == [("all_gather", "tensor")]
    assert kinds((("data", "tensor"), ()), ((), ("data",))) == [("all_gather", "tensor"), ("all_to_all", "data")]
    assert kinds((("tensor", "data"), ()), ((), ("tensor",))) == [("all_gather", "data"), ("all_to_all", "tensor")]
    gathers = [("all_gather", "tensor"), ("all_gather", "pipe")]  # of what is wanted nowhere, in the order of axes
    assert kinds((("data", "tensor"), ("pipe",)), ((), ("data",))) == [*gathers, ("all_to_all", "data")]
    # slices come before gathers, so that parts are small while they move
    assert kinds((("data",), ()), ((), ("tensor",))) == [("slice", "tensor"), ("all_gather", "data")]


# -- where it may be called --


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_out_of_jit_every_move_is_counted(axis_types):
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": axis_types}}) as mesh:
        x = cases.placed(cases.numbers((8, 16)), P("data", "tensor"))
        target = Layout(mesh, None, "tensor")
        y = jshard.place(x, target)
        cases.assert_equal(y, x)
        cases.assert_lies(y, target.spec)
        assert jshard.place(y, target) is y


def test_a_known_source_is_counted_inside_jit_on_an_auto_mesh():
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": "auto"}}) as mesh:
        source, target = Layout(mesh, "data", "tensor"), Layout(mesh, "data", None)
        x = cases.placed(cases.numbers((8, 16)), source.spec)
        known = jax.jit(functools.partial(redistribute, layout=target, source=source))
        unknown = jax.jit(functools.partial(jshard.place, to=target))
        for f, compiler in ((known, ""), (unknown, "XLA for CPU")):
            cases.assert_equal(f(x), x)
            cases.assert_lies(f(x), target.spec)
            assert [(line.count, line.compiler) for line in jshard.explain(f, x, backward=False)] == [(1, compiler)]
            assert cases.collectives_got(f.lower(x).compile()) == {("all_gather", 4): 1}
        back = jax.jit(functools.partial(redistribute, layout=source, source=target))
        cases.assert_lies(back(known(x)), source.spec)


def test_from_the_host_and_from_one_device_it_is_a_transfer():
    target = Layout(jshard.mesh(), "data", ("tensor", "pipe"))
    for x in (cases.numbers((8, 16)), jnp.asarray(cases.numbers((8, 16)))):
        y = jshard.place(x, target)
        cases.assert_lies(y, target.spec)
        np.testing.assert_array_equal(y, np.asarray(x, np.float32))


def test_an_array_of_no_layout_inside_jit_is_sliced():
    target = Layout(jshard.mesh(), "data", None)
    y = jax.jit(lambda: jshard.place(jnp.ones((8, 4)), target))()
    cases.assert_lies(y, target.spec)


def test_a_scan_of_moves_counts_by_trips():
    mesh = jshard.mesh()
    x = cases.placed(cases.numbers((8, 16)), P("data"))

    def there_and_back(x, _):
        y = jshard.place(x, Layout(mesh, None, "data"))
        return jshard.place(y, Layout(mesh, "data", None)), None

    f = lambda x: jax.lax.scan(there_and_back, x, None, length=3)[0]
    compiled = jax.jit(f).lower(x).compile()
    cases.assert_equal(compiled(x), x)
    ledger = jshard.explain(f, x, backward=False)
    assert cases.collectives_asked(ledger) == collections.Counter({("all_to_all", 2): 6})
    assert ledger.total == cases.wire_bytes(compiled)


@pytest.mark.parametrize("jit", [False, True])
def test_a_sharding_or_a_spec_in_place_of_a_layout(jit):
    mesh = jshard.mesh()
    x, target = cases.placed(cases.numbers((8, 16)), P("data")), Layout(mesh, "tensor", None)
    for layout in (jax.NamedSharding(mesh, P("tensor")), P("tensor"), P("tensor", None)):
        move = lambda x, layout=layout: jshard.place(x, layout)
        y, pull = jax.vjp(jax.jit(move) if jit else move, x)
        cases.assert_lies(y, target.spec)
        cases.assert_equal(y, x)
        cases.assert_lies(pull(y)[0], P("data", None))
        assert cases.collectives_got(jax.jit(move).lower(x).compile()) == {("all_gather", 2): 1}


def test_a_spec_is_over_the_mesh_that_is_set_then_the_loaded_then_that_of_the_array():
    loaded, rows = jshard.mesh(), jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4])
    with jax.set_mesh(rows):
        x = jshard.place([1.0, 2.0, 3.0, 4.0], P("rows"))
        assert jax.jit(lambda: jshard.place(jnp.ones(4), P("rows")))().sharding.spec == P("rows")
    assert x.sharding == jax.NamedSharding(rows, P("rows"))
    assert jshard.place(x, P("data")).sharding == jax.NamedSharding(loaded, P("data"))
    jshard.unload()
    assert jshard.place(x, P()).sharding == jax.NamedSharding(rows, P(None))


def test_lists_and_numbers_are_arrays():
    x = np.ones(2)
    assert as_array(x, label="it") is x
    y = jshard.place([1, 2, 3, 4], Layout(jshard.mesh(), "data"))
    assert (y.dtype, [shard.data.tolist() for shard in y.addressable_shards[::4]]) == (jnp.int32, [[1, 2], [3, 4]])
    assert jshard.place(2.0, P()).sharding.is_fully_replicated


TREE = "use jax.tree.map to give it each array of a tree by itself"
KINDS = 'give it a jshard.Layout, a NamedSharding or a PartitionSpec, as in jax.P("data")'
REFUSED = {
    "a word": ("abc", P(), f"takes an array, a list of numbers or a number, and was given a str; {TREE}"),
    "a tree": ({"w": 1}, P(), f"takes an array, a list of numbers or a number, and was given a dict; {TREE}"),
    "unequal lists": ([[1], [1, 2]], P(), f"takes an array, a list of numbers or a number, and was given a list; {TREE}"),
    "nothing": (1.0, None, f"was given None as layout; {KINDS}"),
    "unconstrained": ([1.0], P(P.UNCONSTRAINED), "was given P(UNCONSTRAINED,), which leaves the layout of an axis open; "
                      "name a mesh axis or None for each axis"),
    "unreduced": ([1.0], P(unreduced={"data"}), f"was given {P(unreduced={'data'})}, which leaves the layout of an axis open; "
                  "name a mesh axis or None for each axis"),
    "reduced": ([1.0], P(reduced={"data"}), "was given P(reduced={'data'}), which leaves the layout of an axis open; "
                "name a mesh axis or None for each axis"),
    "rank": (1.0, P("data"), "lays out 1 axes, but the array () has 0; give 0 axes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_array_or_no_layout(case):
    x, layout, sentence = REFUSED[case]
    with pytest.raises(jshard.JShardError) as error:
        jshard.place(x, layout)
    assert str(error.value) == f"jshard.place {sentence}"


def test_a_spec_with_no_mesh_and_a_sharding_in_memory_of_the_host():
    host = jax.NamedSharding(jshard.mesh(), P(), memory_kind="pinned_host")
    with pytest.raises(jshard.JShardError) as error:
        jshard.place([1.0], host)
    assert str(error.value) == (
        "jshard.place was given a sharding in pinned_host, but places arrays in the memory of devices; "
        "use jshard.place(x, jax.memory.Space.Host)"
    )
    jshard.unload()
    with pytest.raises(jshard.JShardError) as error:
        jshard.place([1.0], P("data"))
    assert str(error.value) == (
        "jshard.place was given P('data',), but no mesh is set or loaded; "
        "give it jax.NamedSharding(mesh, P('data',)), or call jshard.load first"
    )


def test_a_size_that_does_not_divide():
    with pytest.raises(jshard.JShardError) as error:
        jshard.place(np.ones((8, 10)), Layout(jshard.mesh(), None, ("data", "tensor")))
    assert str(error.value) == (
        'jshard.place splits axis 1 of size 10 over mesh axes "data" x "tensor" of size 4; use 8 or 12, or pad'
    )
