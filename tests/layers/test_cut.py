"""Cuts along a split axis: devices send each other what their parts of the pieces are made of, in few rounds."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard.layers import partition
from jshard.layers.partition.cut import cut, sent
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import equations
from jshard.programs.provenance import said
from jshard.signals.claims import Claim

DEVICES = 4
CASES = {  # of 48 elements, 12 on a device
    "halves": [range(24), range(24, 48)],
    "thirds": [range(16), range(16, 32), range(32, 48)],
    "all": [range(48)],
    "moved by three": [range(3, 43)],
    "a few of the last": [range(40, 48)],
    "several of several sizes": [range(4), range(4, 24), range(24, 36), range(36, 48)],
    "of the last, then of the first": [range(44, 48), range(20)],
    "of the first, then of the last": [range(20), range(44, 48)],
    "twice the same": [range(8), range(8)],
    "two that overlap": [range(9, 37), range(11, 43)],
}


@pytest.mark.parametrize("case", CASES)
def test_each_element_of_a_piece_is_sent_once_to_the_device_whose_it_is(case):
    ranges = CASES[case]
    found = sent(ranges, 12, DEVICES)
    travels = [some for some in found if some[0].source != some[0].target]
    ends = [end for some in travels for one in some for end in (("from", one.source), ("to", one.target))]
    most = max(collections.Counter(ends).values(), default=0)  # no device is in a round twice
    assert most <= len(travels) <= most + (len({len(some) for some in ranges}) > 1)
    got = np.full((DEVICES, sum(map(len, ranges)) // DEVICES), -1)
    for some in found:
        assert len({one.source for one in some}) == len({one.target for one in some}) == len(some)
        assert len({one.source == one.target for one in some}) == 1  # what stays is not sent
        assert some[0].size == max(one.size for one in some)
        for one in some:
            assert (got[one.target, one.put : one.put + one.size] == -1).all()
            got[one.target, one.put : one.put + one.size] = 12 * one.source + one.taken + np.arange(one.size)
    np.testing.assert_array_equal(got, np.concatenate([np.reshape(some, (DEVICES, -1)) for some in ranges], 1))


@pytest.mark.seconds
def test_pieces_are_those_of_the_whole_array(mesh):
    on = mesh(data=2, tensor=DEVICES)
    x = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)

    def every(x):
        return [cut(x, 0, ("tensor",), ranges, DEVICES) for ranges in CASES.values()]

    spec = Layout(on, "tensor", None).spec
    mapped = jax.shard_map(every, mesh=on, in_specs=spec, out_specs=spec)

    def weighed(x):
        found = jax.tree.leaves(mapped(x))
        weights = [jnp.cos(jnp.arange(1.0, 1 + y.size)).reshape(y.shape) for y in found]
        return sum(
            (jnp.sum(y * jax.sharding.reshard(w, jax.typeof(y).sharding)) for y, w in zip(found, weights, strict=True)),
            jnp.zeros(()),
        ), found

    with jax.set_mesh(on):
        gradient, found = jax.jit(jax.grad(weighed, has_aux=True))(
            jax.device_put(x, Layout(on, "tensor", None).sharding)
        )
    at, wanted = 0, np.zeros_like(x)
    for ranges in CASES.values():
        for some in ranges:
            np.testing.assert_array_equal(found[at], x[some.start : some.stop])
            wanted[some.start : some.stop] += np.cos(np.arange(1.0, 1 + 3 * len(some))).reshape(-1, 3)
            at += 1
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_pieces_are_put_together_in_as_much_room_as_they_need(mesh):
    """Beside the pieces there is room for the longest run that is sent, at both ends."""
    on = mesh(data=2, tensor=DEVICES)
    spec = Layout(on, "tensor", None).spec
    x = jax.device_put(np.zeros((48, 3), np.float32), Layout(on, "tensor", None).sharding)
    for case, room in (("halves", 12 + 2 * 6), ("a few of the last", 2 + 2 * 2)):
        f = lambda x, case=case: cut(x, 0, ("tensor",), CASES[case], DEVICES)
        jaxpr = jax.make_jaxpr(jax.shard_map(f, mesh=on, in_specs=spec, out_specs=spec))(x)
        made = [eqn.outvars[0].aval.shape for eqn in equations(jaxpr) if eqn.primitive.name == "broadcast_in_dim"]
        assert (room, 3) in made


def cut_twice(w, x):
    return x @ w, x[:, :1] * w[:, :8], x[:, 1:2] * w[:, :8], w[:4] * 2


@pytest.mark.parametrize(
    ("words", "asked", "summed"),
    [
        ({"column": "tensor", "reduction": "data"}, ["column", "column", "reduction"], [(8, 6)]),
        ({"column": "data", "reduction": "tensor"}, ["column", "reduction", "reduction"], [(8, 12)]),
        ({"column": "tensor", "row": "data"}, ["column", "column"], [(8, 6)]),
    ],
)
def test_a_parameter_is_cut_under_the_word_that_splits_it_and_once_for_all_its_uses(mesh, words, asked, summed):
    on, (w, x) = mesh(data=2, tensor=4), (np.ones((8, 24), np.float32), np.ones((8, 8), np.float32))
    signals = jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}}, "a": {**words, "match": ["**"]}}).signals
    inputs = [partition.Input(claim=Claim(signals["a"], "**"), path="w"), partition.Input((signals["a"].row, ()))]
    program = partition.Program(on, jax.make_jaxpr(cut_twice)(w, x), inputs)
    assert program.in_axes[0] == (signals["a"].reduction, signals["a"].column)
    given = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=Layout(on, *axes).sharding)
        for each, axes in zip((w, x), program.in_axes, strict=True)
    ]
    with jax.set_mesh(on):
        there = jax.make_jaxpr(program)(*given)
        back = jax.make_jaxpr(jax.grad(lambda *args: sum(jnp.sin(y).sum() for y in program(*args))))(*given)
    sends = [eqn for eqn in equations(there) if eqn.primitive.name == "ppermute"]
    assert [said(eqn.source_info.name_stack.stack, "key") for eqn in sends] == asked
    sums = [eqn.invars[0].aval.shape for eqn in equations(back) if eqn.primitive.name.startswith("psum")]
    assert [shape for shape in sums if shape] == summed
