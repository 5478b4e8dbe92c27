"""How a part of an array comes to where an operation needs it: in which dtype, over what its gradient is summed, and by which
algorithm. Nothing is compiled."""

from __future__ import annotations

import collections
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jshard
from jshard.kernels import select_algorithm
from jshard.layers import partition
from jshard.layers.partition import part, value
from jshard.layers.partition.value import Parameter, Unplaced, Value
from jshard.layouts.layout import Layout
from jshard.programs.jaxprs import equations
from jshard.signals.claims import Claim
from tests.support.partitioned import KINDS, built, counted

SIZES = {"data": 2, "tensor": 4}
D, T = ("data",), ("tensor",)
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
WS = np.stack([X, X])
narrow = lambda x: x.astype(jnp.bfloat16)


def sent(program, given, by=()):
    """The collectives of a program, and of its gradient, with their shapes and dtypes, and how many casts there are."""
    step = program if not by else jax.grad(lambda *xs: sum(jnp.sin(y).sum().astype(float) for y in program(*xs)), by)
    found = collections.Counter()
    for eqn in equations(jax.make_jaxpr(step)(*given)):
        name, of = eqn.primitive.name.removesuffix("_invariant"), [*eqn.invars, *eqn.outvars][0].aval
        if name in KINDS and of.shape:
            found[f"{name} {of.dtype} {'x'.join(map(str, of.shape))}"] += 1
        if name == "convert_element_type" and of.shape:
            found[f"{of.dtype} to {eqn.outvars[0].aval.dtype}"] += 1
    return dict(found)


half = lambda x: x.astype(jnp.float16)
MASTERS = {"row": "data", "dtype": {"compute": "bfloat16", "reduce": "float32"}}
STORED = {**MASTERS, "store": "data"}
NARROW = np.dtype(jnp.bfloat16)
SENT = {  # a program of a parameter and rows, what is said of it, how rows are split; what is sent for both gradients, and cast
    "cast by the program": (
        lambda w, x: narrow(w) * narrow(x), MASTERS, (D, T),
        {"float32 to bfloat16": 4, "bfloat16 to float32": 3, "all_gather float32 4x2": 1, "all_gather float32 4x8": 1},
    ),
    "stored, cast by the program": (
        lambda w, x: narrow(w) * narrow(x), STORED, (D, ()),
        {"float32 to bfloat16": 4, "bfloat16 to float32": 3, "all_gather bfloat16 4x8": 1, "reduce_scatter float32 8x8": 1},
    ),
    "multiplied where it is cast": (
        lambda w, x: narrow(x) @ narrow(w), MASTERS, (D, ()),
        {"float32 to bfloat16": 6, "bfloat16 to float32": 5, "psum float32 8x8": 1},
    ),
    "multiplied where it is cast, stored": (
        lambda w, x: narrow(x) @ narrow(w), STORED, (D, ()),
        {"float32 to bfloat16": 7, "bfloat16 to float32": 5, "all_gather bfloat16 4x8": 2, "reduce_scatter float32 8x8": 1},
    ),
    "cast otherwise": (
        lambda w, x: half(x) @ half(w), MASTERS, (D, ()),
        {"float32 to float16": 5, "float16 to float32": 5, "float32 to bfloat16": 2, "bfloat16 to float16": 1, "float16 to bfloat16": 1, "bfloat16 to float32": 2, "psum float32 8x8": 1},
    ),
    "rows that travel": (
        lambda w, x: x @ w, {"dtype": MASTERS["dtype"], "column": ["data", "tensor"]}, ((), T),
        {"float32 to bfloat16": 3, "bfloat16 to float32": 3, "all_gather bfloat16 8x2": 1, "reduce_scatter float32 8x8": 1, "psum float32 8x2": 1},
    ),
    "rows that are cut": (
        lambda w, x: x @ w, {**MASTERS, "reduction": "tensor"}, (D, ()),
        {"float32 to bfloat16": 4, "bfloat16 to float32": 2, "psum float32 4x8": 1, "psum float32 2x8": 1, "all_gather float32 4x2": 1},
    ),
    "multiplied and added": (
        lambda w, x: x @ w + x * w, {"row": "data", "dtype": {"reduce": "float32"}}, (D, ()),
        {"all_gather float32 4x8": 1, "psum float32 8x8": 1},
    ),
    "cast where sums are narrower": (
        lambda w, x: narrow(w) * narrow(x), {"row": "data", "dtype": {"reduce": "bfloat16"}}, (D, T),
        {"float32 to bfloat16": 3, "bfloat16 to float32": 3, "all_gather bfloat16 4x2": 1, "all_gather bfloat16 4x8": 1},
    ),
    "rows over more": (
        lambda w, x: x @ w, {"row": ["data", "tensor"], "store": "data"}, (("data", "tensor"), ()),
        {"all_gather float32 4x8": 2, "reduce_scatter float32 8x8": 1, "psum float32 4x8": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SENT)
def test_what_is_sent_and_cast_for_gradients(mesh, case):
    f, words, way, expected = SENT[case]
    program, given = built(mesh(**SIZES), f, [X, X], [words, way])
    assert sent(program, given, (0, 1)) == expected


PREFETCH = {"parameters": "data", "prefetch": True}


def layers(ws, x):
    return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0]


def looped(on, words, sizes):
    """A program of stacked layers, of which this is said, and arrays where it asks for them."""
    signals = jshard.load({"jshard": {"mesh": sizes}, "a": {**words, "match": ["**"]}}).signals
    inputs = [partition.Input(claim=Claim(signals["a"], "**"), path="w"), partition.Input((signals["a"].row, ()))]
    program = partition.Program(on, jax.make_jaxpr(layers)(WS, X), inputs)
    return program, [
        jax.device_put(x, Layout(on, *axes).sharding) for x, axes in zip((WS, X), program.in_axes, strict=True)
    ]


AHEAD = {  # what is said, and the mesh; what is asked for: of how many devices, of all of a slice; what is sent
    "of some devices": (
        {"row": "data", "store": PREFETCH}, SIZES,
        {("all_gather", 2, False, True), ("reduce_scatter", 2, False, True)}, {"ppermute": 7, "scan ppermute": 4},
    ),
    "of all devices": (
        {"row": "data", "store": PREFETCH}, {"data": 8},
        {("all_gather", 8, True, True), ("reduce_scatter", 8, True, True)}, {"ppermute": 49, "scan ppermute": 28},
    ),
    "of all slices": (
        {"row": ["slice", "data"], "store": {"parameters": ["slice", "data"], "prefetch": True}}, {"slice": {"size": 2, "over": "dcn"}, "data": 4},
        {("all_gather", 8, False, True), ("reduce_scatter", 8, False, True)}, {"ppermute": 28, "scan ppermute": 16},
    ),
    "where one is said": (
        {"row": "data", "store": PREFETCH, "kernel": {"all_gather": "xla"}}, SIZES,
        {("reduce_scatter", 2, False, True)}, {"all_gather": 5, "scan all_gather": 3, "scan ppermute": 1, "ppermute": 2},
    ),
    "of what is whole": (
        {"row": "data", "store": {"prefetch": True}}, SIZES,
        {("all_reduce", 2, None, True)}, {"scan ppermute": 2, "ppermute": 4},
    ),
    "of what is whole, said": (
        {"row": "data", "store": {"prefetch": True}, "kernel": {"all_reduce": "xla"}}, SIZES,
        set(), {"scan psum": 1, "psum": 2},
    ),
    "of what is whole, where a kernel of sums is said": (
        {"row": "data", "store": {"prefetch": True}, "kernel": {"all_reduce": "ring"}}, SIZES,
        set(), {"scan psum": 1, "psum": 2},
    ),
    "of what is whole, in order": (
        {"row": "data", "store": {"prefetch": True}, "kernel": {"all_reduce": "in_order"}}, {"data": 4},
        set(), {"scan all_to_all": 1, "all_to_all": 2},
    ),
    "of what is whole, between slices": (
        {"row": ["slice", "data"], "store": {"prefetch": True}}, {"slice": {"size": 2, "over": "dcn"}, "data": 4},
        set(), {"scan reduce_scatter": 1, "scan psum": 1, "scan all_gather": 1, "reduce_scatter": 2, "psum": 2, "all_gather": 2},
    ),
    "of what is whole, over one device too": (
        {"row": ["data", "tensor"], "store": {"prefetch": True}}, {"data": 1, "tensor": 4},
        {("all_reduce", 4, None, True)}, {"scan ppermute": 6, "ppermute": 12},
    ),
    "of what is whole, on one device": (
        {"row": ["data"], "store": {"prefetch": True}}, {"data": 1, "tensor": 4},
        {("all_reduce", 1, None, True)}, {},
    ),
    "stored over one device": (
        {"row": ["data"], "store": PREFETCH}, {"data": 1, "tensor": 4},
        set(), {},
    ),
    "in another dtype": (
        {**MASTERS, "store": PREFETCH}, SIZES,
        {("all_gather", 2, False, True), ("reduce_scatter", 2, False, True)}, {"ppermute": 7, "scan ppermute": 4},
    ),
    "of what is whole, in another dtype": (
        {**MASTERS, "store": {"prefetch": True}}, SIZES,
        {("all_reduce", 2, None, True)}, {"scan ppermute": 2, "ppermute": 4},
    ),
    "over one device, not ahead": (
        {"row": ["data"], "store": "data"}, {"data": 1, "tensor": 4},
        set(), {},
    ),
    "not ahead": (
        {"row": "data", "store": "data"}, SIZES,
        set(), {"scan all_gather": 2, "scan reduce_scatter": 1},
    ),
}  # fmt: skip


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", AHEAD)
def test_layers_that_are_gathered_ahead_ask_for(mesh, case, monkeypatch):
    words, sizes, asked, collectives = AHEAD[case]
    found = []

    def choose(op, **of):
        found.append((op, of["group"], of.get("of_all"), of["beside_work"]))
        return types.SimpleNamespace(algorithm="permute")

    monkeypatch.setattr(part, "choose", choose)
    on = mesh(**{name: size["size"] if isinstance(size, dict) else size for name, size in sizes.items()})
    assert counted(*looped(on, words, sizes), by=(0,)) == collectives
    assert {*found} == asked


def test_a_use_tells_of_a_parameter_what_splits_it_and_no_more(mesh):
    program, _ = built(mesh(**SIZES), lambda w, x: w * x, [X, X], [{"reduction": "tensor"}, ((), T)])
    placed = program.placed["p0"]
    assert (placed.use.roles, placed.told_by.primitive.name) == ((None, "reduction"), "mul")


KEPT = {"parameters": "data", "keep": True}
KINDS_OF = {  # what is said of a parameter, whether it rests in parts; whether it is gathered ahead, and again for the backward
    "nothing": ({}, False, False, False),
    "stored": ({"store": "data"}, True, False, True),
    "stored, and kept": ({"store": KEPT}, True, False, False),
    "stored, and gathered ahead": ({"store": PREFETCH}, True, True, True),
    "whole, and summed ahead": ({"store": {"prefetch": True}}, False, True, False),
    "whole, as it does not divide": ({"store": PREFETCH}, False, False, False),
}


@pytest.mark.parametrize("case", KINDS_OF)
def test_a_part_is_gathered_ahead_and_again_where_that_is_said(case):
    words, is_stored, *expected = KINDS_OF[case]
    signal = jshard.load({"jshard": {"mesh": SIZES}, "a": {**words, "match": ["**"]}}).signals["a"]
    one, value = part.Here((8, 8), ((), ()), X, signal=signal), Value((8, 8), ((), ()), X.dtype, signal=signal)
    one, value = (each.stored((D, ())) if is_stored else each for each in (one, value))
    assert [one.prefetches, one.regathers] == [value.prefetches, value.regathers] == expected
    assert not one.renewed(x=X.astype(int)).prefetches and not dataclasses.replace(one, signal=None).prefetches
    undecided = Parameter("w", Claim(signal, "**"), (8, 8), SIZES, [None, None])
    assert not Unplaced((8, 8), ((), ()), X.dtype, undecided, (0, 1), signal=signal).prefetches


def test_an_array_has_at_most_8_fields_whatever_it_is():
    classes = [each for room in (part, value) for each in vars(room).values() if each.__class__ is type]
    own = [
        each
        for each in classes
        if dataclasses.is_dataclass(each) and each.__module__ in (part.__name__, value.__name__)
    ]
    assert {part.Here, part.Deferred, part.Stored, Value, Unplaced} < {*own}
    counts = {each.__name__: len(dataclasses.fields(each)) for each in own}
    assert {name: count for name, count in counts.items() if count > 8} == {}


def test_what_varies_already_is_itself(mesh):
    over, none, by_hand = frozenset(T), frozenset[str](), lambda _: part.moving_as()
    found = []

    def body(x):
        one = part.Here((8, 8), (D, ()), x)
        other = one.varying(over, by_hand)
        found[:] = [
            one.varying(none, by_hand) is one,
            other.varying(over, by_hand) is other,
            one.varying(over, by_hand) is other,
        ]
        return other.x

    on = mesh(**SIZES)
    rows = jax.device_put(X, Layout(on, D, ()).sharding)
    jax.eval_shape(jax.shard_map(body, mesh=on, out_specs=jax.P("data", "tensor")), rows)
    assert found == [True] * 3


def test_what_two_kinds_of_uses_need_alike_is_marked_and_summed_once(mesh):
    words = {"row": "data", "dtype": {"reduce": "float32"}}
    program, given = built(mesh(**SIZES), lambda w, x: x @ w + x * w, [X, np.stack([X] * 4)], [words, (D, (), ())])
    assert counted(program, given, by=(0,)) == {"psum": 1}


@pytest.mark.parametrize("words", [{"row": "data"}, {"row": "data", "store": "data"}])
@pytest.mark.parametrize("rows", [(D, ()), ((), ())])
def test_over_one_device_nothing_is_sent(mesh, words, rows):
    program, given = built(mesh(data=1, tensor=4), lambda w, x: x @ w, [X, X], [words, rows])
    assert not collectives(program, given)


@pytest.mark.parametrize("f", [lambda x: x * x.T, lambda x: lax.cumsum(x, 0)])
def test_over_one_device_nothing_changes_places(mesh, f):
    assert not collectives(*built(mesh(data=1, tensor=4), f, [X], [(D, ())]))


def collectives(program, given):
    """Of a program and its gradient; of one number too."""
    gradient = jax.make_jaxpr(jax.grad(lambda *xs: program(*xs)[0].sum()))(*given)
    return {*KINDS, "psum_invariant", "all_gather_invariant"} & {eqn.primitive.name for eqn in equations(gradient)}


def test_what_is_summed_ahead_is_so_in_the_dtype_of_its_use(mesh):
    program, given = looped(mesh(**SIZES), {**MASTERS, "store": {"prefetch": True}}, SIZES)
    gradient = jax.make_jaxpr(jax.grad(lambda *xs: program(*xs)[0].sum()))(*given)
    carried = [v.aval for eqn in equations(gradient) if eqn.primitive.name == "scan" for v in eqn.outvars]
    assert {each.dtype for each in carried if each.shape == (8, 8)} == {jnp.dtype("bfloat16")}


def test_of_what_varies_each_device_takes_its_part(mesh):
    by_hand, on = lambda _: part.moving_as(), mesh(**SIZES)

    def body(x):
        return part.Here((8, 8), ((), ()), lax.pcast(x, T, to="varying")).local((T, ()), frozenset(), by_hand)

    cut = jax.jit(jax.shard_map(body, mesh=on, out_specs=jax.P("tensor")))(X)
    np.testing.assert_array_equal(cut, X)


@pytest.mark.parametrize(
    ("size", "kernel", "between", "expected"),
    [
        (4, {}, False, "psum"),
        (4, {"all_reduce": "in_order"}, False, "all_to_all"),
        (2, {"all_reduce": "in_order"}, False, "psum"),
        (4, {"all_reduce": "permute"}, False, "psum"),  # as layers do
        (4, {}, True, "all_to_all"),
        (4, {"all_reduce": "xla"}, True, "psum"),
    ],
)
def test_gradients_are_summed_in_order_where_that_is_said_and_between_processes(
    mesh, size, kernel, between, expected, monkeypatch
):
    monkeypatch.setattr(select_algorithm, "between_processes", lambda: between)
    words = {"row": "data", "kernel": kernel}
    assert counted(*built(mesh(data=size), lambda w, x: x @ w, [X, X], [words, (D, ())]), by=(0,)) == {expected: 1}
    ahead = {**words, "store": {"prefetch": True}}
    in_loop = {
        f"scan {expected}": 1,
        expected: 2,
    }  # of a layer that another one is summed beside, and of the first and last
    assert (
        kernel.get("all_reduce") == "permute"
        or counted(*looped(mesh(data=size), ahead, {"data": size}), by=(0,)) == in_loop
    )


def test_what_rests_in_fewer_bits_is_gathered_as_it_is_used(mesh):
    words = {"row": "data", "store": "data", "dtype": {"compute": "float32", "reduce": "bfloat16"}}
    program, given = built(mesh(**SIZES), lambda w, x: x @ w, [X.astype(NARROW), X], [words, (D, ())])
    casts = {"float32 to bfloat16": 2, "bfloat16 to float32": 3}
    assert sent(program, given, (0,)) == {**casts, "all_gather float32 4x8": 1, "reduce_scatter bfloat16 8x8": 1}
