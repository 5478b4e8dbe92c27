"""A(128,64) @ B(64,32) on four devices, by every strategy: shard shapes, collectives in the compiled program, values and
gradients."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.errors import JShardError
from jshard.inspect.compiled import collectives_in, wire_bytes
from jshard.inspect.plan import explain
from jshard.layers.body import Arithmetic, Body
from jshard.layers.matrix_product import _names_a_strategy, choose
from jshard.layers.sharded_matmul import Product, _hindrance, _local_input
from jshard.layers.strategy import strategy_of
from jshard.programs.jaxprs import equations
from jshard.signals.active_config import configuration, on_mesh, unload

SIGNALS = {
    "rows": {"row": "w"},
    "stored": {"row": "w", "store": "w"},
    "gt_rows": {"shard": {"axis": 0}},
    "inner": {"reduction": "w"},
    "scattered": {"reduction": "w", "output": "scatter"},
    "columns": {"column": "w"},
    "gathered": {"column": "w", "output": "gather"},
    "gt_columns": {"shard": {"axis": 1}},
    "nothing": {},
    "narrow": {"row": "w", "dtype": {"compute": "bfloat16"}},
    "stored_alone": {"store": "w"},
    "sequence_alone": {"sequence": "w"},
    "narrow_product": {"dtype": {"compute": "bfloat16"}},
    "wide_sum": {"dtype": {"reduce": "float32"}},
    "narrow_choice": {"dtype": {"compute": "bfloat16", "reduce": "float32"}, "remat": True},
}
WHOLE, ROWS, COLUMNS = (None, None), ("w", None), (None, "w")

# Small integers: every sum below is exact in float32, so dense and split agree to the last bit.
A = (np.arange(128 * 64).reshape(128, 64) % 7 - 3).astype(np.float32)
B = (np.arange(64 * 32).reshape(64, 32) % 5 - 2).astype(np.float32)
G = (np.arange(128 * 32).reshape(128, 32) % 3 - 1).astype(np.float32)


@pytest.fixture(autouse=True)
def loaded():
    jshard.load({"jshard": {"mesh": {"w": 4}}, **SIGNALS})
    yield
    unload()


def place(x, axes):
    return jshard.place(x, jshard.Layout(jshard.mesh(), *axes))


def by(name):
    def product(a, b):
        with jshard.signal(name):
            return jshard.matmul(a, b)

    return product


def shard_shape(x):
    shapes = {shard.data.shape for shard in x.addressable_shards}
    assert len(x.addressable_shards) == 4 and len(shapes) == 1
    return shapes.pop()


def kinds(compiled):
    """How many arrays each kind of collective carries: XLA joins neighbours into one."""
    return Counter(got.collective for got in collectives_in(compiled) for _ in got.payloads)


def with_gradients(f):
    """The product and the gradients of both operands, for a cotangent that is no constant."""

    def both(a, b, g):
        y, pull = jax.vjp(f, a, b)
        return y, *pull(g)

    return both


# signal, A lies, B lies, shards of A and B and C, C lies, collectives of forward, of forward and backward
TABLE = [
    ("rows", ROWS, WHOLE, (32, 64), (64, 32), (32, 32), ROWS, "", "all_reduce"),  # S1
    ("rows", ROWS, ROWS, (32, 64), (16, 32), (32, 32), ROWS, "all_gather", "all_gather all_reduce"),  # S1b, moved
    (
        "stored",
        ROWS,
        ROWS,
        (32, 64),
        (16, 32),
        (32, 32),
        ROWS,
        "all_gather",
        "all_gather reduce_scatter",
    ),  # S1b, at rest
    ("gt_rows", ROWS, ROWS, (32, 64), (16, 32), (32, 32), ROWS, "all_gather", "all_gather reduce_scatter"),
    ("inner", COLUMNS, ROWS, (128, 16), (16, 32), (128, 32), WHOLE, "all_reduce", "all_reduce"),  # S3
    ("scattered", COLUMNS, ROWS, (128, 16), (16, 32), (32, 32), ROWS, "reduce_scatter", "reduce_scatter all_gather"),
    ("columns", WHOLE, COLUMNS, (128, 64), (64, 8), (128, 8), COLUMNS, "", "all_reduce"),  # S3b
    ("gathered", WHOLE, COLUMNS, (128, 64), (64, 8), (128, 32), WHOLE, "all_gather", "all_gather all_reduce"),
    ("gt_columns", WHOLE, COLUMNS, (128, 64), (64, 8), (128, 8), COLUMNS, "", "all_reduce"),
]


@pytest.mark.parametrize(
    ("name", "a", "b", "a_shard", "b_shard", "c_shard", "c", "forward", "backward"),
    TABLE,
    ids=[f"{row[0]}-{'rows' if row[2] == ROWS else 'whole' if row[2] == WHOLE else 'columns'}" for row in TABLE],
)
def test_product_splits_and_moves_as_its_strategy_says(
    name, a, b, a_shard, b_shard, c_shard, c, forward, backward
):  # fmt: skip
    placed = place(A, a), place(B, b)
    assert [shard_shape(each) for each in placed] == [a_shard, b_shard]

    compiled = jax.jit(by(name)).lower(*placed).compile()
    result = compiled(*placed)
    assert kinds(compiled) == Counter(forward.split())
    assert shard_shape(result) == c_shard
    assert result.sharding == jshard.Layout(jshard.mesh(), *c).sharding
    np.testing.assert_array_equal(result, A @ B)
    # Every device multiplies its quarter: 2 x 128 x 64 x 32 / 4 operations, and what an all-reduce adds up.
    assert compiled.cost_analysis()["flops"] - 2 * 128 * 64 * 32 / 4 in (0, 128 * 32)

    # S4: gradients, lying as what they are the gradients of
    cotangent = place(G, c)
    compiled = jax.jit(with_gradients(by(name))).lower(*placed, cotangent).compile()
    _, a_gradient, b_gradient = compiled(*placed, cotangent)
    moved = kinds(compiled)
    assert (a_gradient.sharding, b_gradient.sharding) == tuple(each.sharding for each in placed)
    np.testing.assert_array_equal(a_gradient, G @ B.T)
    np.testing.assert_array_equal(b_gradient, A.T @ G)

    ledger = explain(by(name), *placed)
    assert ledger.only(phase="forward").counts() == Counter(forward.split())
    again = [line for line in ledger.lines if line.cause.remat]  # what is stored is gathered once more
    assert Counter(ledger.counts()) - Counter(line.collective for line in again) == Counter(backward.split())
    joined = again if jax.__version__.startswith("0.10.") else []  # XLA for CPU joined both gathers
    assert moved == Counter(ledger.counts()) - Counter(line.collective for line in joined)
    assert ledger.total - sum(line.total for line in joined) == wire_bytes(compiled)
    assert [line.collective for line in again] == ["all_gather"] * (backward == "all_gather reduce_scatter")


def test_columns_then_reduction_have_one_all_reduce_forward_and_one_backward():
    second = np.ascontiguousarray(B.T)

    def two(a, b, c):
        hidden = by("columns")(a, b)
        assert jax.typeof(hidden).sharding.spec == jax.P(None, "w")
        return by("inner")(jax.nn.relu(hidden), c)

    placed = place(A, WHOLE), place(B, COLUMNS), place(second, ROWS)
    forward = jax.jit(two).lower(*placed).compile()
    assert kinds(forward) == {"all_reduce": 1}
    np.testing.assert_array_equal(forward(*placed), np.maximum(A @ B, 0) @ second)

    def all_gradients(a, b, c, g):
        y, pull = jax.vjp(two, a, b, c)
        return y, pull(g)

    cotangent = place(A, WHOLE)
    both = jax.jit(all_gradients).lower(*placed, cotangent).compile()
    assert kinds(both) == {"all_reduce": 2}
    y, gradients = both(*placed, cotangent)
    _, dense = jax.vjp(lambda a, b, c: jax.nn.relu(a @ b) @ c, A, B, second)
    for got, expected, operand in zip(gradients, dense(A), placed, strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.sharding == operand.sharding
    assert y.sharding.spec == jax.P(None, None)

    ledger = explain(two, *placed)
    assert ledger.counts("phase") == {"forward": 1, "backward": 1}
    assert ledger.counts("signal") == {"inner": 1, "columns": 1}


def test_product_of_arrays_from_the_host_is_split_too():
    result = by("rows")(A, B)
    assert shard_shape(result) == (32, 32)
    np.testing.assert_array_equal(result, A @ B)


@pytest.mark.parametrize("name", ["rows", "stored", "inner", "scattered", "columns"])
def test_product_runs_its_body_inside_a_shard_map(name):
    """The second door: local parts in, the same collectives, no shard_map of its own."""
    row = next(row for row in TABLE if row[0] == name and (name != "rows" or row[2] == WHOLE))
    a, b, c, forward = row[1], row[2], row[6], row[7]
    body = jax.shard_map(by(name), mesh=jshard.mesh(), in_specs=(jax.P(*a), jax.P(*b)), out_specs=jax.P(*c))
    placed = place(A, a), place(B, b)
    compiled = jax.jit(body).lower(*placed).compile()
    assert kinds(compiled) == Counter(forward.split())
    np.testing.assert_array_equal(compiled(*placed), A @ B)


def test_product_without_a_configuration_is_a_plain_product():
    unload()
    np.testing.assert_array_equal(by("rows")(A, B), A @ B)
    assert "shard_map" not in str(jax.make_jaxpr(jshard.matmul)(A, B))


def test_product_is_computed_in_the_dtype_of_its_signal():
    placed = place(A, ROWS), place(B, WHOLE)
    result = by("narrow")(*placed)
    assert (result.dtype, shard_shape(result)) == (jnp.bfloat16, (32, 32))
    np.testing.assert_array_equal(result, jnp.matmul(A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)))
    assert by("nothing")(place(A.astype(np.int32), ROWS), place(B.astype(np.int32), WHOLE)).dtype == jnp.int32
    mixed = by("rows")(place(A.astype(jnp.bfloat16), ROWS), placed[1])
    assert mixed.dtype == jnp.float32
    np.testing.assert_array_equal(mixed, A @ B)


def test_a_choice_keeps_the_dtypes_and_the_remat_of_its_signal():
    placed = place(A, COLUMNS), place(B, ROWS)
    text = str(jax.make_jaxpr(by("narrow_choice"))(*placed))
    assert "bf16[128,16]" in text and "remat" in text
    ledger = explain(by("narrow_choice"), *placed, backward=False)
    assert [(line.collective, line.dtype) for line in ledger] == [("reduce_scatter", "float32")]
    assert by("narrow_choice")(*placed).dtype == jnp.bfloat16


def test_product_by_a_layer_equals_the_product_by_the_function():
    with jshard.signal("columns"):
        layer = jshard.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
    x = place(A, WHOLE)
    np.testing.assert_array_equal(layer(x), by("columns")(x, layer.kernel[...]))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: jshard.matmul(A, A),
            "jshard.matmul of (128, 64) and (128, 64): the last axis of x does not match the first of w; "
            "use x[..., K] and w[K, N]",
        ),
        (
            lambda: by("rows")(A[:6], B),
            'signal "rows" (<dict>) splits 6 rows over mesh axis "w" of size 4; use 4 or 8, or pad',
        ),
        (
            lambda: by("inner")(A[:, :6], B[:6]),
            'signal "inner" (<dict>) splits 6 inputs over mesh axis "w" of size 4; use 4 or 8, or pad',
        ),
        (
            lambda: by("columns")(A, B[:, :6]),
            'signal "columns" (<dict>) splits 6 columns over mesh axis "w" of size 4; use 4 or 8, or pad',
        ),
        (
            lambda: jshard.matmul(elsewhere(A), place(B, WHOLE)),
            "jshard.matmul of arrays on different devices: x on 4, 5, w on 0, 1, 2, 3; "
            "place both under one signal: jshard.signal.tensor(x, name=...)",
        ),
    ],
)
def test_product_that_can_not_be_is_told_in_one_sentence(call, sentence):
    with pytest.raises(JShardError) as error:
        call()
    assert str(error.value) == sentence


def elsewhere(x):
    explicit = (jax.sharding.AxisType.Explicit,)
    other = jax.make_mesh((2,), ("w",), axis_types=explicit, devices=jax.devices()[4:6])
    return jax.device_put(x, jax.NamedSharding(other, jax.P("w")))


MISMATCHED = [((2, 3), (4, 5)), ((2, 4), (3, 5)), ((2, 4), (4,)), ((2, 4), (4, 5, 6)), ((), (4, 5))]


@pytest.mark.parametrize("name", ["nothing", "rows", "stored"])
@pytest.mark.parametrize(("x", "w"), MISMATCHED, ids=str)
def test_shapes_that_do_not_match_are_a_sentence(x, w, name):
    with pytest.raises(JShardError) as error:
        by(name)(np.ones(x, np.float32), np.ones(w, np.float32))
    assert str(error.value) == (
        f"jshard.matmul of {x} and {w}: the last axis of x does not match the first of w; use x[..., K] and w[K, N]"
    )


def test_parts_that_do_not_match_are_a_sentence_too():
    product = jax.shard_map(jshard.matmul, mesh=jshard.mesh(), in_specs=jax.P(), out_specs=jax.P())
    with pytest.raises(JShardError) as error:
        product(place(np.ones((2, 3), np.float32), WHOLE), place(np.ones((4, 5), np.float32), WHOLE))
    assert "jshard.matmul of (2, 3) and (4, 5)" in str(error.value)


def test_a_choice_is_that_of_the_mesh_that_another_stands_for():
    four, wanted = jshard.mesh(), [str(each) for each in choose(A, B)]
    one = jax.make_mesh((1,), ("w",), devices=jax.devices()[:1], axis_types=four.axis_types)
    with on_mesh(one, four):
        found = choose(A, B)
    assert [str(each) for each in found] == wanted
    assert {each.strategy.mesh for each in found} == {one}


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("nothing", "float32", 4), ("nothing", "bfloat16", 2), ("wide_sum", "bfloat16", 4),
        ("narrow_product", "float32", 2), ("narrow_choice", "bfloat16", 4),
    ],
)  # fmt: skip
def test_a_sum_is_priced_in_the_dtype_that_it_is_in(name, dtype, size):
    a, b = place(A.astype(dtype), COLUMNS), place(B.astype(dtype), ROWS)
    with jshard.signal(name):
        (summed,) = (each for each in choose(a, b) if each.strategy.reduction and not each.strategy.scattered)
    assert summed.wire == 128 * 32 * size * 2 * 3 // 4  # an all-reduce on four devices


def test_one_word_names_a_strategy():
    signals = configuration().signals
    none = ["nothing", "narrow_product", "wide_sum", "narrow_choice"]
    assert [name for name in SIGNALS if not _names_a_strategy(signals[name])] == none


WIDE = "does not sum gradients in another dtype, as dtype: {reduce: ...} asks"


@pytest.mark.parametrize(
    ("op", "gathered", "scattered", "wide", "precision", "why"),
    [
        ("all_reduce", (), (), None, "highest", None),
        ("matmul", (), (), None, None, None),
        ("matmul", (), (), "float32", "highest", "knows no precision= and no dot_general= of its own"),
        ("all_gather_matmul", ("w",), (), None, None, None),
        ("all_gather_matmul", ("w",), (), "float32", None, WIDE),
        ("all_gather_matmul", (), (), "float32", None, None),
        ("matmul_reduce_scatter", ("w",), ("v",), "float32", None, None),
        ("all_gather_matmul", ("w",), ("v",), None, None, "does not scatter its result, as this signal does"),
        ("all_gather_matmul", (), ("v",), None, None, None),
    ],
)
def test_what_a_kernel_can_not_do_is_said(op, gathered, scattered, wide, precision, why):
    strategy = types.SimpleNamespace(gathered=gathered, scattered=scattered, reduce_dtype=wide)
    assert _hindrance(op, strategy, Arithmetic(precision=precision)) == why


def test_products_that_differ_in_whose_they_are_share_a_program():
    one = Product(Body(strategy_of(configuration().signals["rows"]), Arithmetic()), False, label="a")
    assert one == dataclasses.replace(one, label="b") != dataclasses.replace(one, back_scope="b")


@pytest.mark.parametrize(
    ("signal", "w", "x", "told"),
    [
        ("inner", (16, 32), (8, 6, 16), None),
        ("inner", (12, 32), (8, 6, 16), "kernel"),
        ("inner", (64, 32), (8, 6, 16), "kernel"),
        ("inner", (16, 32), (8, 6, 10), "give it 16 or 64"),
        ("inner", (16, 32), (8, 6, 70), "give it 16 or 64"),
        ("places", (64, 8), (8, 6, 64), None),
        ("places", (64, 8), (8, 6, 16), "give it 64"),
    ],
)
def test_sizes_on_a_device_say_how_an_input_is_split(signal, w, x, told):
    jshard.load({"jshard": {"mesh": {"w": 4}}, "inner": SIGNALS["inner"], "places": {"column": "w", "sequence": "w"}})
    signal = configuration().signals[signal]
    x, w = (jax.ShapeDtypeStruct(shape, np.float32) for shape in (x, w))
    of = lambda: _local_input(strategy_of(signal), signal, x, w, (64, 32))
    if told is None:
        assert of() is x
        return
    with pytest.raises(JShardError) as error:
        of()
    assert str(error.value) == {
        "kernel": f"{signal} finds a kernel of {w.shape} on each device where (16, 32) is expected; build the model under the "
        "configuration that it is called under",
    }.get(
        told,
        f"{signal} is called with {x.shape[-1]} of 64 inputs on each device, which no mesh axis of it explains; {told}",
    )


def test_a_gradient_where_another_signal_says_is_that_of_one_device():
    signals = {"a": {"row": ["w", "v"], "backward": "b"}, "b": {"column": "w", "store": "v"}}
    jshard.load({"jshard": {"mesh": {"w": 2, "v": 2}}, **signals})
    a, b = A.reshape(32, 4, 64), B

    def loss(a, b):
        with jshard.signal("a"):
            return (jshard.matmul(a, b) * G.reshape(32, 4, 32)).sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(a, b)
    for got, want in zip(found, (G.reshape(32, 4, 32) @ B.T, A.T @ G), strict=True):
        np.testing.assert_array_equal(got, want)
    program = equations(jax.make_jaxpr(jax.grad(loss, argnums=1))(a, b))
    assert "remat2" not in {eqn.primitive.name for eqn in program}  # what it gathers it needs at once


ELSEWHERE = {
    "a": {"shard": {"axis": 0, "workers": [0, 1]}, "backward": "b"},
    "b": {"shard": {"axis": 1, "workers": [2, 3]}},
}
COMPILED = {  # signals, the functions under jit of a product, and of its gradients too; on other workers these are no program
    "a signal": ({"jshard": {"mesh": {"w": 2, "v": 2}}, "a": {"row": "w"}}, "layer redistribution", None),
    "another backward": (
        {"jshard": {"mesh": {"w": 2, "v": 2}}, "a": {"row": "w", "backward": "b"}, "b": {"column": "v"}},
        "layer redistribution", 2 * "layer " + 4 * "redistribution ",
    ),
    "a backward elsewhere": (ELSEWHERE, "layer", None),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPILED)
def test_a_product_is_compiled_as_one_function(case):
    configuration, forward, both = COMPILED[case]
    jshard.load(configuration)

    def product(a, b):
        with jshard.signal("a"):
            return jshard.matmul(a, b)

    def names(f):
        return [
            eqn.params["name"] for eqn in equations(jax.make_jaxpr(f)(A, B)) if eqn.primitive.name in ("jit", "pjit")
        ]

    assert names(product) == forward.split()
    if both is not None:
        gradients = jax.grad(lambda a, b: product(a, b).sum(), (0, 1))
        assert sorted(names(gradients)) == sorted(both.split())
