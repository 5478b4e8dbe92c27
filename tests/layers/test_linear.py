"""`jshard.Linear` in every strategy: values, gradients, places and collectives are those of the table in cases.py."""

from __future__ import annotations

import functools
import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.signals.active_config import unload
from tests.support import cases
from tests.support.one_shard_map import in_one_shard_map

FEW = ("row column", "column gather", "row sequence reduction", "store column", "backward other")
EVERYWHERE = [
    *((case, "2x4", "explicit") for case in cases.on("2x4")),
    *((case, "2x4", "auto") for case in cases.on("2x4", cases.SOME)),
    *((case, "8", "explicit") for case in cases.on("8", cases.SOME)),
    *((case, mesh, "explicit") for mesh in ("4x2", "1x1") for case in cases.on(mesh, FEW)),
    *((case, "2x2x2", "explicit") for case in cases.on("2x2x2") if case.name in FEW or "p" in case.uses),
]


@pytest.mark.quick(10)
@pytest.mark.parametrize(("case", "mesh", "axis_types"), EVERYWHERE, ids=lambda value: str(value))
def test_linear_in_every_strategy(case, mesh, axis_types):
    with cases.loaded(case.configuration(mesh, axis_types)) as grid:
        layer = cases.layer_of(case)
        cases.assert_lies(layer.kernel[...], case.spec("kernel"))
        cases.assert_lies(layer.bias[...], case.spec("bias"))
        x, cotangent = cases.operands(case)
        graph, state = nnx.split(layer)

        def run(state, x, cotangent):
            return cases.forward_and_gradients(nnx.merge(graph, state), x, cotangent)

        compiled = jax.jit(run).lower(state, x, cotangent).compile()
        cases.assert_results(case, compiled(state, x, cotangent))
        ledger = cases.assert_priced(run, (state, x, cotangent), compiled)
        cases.assert_collectives(case, grid, ledger, compiled)


IN_ONE_PROGRAM = [
    *((case, "2x4", "explicit") for case in cases.on("2x4")),
    *((case, "2x4", "auto") for case in cases.on("2x4", ("row column gather", "row reduction scatter", "store"))),
    *((case, "8", "explicit") for case in cases.on("8", ("column gather", "reduction scatter", "store"))),
    *((case, "1x1", "explicit") for case in cases.on("1x1", ("row column gather", "store reduction"))),
    *((case, "4x2", "explicit") for case in cases.on("4x2", ("row reduction scatter", "store column"))),
    *((case, "2x2x2", "explicit") for case in cases.on("2x2x2") if "p" in case.uses),
]


@pytest.mark.quick(6)
@pytest.mark.parametrize("door", [jshard.jit, in_one_shard_map], ids=["jit", "shard_map"])
@pytest.mark.parametrize(("case", "mesh", "axis_types"), IN_ONE_PROGRAM, ids=str)
def test_linear_in_every_strategy_by_jit_and_in_a_shard_map_around_it(case, mesh, axis_types, door):
    with cases.loaded(case.configuration(mesh, axis_types)) as grid:
        args, f = (cases.layer_of(case), *cases.operands(case)), door(cases.forward_and_gradients)
        compiled = f.lower(*args).compile()
        cases.assert_results(case, f(*args))
        if axis_types == "explicit" or door is jshard.jit:  # no tracer of an auto mesh tells the helper how it lies
            cases.assert_collectives(case, grid, cases.assert_priced(f, args, compiled), compiled)


# -- out of jit, under scan and under remat --

DOORS = ["row column", "column gather", "row reduction", "reduction scatter", "row sequence column", "store column"]


@pytest.mark.quick(8)
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
@pytest.mark.parametrize("name", [*DOORS, "backward other", "remat sequence column"])
def test_linear_out_of_jit_equals_dense(name, axis_types):
    case = cases.BY_NAME[name]
    with cases.loaded(case.configuration("2x4", axis_types)):
        layer = cases.layer_of(case)
        x, cotangent = cases.operands(case)
        y = layer(x)
        cases.assert_equal(y, cases.dense_of(case)[0])
        cases.assert_lies(y, case.spec("y"))
        cases.assert_results(case, cases.forward_and_gradients(layer, x, cotangent))


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_jax_grad_out_of_jit_needs_the_mesh_set(axis_types):
    case = cases.BY_NAME["row reduction"]
    with cases.loaded(case.configuration("2x4", axis_types)) as grid:
        layer = cases.layer_of(case)
        x, cotangent = cases.operands(case)
        loss = lambda layer, x: (layer(x) * cotangent).sum()
        with jax.set_mesh(grid):
            of_layer, of_x = nnx.grad(loss, argnums=(0, 1))(layer, x)
        cases.assert_results(case, (layer(x), of_layer, of_x))


def stacked(count, make):
    """`count` layers in one, their parameters along a new first axis."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return make(rngs)

    return create(nnx.Rngs(0))


def under_signal(rngs):
    with jshard.signal("layer"):
        return jshard.Linear(cases.INPUTS, cases.INPUTS, kernel_init=by_key, bias_init=by_key, rngs=rngs)


def plain(rngs):
    return nnx.Linear(cases.INPUTS, cases.INPUTS, kernel_init=by_key, bias_init=by_key, rngs=rngs)


def by_key(key, shape, dtype):
    """Integers, other ones in each layer of a stack."""
    return cases.integers(key, shape, dtype) * (1 + jax.random.key_data(key)[-1] % 2).astype(dtype)


SCANS = {
    "nnx.scan": nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry),
    "nnx.scan of nnx.remat": nnx.scan(nnx.remat(lambda layer, x: layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry),
    "lax.scan": lambda layers, x: _lax_scan(layers, x, lambda f: f),
    "lax.scan of jax.checkpoint": lambda layers, x: _lax_scan(layers, x, jax.checkpoint),
}


def _lax_scan(layers, x, remat):
    graph, state = nnx.split(layers)
    return jax.lax.scan(remat(lambda x, state: (nnx.merge(graph, state)(x), None)), x, state)[0]


@pytest.mark.quick("remat store-nnx.scan-remat store")
@pytest.mark.parametrize(
    ("name", "scan", "as_if"),
    [
        ("row", "lax.scan", "row"),
        ("row column gather", "nnx.scan", "row column gather"),
        ("row column gather", "lax.scan of jax.checkpoint", "row column gather"),
        ("sequence", "nnx.scan", "sequence"),
        ("store", "nnx.scan", "store"),
        ("store", "nnx.scan of nnx.remat", "remat store"),
        ("store", "lax.scan", "store"),
        ("store", "lax.scan of jax.checkpoint", "remat store"),
        ("remat store", "nnx.scan", "remat store"),
    ],
)
def test_stacked_layers_under_scan(name, scan, as_if):
    """Created by vmap, each layer's part as it lies alone; collectives are those of one layer times the trips."""
    case, run, count = cases.BY_NAME[name], SCANS[scan], 3
    numbers = cases.numbers(cases.shapes(case.rank)[0])
    expected = cases.forward_and_gradients(stacked(count, plain), numbers, numbers, run)
    with cases.loaded(case.configuration("2x4")) as grid:
        layers = stacked(count, under_signal)
        for parameter in ("kernel", "bias"):
            cases.assert_lies(getattr(layers, parameter)[...], jax.P(None, *case.spec(parameter)))
        x = cases.placed(numbers, case.spec("x"))
        graph, state = nnx.split(layers)

        def both(state, x):
            return cases.forward_and_gradients(nnx.merge(graph, state), x, x, run)

        compiled = jax.jit(both).lower(state, x).compile()
        actual = compiled(state, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)
        cases.assert_lies(actual[0], case.spec("y"))
        for parameter in ("kernel", "bias"):
            cases.assert_lies(actual[1][parameter][...], jax.P(None, *case.spec(parameter)))
        ledger = cases.assert_priced(both, (state, x), compiled)
        for phase in ("forward", "backward"):
            once = cases.BY_NAME[as_if].expected(phase, grid)
            asked = cases.collectives_asked(ledger.only(phase=phase))
            assert asked == {kind: count * arrays for kind, arrays in once.items()}
        assert cases.collectives_got(compiled) == cases.collectives_asked(ledger)


def test_remat_asks_again_for_what_it_did_not_keep():
    """In the program handed to XLA; what XLA for CPU makes of it differs by version."""
    counts = {}
    for name in ("row sequence column", "remat sequence column"):
        case = cases.BY_NAME[name]
        with cases.loaded(case.configuration("2x4")):
            layer = cases.layer_of(case)
            text = jax.jit(functools.partial(cases.forward_and_gradients, layer)).lower(*cases.operands(case)).as_text()
            counts[name] = text.count("stablehlo.all_gather")
    assert counts == {"row sequence column": 1, "remat sequence column": 2}


# -- dtypes: what is summed in float32 is not rounded on the way --


def big(key, shape, dtype):
    """Whole numbers to 251: exact in bfloat16, their sums are not."""
    return ((jnp.arange(math.prod(shape)) * 37) % 252).reshape(shape).astype(dtype)


@pytest.mark.parametrize("name", ["reduction reduce float32", "reduce float32", "store reduce float32"])
def test_reduce_float32_rounds_once(name):
    """Every sum between devices is that of float32, rounded where the result is bfloat16, and not before."""
    case = cases.BY_NAME[name]
    x_shape, y_shape = cases.shapes(2)
    x, cotangent = np.asarray(big(None, x_shape, "float32")), np.asarray(big(None, y_shape, "float32"))
    with cases.loaded(case.configuration("2x4")):
        with jshard.signal("layer"):
            layer = jshard.Linear(cases.INPUTS, cases.OUTPUTS, kernel_init=big, rngs=nnx.Rngs(0))
        kernel = np.asarray(layer.kernel[...])
        run = jax.jit(functools.partial(cases.forward_and_gradients, layer))
        ledger = cases.explain(run, x, cases.placed(cotangent.astype(jnp.bfloat16), case.spec("y")))
        y, of_parameters, of_x = run(
            cases.placed(x, case.spec("x")), cases.placed(cotangent.astype(jnp.bfloat16), case.spec("y"))
        )
    sums = [line.dtype for line in ledger if line.collective in ("all_reduce", "reduce_scatter")]
    assert sums and set(sums) == {"float32"}
    if "row" in case.keys:  # two devices each sum four rows, and round; then float32
        parts = [x[rows].T @ cotangent[rows] for rows in (slice(0, 4), slice(4, 8))]
        expected = sum(part.astype(jnp.bfloat16).astype(np.float32) for part in parts)
        np.testing.assert_array_equal(of_parameters["kernel"][...], expected)
        rounded_on_the_way = expected.astype(jnp.bfloat16).astype(np.float32)
        assert (expected != rounded_on_the_way).any()
    if "reduction" in case.keys:
        np.testing.assert_array_equal(y, (x @ kernel).astype(jnp.bfloat16))
        parts = [x[:, k : k + 4] @ kernel[k : k + 4] for k in range(0, 16, 4)]
        rounded_on_the_way = sum(part.astype(jnp.bfloat16).astype(np.float32) for part in parts).astype(jnp.bfloat16)
        assert (np.asarray(y) != rounded_on_the_way).any()


def test_reduce_float32_leaves_the_dtype_that_is_computed_in():
    keys = {"column": "tensor", "dtype": {"reduce": "float32"}}
    with cases.loaded({"jshard": {"mesh": {"tensor": 4}}, "layer": keys}):
        with jshard.signal("layer"):
            layer = jshard.Linear(8, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        y, of_parameters, of_x = jax.jit(functools.partial(cases.forward_and_gradients, layer))(
            jnp.ones((2, 8), jnp.bfloat16), jnp.ones((2, 8), jnp.bfloat16)
        )
        assert {y.dtype, of_x.dtype, of_parameters["kernel"].dtype} == {jnp.dtype(jnp.bfloat16)}


# -- the arguments of nnx.Linear --


def _dot_general(x, w, dimensions, precision=None, preferred_element_type=None, out_sharding=None):
    return 2 * jax.lax.dot_general(x, w, dimensions, precision, preferred_element_type)


def _promote_dtype(arrays, *, dtype=None, **_):
    return tuple(None if array is None else array.astype(jnp.float16) for array in arrays)


@pytest.mark.quick("kernel_metadata bias_metadata", "use_bias")
@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel_init": nnx.initializers.he_normal(), "bias_init": nnx.initializers.normal(1.0)},
        {"dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"dtype": jnp.float16, "param_dtype": jnp.float16},
        {"precision": jax.lax.Precision.HIGHEST},
        {"precision": "high"},
        {"dot_general": _dot_general},
        {"promote_dtype": _promote_dtype},
        {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
        {"use_bias": False},
        {"kernel_metadata": {"mine": 1}, "bias_metadata": {"mine": 2}},
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_arguments_of_nnx_linear_mean_the_same(arguments):
    arguments = {"kernel_init": cases.integers, **arguments}  # drawn numbers compile slowly: see test_creation.py
    x = cases.numbers((8, 16))
    expected = nnx.Linear(16, 24, rngs=nnx.Rngs(0), **arguments)
    for name in ("row column", "row reduction"):
        case = cases.BY_NAME[name]
        with cases.loaded(case.configuration("2x4")):
            with jshard.signal("layer"):
                layer = jshard.Linear(16, 24, rngs=nnx.Rngs(0), **arguments)
            for ours, theirs in zip(
                jax.tree.leaves(nnx.state(layer)), jax.tree.leaves(nnx.state(expected)), strict=True
            ):
                cases.assert_equal(ours, theirs)
            assert layer.kernel.get_metadata().get("mine") == expected.kernel.get_metadata().get("mine")
            y, of_parameters, _ = cases.forward_and_gradients(layer, x, jnp.ones_like(expected(x)))
            assert y.dtype == expected(x).dtype
            tolerance = 1e-5 if y.dtype == jnp.float32 and layer.dtype is None else 2e-2
            close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
            close(np.asarray(y, np.float32), np.asarray(expected(x), np.float32))
            dense = cases.forward_and_gradients(expected, x, jnp.ones_like(y))[1]
            for ours, theirs in zip(jax.tree.leaves(of_parameters), jax.tree.leaves(dense), strict=True):
                close(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
            program = jax.jit(layer).lower(x).as_text() if "precision" in arguments else ""
            asked = str(jax.lax.Precision(arguments.get("precision", "default"))).upper()
            assert f"precision = [{asked}, {asked}]" in program or not program


def test_bias_is_added_where_the_user_forbids_rank_promotion(layer, x):
    with jax.numpy_rank_promotion("raise"):
        cases.assert_equal(layer(x), cases.dense(2)[0])


# -- an NNX module like any other --


@pytest.fixture
def layer():
    with cases.loaded(cases.BY_NAME["row column"].configuration("2x4")):
        yield cases.layer_of(cases.BY_NAME["row column"])


@pytest.fixture
def x(layer):
    return cases.placed(cases.numbers((8, 16)), jax.P("data"))


def loss(layer, x):
    return (layer(x) ** 2).mean()


def test_linear_is_an_nnx_linear_and_prints_like_one(layer):
    assert isinstance(layer, nnx.Linear)
    assert isinstance(layer.kernel, nnx.Param) and isinstance(layer.bias, nnx.Param)
    assert "kernel" in repr(layer) and "Linear" in repr(layer) and "in_features=16" in repr(layer)
    assert "kernel" in str(nnx.state(layer))


def test_linear_splits_merges_clones_and_updates(layer, x):
    y = layer(x)
    graph, state = nnx.split(layer)
    assert hash(graph) == hash(nnx.split(layer)[0])
    assert set(nnx.to_pure_dict(state)) == {"kernel", "bias"}
    for copy in (nnx.merge(graph, state), nnx.clone(layer)):
        cases.assert_equal(copy(x), y)
        cases.assert_lies(copy.kernel[...], jax.P(None, "tensor"))
    pure = nnx.to_pure_dict(state)
    nnx.update(layer, jax.tree.map(lambda array: 2 * array, state))
    cases.assert_equal(layer(x), 2 * y)
    cases.assert_lies(layer.kernel[...], jax.P(None, "tensor"))
    nnx.update(layer, pure)
    cases.assert_equal(layer(x), y)


def test_linear_under_nnx_jit_and_grad(layer, x):
    value, gradients = nnx.jit(nnx.value_and_grad(loss))(layer, x)
    dense = nnx.Linear(16, 24, kernel_init=cases.integers, bias_init=cases.integers, rngs=nnx.Rngs(0))
    dense_value, dense_gradients = nnx.value_and_grad(loss)(dense, np.asarray(x))
    np.testing.assert_allclose(value, dense_value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradients, dense_gradients)
    cases.assert_lies(gradients["kernel"][...], jax.P(None, "tensor"))
    cases.assert_lies(gradients["bias"][...], jax.P("tensor"))


def test_linear_under_nnx_remat(layer, x):
    checkpointed = nnx.jit(nnx.grad(lambda layer, x: (nnx.remat(lambda layer, x: layer(x))(layer, x) ** 2).mean()))
    gradients = nnx.jit(nnx.grad(loss))(layer, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), checkpointed(layer, x), gradients)


def test_linear_under_nnx_optimizer(layer, x):
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(layer, optimizer, x):
        value, gradients = nnx.value_and_grad(loss)(layer, x)
        optimizer.update(layer, gradients)
        return value

    values = [float(train(layer, optimizer, x)) for _ in range(5)]
    assert values == sorted(values, reverse=True)
    cases.assert_lies(layer.kernel[...], jax.P(None, "tensor"))
    for moment in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        cases.assert_lies(moment["kernel"][...], jax.P(None, "tensor"))


def test_call_of_a_stack_under_nnx_vmap(layer):
    layers, x = stacked(3, under_signal), cases.numbers((3, 8, 16))
    y = nnx.jit(nnx.vmap(lambda layer, x: layer(x)))(layers, x)
    expected = nnx.vmap(lambda layer, x: layer(x))(stacked(3, plain), x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    cases.assert_lies(y, jax.P(None, "data", "tensor"))


def test_abstract_creation_touches_no_device(layer):
    gc.collect()
    before = len(jax.live_arrays())
    abstract = nnx.eval_shape(lambda: cases.layer_of(cases.BY_NAME["row column"]))
    gc.collect()
    assert len(jax.live_arrays()) == before
    kernel = abstract.kernel.get_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert (kernel.shape, kernel.dtype, kernel.sharding.spec) == ((16, 24), jnp.float32, jax.P(None, "tensor"))


def test_creation_inside_jit_is_born_as_outside(layer):
    made = nnx.jit(lambda: cases.layer_of(cases.BY_NAME["row column"]))()
    cases.assert_equal(made.kernel[...], layer.kernel[...])
    cases.assert_lies(made.kernel[...], jax.P(None, "tensor"))


def test_linear_without_a_configuration_is_nnx_linear():
    unload()
    with jshard.signal("layer"):
        layer = jshard.Linear(16, 24, rngs=nnx.Rngs(0))
        dense = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
        x = cases.numbers((8, 16))
        cases.assert_equal(layer.kernel[...], dense.kernel[...])
        cases.assert_equal(layer(x), dense(x))
    texts = [jax.jit(each).lower(x).as_text() for each in (layer, dense)]
    assert texts[0] == texts[1]


def test_linear_without_a_signal_lies_where_it_is_asked_to(mesh):
    unload()
    layer = jshard.Linear(16, 24, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh(data=8)):
        assert layer(np.ones((8, 16), np.float32), jax.P("data", None)).sharding.spec == jax.P("data", None)


def test_parameters_are_of_the_dtype_of_the_signal_or_of_the_argument():
    made = {}
    for name, dtype in {"narrow": {"param": "float16"}, "wide": {}}.items():
        with cases.loaded({"jshard": {"mesh": {"data": 8}}, "layer": {"dtype": dtype}}), jshard.signal("layer"):
            layer = jshard.Linear(8, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            made[name] = {layer.kernel[...].dtype, layer.bias[...].dtype}
    assert made == {"narrow": {jnp.dtype(jnp.float16)}, "wide": {jnp.dtype(jnp.bfloat16)}}


@pytest.mark.parametrize("size", [15, 17])
def test_an_input_of_another_size_is_a_sentence(layer, size):
    with pytest.raises(jshard.JShardError) as error:
        layer(np.ones((8, size), np.float32))
    assert str(error.value) == (
        f'signal "layer" (<dict>) has a Linear of 16 inputs, called with an array of shape (8, {size}); give it arrays '
        "whose last axis is 16"
    )


@pytest.mark.parametrize(
    ("compute", "preferred", "dtype"),
    [("bfloat16", None, "bfloat16"), ("bfloat16", "float32", "float32"), (None, None, "float32")],
)
@pytest.mark.parametrize("use_bias", [True, False])
def test_linear_inside_shard_computes_in_the_dtype_of_its_signal(use_bias, compute, preferred, dtype):
    words = {"row": "data", "dtype": {"compute": compute} if compute else {}}
    more = {} if preferred is None else {"preferred_element_type": jnp.dtype(preferred)}
    with cases.loaded({"jshard": {"mesh": {"data": 2}}, "layer": words}):
        with jshard.signal("layer"):
            layer = jshard.Linear(8, 16, use_bias=use_bias, rngs=nnx.Rngs(0), **more)
        if use_bias:
            layer.bias.set_value(jnp.arange(2.0, 18))
        x = cases.numbers((2, 4, 8))
        y = jshard.shard(lambda layer, x: layer(x))(layer, x)
        assert y.dtype == dtype
        wanted = x @ np.asarray(layer.kernel[...]) + (np.arange(2.0, 18) if use_bias else 0)
        tolerance = 1e-5 if compute is None else 2e-2
        np.testing.assert_allclose(y.astype(np.float32), wanted, rtol=tolerance, atol=tolerance)
