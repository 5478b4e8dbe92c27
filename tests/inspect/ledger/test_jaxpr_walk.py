"""What is read from a jaxpr whatever it computes; the collectives of whole programs are in test_ledger.py."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jshard.inspect.ledger.jaxpr_walk import Around, _collective, has_transposed, scopes_in, walk
from jshard.programs.provenance import scope

X = np.ones(3, np.float32)


def under_a_name(x):
    with jax.named_scope("transpose"):
        return jnp.sin(x)


@pytest.mark.parametrize(
    ("f", "found"),
    [
        (jnp.sin, False),
        (under_a_name, False),
        (jax.vmap(jnp.sin), False),
        (lambda x: jax.jvp(jnp.sin, (x,), (x,)), False),
        (jax.grad(lambda x: jnp.sin(x).sum()), True),
        (jax.jit(jax.grad(lambda x: jnp.sin(x).sum())), True),
    ],
    ids=["plain", "a name", "vmap", "jvp", "grad", "grad in jit"],
)
def test_a_backward_pass_is_seen(f, found):
    assert has_transposed(jax.make_jaxpr(f)(X).jaxpr) is found


def test_scopes_are_found_in_calls_in_calls():
    def f(x):
        with scope(signal="a"):
            return jax.jit(inner)(x)

    def inner(x):
        with scope(signal="b"):
            return jnp.sin(x)

    assert scopes_in(jax.make_jaxpr(f)(X)) >= {("a",), ("a", "b")}


def test_operations_of_any_name_hold_no_collectives():
    assert list(walk(jax.make_jaxpr(lambda x: x ^ x)(X > 0).jaxpr)) == []


def test_a_loop_over_ticks_counts_what_its_table_says(mesh):
    """And as often as the loop itself runs: here twice."""

    def taken(x, times):
        with scope(times=times, turns="5"):
            return lax.cond(x.sum() > 0, lambda x: x * lax.psum(x, "data"), jnp.sin, x)

    def tick(x, _):
        x = taken(taken(x, "3 2"), "0")
        with scope(times="6", each="4"):
            return x + lax.psum(x, "data"), None

    def loop(x, _):
        return lax.scan(tick, x, None, length=5)

    body = lambda x: lax.scan(loop, x, None, length=2)[0]
    spread = jax.shard_map(
        body, mesh=mesh(data=8, axis_types="auto"), in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False
    )
    lines = list(walk(jax.make_jaxpr(spread)(np.ones(8, np.float32)).jaxpr))
    assert [(line.count, line.each, line.branches) for line in lines] == [(6, None, ()), (12, 8, ())]


@pytest.fixture
def lines(mesh):
    """The collectives of `body` on each device, or of what `f` makes of that."""

    def found(body, f=lambda spread, x: spread(x)):
        spread = jax.shard_map(
            body, mesh=mesh(data=8, axis_types="auto"), in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False
        )
        return list(walk(jax.make_jaxpr(lambda x: f(spread, x))(np.ones(8, np.float32)).jaxpr))

    return found


def summed(x):
    return lax.psum(x, "data")


def test_a_table_outside_of_loops_counts_once(lines):
    (line,) = lines(scope(times="3", each="2")(summed))
    assert (line.count, line.each) == (3, 2)


def test_the_larger_side_of_a_collective_is_told(lines):
    found = lines(lambda x: lax.psum_scatter(lax.all_gather(x, "data", tiled=True), "data", tiled=True))
    assert [(line.collective, line.shape, line.payload) for line in found] == [
        ("all_gather", (8,), 32),
        ("reduce_scatter", (8,), 32),
    ]


def test_branches_are_counted_from_one(lines):
    found = lines(lambda x: lax.cond(x.sum() > 0, summed, lambda x: summed(-x), x))
    assert [line.branches for line in found] == [("branch 1 of 2",), ("branch 2 of 2",)]


def test_a_name_that_a_checkpoint_gives_says_nothing_elsewhere(lines):
    named = jax.named_scope("rematted_computation")
    for line in (*lines(named(summed)), *lines(summed, named(lambda spread, x: spread(x)))):
        assert not line.cause.remat


def test_the_line_is_the_outermost_in_a_signal(lines):
    def called(spread, x):
        with scope(signal="b"):
            return spread(x)

    def f(spread, x):
        with jax.named_scope("no signal"):
            return jax.jit(called, static_argnums=0)(spread, x)

    def g(spread, x):
        with scope(signal="a"):
            return jax.jit(called, static_argnums=0)(spread, x)

    for each, found in ((f, called), (g, g)):
        (line,) = lines(summed, each)
        assert line.cause.source == f"test_jaxpr_walk.py:{found.__code__.co_firstlineno + 2}"


def test_a_sum_over_axes_of_an_array_is_no_collective():
    x = types.SimpleNamespace(aval=jax.core.ShapedArray((3,), X.dtype))
    eqn = types.SimpleNamespace(primitive=lax.psum_p, params={"axes": (0,)}, invars=[x], outvars=[x])
    assert list(_collective(eqn, Around())) == []


def test_groups_of_a_mesh_axis_are_as_many_devices_as_each_has(lines):
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    (line,) = lines(lambda x: lax.all_gather(x, "data", axis_index_groups=halves, tiled=True))
    assert (line.group, line.payload, line.wire) == (4, 16, 12)
