"""V1-V8: everyday operations on arrays that jshard placed, over 1, 2 and 4 devices of Explicit and Auto meshes: equal to
numpy, lying as their operands lie, with gradients that finite differences and the dense program agree to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard.inspect.compiled import collectives_in
from jshard.inspect.plan import explain
from jshard.signals.active_config import unload

MESHES = [(devices, axis_types) for devices in (1, 2, 4) for axis_types in ("explicit", "auto")]
ROWS, COLUMNS, ROWS3 = ("w", None), (None, "w"), (None, "w", None)

draw = np.random.default_rng(0)
# No two numbers are close and none is near a kink, so that a finite difference means something.
X = draw.permutation(np.linspace(0.3, 2.9, 96)).reshape(8, 12)
Y = draw.permutation(np.linspace(0.45, 1.9, 96)).reshape(8, 12)
W = draw.normal(size=(12, 5))

BINARY = {
    "add": (jnp.add, np.add),
    "sub": (jnp.subtract, np.subtract),
    "mul": (jnp.multiply, np.multiply),
    "div": (jnp.divide, np.divide),
    "max": (jnp.maximum, np.maximum),
    "mod": (jnp.mod, np.mod),
    "less": (jnp.less, np.less),
}
UNARY = {
    "neg": (jnp.negative, np.negative),
    "exp": (jnp.exp, np.exp),
    "log": (jnp.log, np.log),
    "relu": (lambda x: jax.nn.relu(x - 1.61), lambda x: np.maximum(x - 1.61, 0)),
    "sigmoid": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (jnp.tanh, np.tanh),
    "sqrt": (jnp.sqrt, np.sqrt),
    "recip": (jnp.reciprocal, lambda x: 1 / x),
    "exp2": (jnp.exp2, np.exp2),
    "log2": (jnp.log2, np.log2),
    "sin": (jnp.sin, np.sin),
    "cos": (jnp.cos, np.cos),
}
# Of x by rows: what jax.numpy makes, what numpy makes, and how the result lies.
REDUCTIONS = {
    "sum": (jnp.sum, np.sum, ()),
    "sum0": (lambda x: jnp.sum(x, 0), lambda x: np.sum(x, 0), (None,)),
    "sum1": (lambda x: jnp.sum(x, 1), lambda x: np.sum(x, 1), ("w",)),
    "max": (jnp.max, np.max, ()),
    "max0": (lambda x: jnp.max(x, 0, keepdims=True), lambda x: np.max(x, 0, keepdims=True), (None, None)),
    "max1": (lambda x: jnp.max(x, 1), lambda x: np.max(x, 1), ("w",)),
    "mean": (jnp.mean, np.mean, ()),
    "mean1": (lambda x: jnp.mean(x, 1, keepdims=True), lambda x: np.mean(x, 1, keepdims=True), ROWS),
    "jshard.sum": (jshard.sum, np.sum, ()),
    "jshard.mean0": (lambda x: jshard.mean(x, 0), lambda x: np.mean(x, 0), (None,)),
    "jshard.max": (jshard.max, np.max, ()),
}
MOVEMENT = {
    "permute": (lambda x: x.T, lambda x: x.T, COLUMNS),
    "permute3": (
        lambda x: x.reshape(8, 3, 4).transpose(2, 0, 1), lambda x: x.reshape(8, 3, 4).transpose(2, 0, 1), ROWS3,
    ),
    "expand": (lambda x: jnp.broadcast_to(x, (3, 8, 12)), lambda x: np.broadcast_to(x, (3, 8, 12)), ROWS3),
    "expand1": (lambda x: jnp.broadcast_to(x[:, :1], (8, 5)), lambda x: np.broadcast_to(x[:, :1], (8, 5)), ROWS),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), lambda x: np.pad(x, ((0, 0), (1, 2))), ROWS),
    "shrink": (lambda x: x[:, 2:7], lambda x: x[:, 2:7], ROWS),
    "stride": (lambda x: x[:, ::3], lambda x: x[:, ::3], ROWS),
    "flip": (lambda x: x[:, ::-1], lambda x: x[:, ::-1], ROWS),
    "reshape": (lambda x: x.reshape(8, 2, 6), lambda x: x.reshape(8, 2, 6), ("w", None, None)),
}  # fmt: skip


# By name: what jax makes of x by rows, y by rows and w whole; what numpy makes of them; how the result lies.
OPERATIONS = {
    **{
        f"binary {k}": (lambda x, y, w, f=f: f(x, y), lambda x, y, w, g=g: g(x, y), ROWS)
        for k, (f, g) in BINARY.items()
    },
    **{f"unary {k}": (lambda x, y, w, f=f: f(x), lambda x, y, w, g=g: g(x), ROWS) for k, (f, g) in UNARY.items()},
    "matmul @": (lambda x, y, w: x @ w, lambda x, y, w: x @ w, ROWS),
    "matmul jshard": (lambda x, y, w: jshard.matmul(x, w), lambda x, y, w: x @ w, ROWS),
    **{
        f"{what} {k}": (lambda x, y, w, f=f: f(x), lambda x, y, w, g=g: g(x), axes)
        for what, table in (("reduction", REDUCTIONS), ("movement", MOVEMENT))
        for k, (f, g, axes) in table.items()
    },
}


def operations(x, y, w):
    """Every operation once, by name."""
    return {name: ours(x, y, w) for name, (ours, _, _) in OPERATIONS.items()}


def by_numpy(x, y, w):
    return {name: theirs(x, y, w) for name, (_, theirs, _) in OPERATIONS.items()}


@pytest.fixture
def load():
    def loaded(devices, axis_types="explicit"):
        signals = {"rows": {"row": "w"}, "columns": {"column": "w"}, "whole": {"shard": {"replicated": True}}}
        jshard.load({"jshard": {"mesh": {"w": devices}, "axis_types": axis_types}, **signals})

    yield loaded
    unload()


def placed(x=X, y=Y, w=W):
    """x and y by rows, w whole."""
    single = [each.astype(np.float32) for each in (x, y, w)]
    names = ("rows", "rows", "whole")
    return [jshard.signal.tensor(each, name=name) for each, name in zip(single, names, strict=True)]


def lies_as(result, axes):
    return result.sharding.is_equivalent_to(jshard.Layout(jshard.mesh(), *axes).sharding, result.ndim)


@pytest.mark.quick("1-auto", "1-explicit", "2-auto", "4-auto")
@pytest.mark.parametrize(("devices", "axis_types"), MESHES)
def test_operations_equal_numpy_and_keep_the_layout(load, devices, axis_types):
    load(devices, axis_types)
    arrays = placed()
    assert arrays[0].addressable_shards[0].data.shape == (8 // devices, 12)
    results = jax.jit(operations)(*arrays)
    for name, expected in by_numpy(X, Y, W).items():
        np.testing.assert_allclose(results[name], expected, rtol=2e-5, atol=1e-5, err_msg=name)
        assert lies_as(results[name], OPERATIONS[name][2]), (name, results[name].sharding)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_operations_outside_jit_equal_numpy_and_keep_the_layout(load, axis_types):
    load(4, axis_types)
    results = operations(*placed())
    for name, expected in by_numpy(X, Y, W).items():
        np.testing.assert_allclose(results[name], expected, rtol=2e-5, atol=1e-5, err_msg=name)
        assert lies_as(results[name], OPERATIONS[name][2]), (name, results[name].sharding)


def test_operations_on_arrays_by_columns_keep_the_columns(load):
    load(4)
    x, y = (jshard.signal.tensor(each.astype(np.float32), name="columns") for each in (X, Y))

    @jax.jit
    def f(x, y):
        return {
            **{name: ours(x, y) for name, (ours, _) in BINARY.items()},
            **{name: ours(x) for name, (ours, _) in UNARY.items()},
            "shrink": x[2:7],
            "stride": x[::3],
            "pad": jnp.pad(x, ((1, 2), (0, 0))),
        }

    expected = {
        **{name: theirs(X, Y) for name, (_, theirs) in BINARY.items()},
        **{name: theirs(X) for name, (_, theirs) in UNARY.items()},
        "shrink": X[2:7],
        "stride": X[::3],
        "pad": np.pad(X, ((1, 2), (0, 0))),
    }
    for name, result in f(x, y).items():
        np.testing.assert_allclose(result, expected[name], rtol=2e-5, atol=1e-5, err_msg=name)
        assert lies_as(result, COLUMNS), (name, result.sharding)


# -- gradients --

SMOOTH = [name for name in OPERATIONS if name != "binary less"]
COTANGENT = {
    name: np.cos(np.arange(np.size(result))).reshape(np.shape(result)) + 0.5
    for name, result in by_numpy(X, Y, W).items()
}


def gradients(x, y, w):
    """For every operation, the gradients of a weighed sum of its result by x, y and w."""

    def one(name):
        cotangent = COTANGENT[name].astype(np.float32)
        return jax.grad(lambda *operands: (OPERATIONS[name][0](*operands) * cotangent).sum(), (0, 1, 2))(x, y, w)

    return {name: one(name) for name in SMOOTH}


@pytest.fixture(scope="module")
def dense():
    unload()
    return jax.jit(gradients)(*(each.astype(np.float32) for each in (X, Y, W)))


@pytest.mark.quick("4-auto")
@pytest.mark.parametrize(("devices", "axis_types"), MESHES)
def test_gradients_equal_the_dense_ones_and_lie_as_their_operands(load, dense, devices, axis_types):
    load(devices, axis_types)
    arrays = placed()
    for name, found in jax.jit(gradients)(*arrays).items():
        for result, expected, operand in zip(found, dense[name], arrays, strict=True):
            np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5, err_msg=name)
            if axis_types == "explicit":  # on an auto mesh a gradient of zeros lies anywhere
                assert result.sharding.is_equivalent_to(operand.sharding, result.ndim), name


def test_gradients_agree_with_finite_differences(dense):
    """In numpy's float64, along one direction for each operand."""
    step = 1e-6
    for place, operand in enumerate((X, Y, W)):
        direction = np.sin(np.arange(operand.size)).reshape(operand.shape)
        ends = []
        for sign in (1, -1):
            moved = [each + sign * step * direction if at == place else each for at, each in enumerate((X, Y, W))]
            ends.append(by_numpy(*moved))
        for name in SMOOTH:
            slope = ((ends[0][name] - ends[1][name]) / (2 * step) * COTANGENT[name]).sum()
            np.testing.assert_allclose(
                (dense[name][place] * direction).sum(), slope, rtol=1e-4, atol=1e-4, err_msg=name
            )


def broadcasts(x, row, column, number):
    """Operands that are smaller than the result: their gradients are sums over what was broadcast."""
    return (jnp.sin(x * row + column) * number + row).sum()


@pytest.mark.parametrize(("devices", "axis_types"), MESHES)
def test_broadcast_gradients_equal_dense_and_are_bitwise_the_same_twenty_times(load, devices, axis_types):
    load(devices, axis_types)
    operands = [each.astype(np.float32) for each in (X, Y[0], Y[:, :1], Y[0, 0])]
    axes = [ROWS, (None,), ROWS, ()]
    arrays = [jshard.place(x, jshard.Layout(jshard.mesh(), *lies)) for x, lies in zip(operands, axes, strict=True)]
    program = jax.jit(jax.grad(broadcasts, (0, 1, 2, 3))).lower(*arrays).compile()
    runs = [program(*arrays) for _ in range(20)]  # dispatched without waiting
    expected = jax.grad(broadcasts, (0, 1, 2, 3))(*operands)
    for result, exact, lies in zip(runs[0], expected, axes, strict=True):
        np.testing.assert_allclose(result, exact, rtol=2e-5, atol=1e-5)
        assert lies_as(result, lies)
    first = [np.asarray(each).tobytes() for each in runs[0]]
    assert all([np.asarray(each).tobytes() for each in run] == first for run in runs)
    assert {got.collective for got in collectives_in(program)} == ({"all_reduce"} if devices > 1 else set())


def test_all_gradients_are_bitwise_the_same_twenty_times(load):
    load(4)
    arrays = placed()
    program = jax.jit(gradients)
    runs = [jax.tree.leaves(program(*arrays)) for _ in range(20)]
    first = [np.asarray(each).tobytes() for each in runs[0]]
    for run in runs:
        assert [np.asarray(each).tobytes() for each in run] == first


# -- a split axis that is touched: jshard.place first --

REFUSED = {
    "shrink": (lambda x: x[1:3], X[1:3]),
    "index": (lambda x: x[3], X[3]),
    "stride": (lambda x: x[::3], X[::3]),
    "mixed": (lambda x: x + jshard.place(Y.astype(np.float32), lies(COLUMNS)), X + Y),
}


def lies(axes):
    return jshard.Layout(jshard.mesh(), *axes)


def refused(f, *args):
    """By JAX, because of where its arguments lie."""
    with pytest.raises(Exception, match="shard") as error:
        jax.jit(f)(*args)
    return type(error.value).__name__ == "ShardingTypeError"


@pytest.mark.parametrize("name", REFUSED)
def test_operation_that_jax_refuses_on_a_split_axis_works_after_redistribute(load, name):
    load(4)
    operation, expected = REFUSED[name]
    x = placed()[0]
    assert refused(operation, x)

    def moved(x):
        return operation(jshard.place(x, lies(COLUMNS)))

    result = jax.jit(moved)(x)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert lies_as(result, COLUMNS[2 - result.ndim :])  # still split, by columns
    ledger = explain(moved, x, backward=False)
    (line,) = ledger
    assert line.collective == "all_to_all" and line.via.startswith("redistribute")


def test_operations_on_a_split_axis_and_back_again(load):
    """Pad, flip and a running sum along the rows, which lie split before and after; and the gradient of it all."""
    load(4)

    def along_rows(x):
        return jnp.cumsum(jnp.pad(x, ((2, 2), (0, 0)))[::-1], axis=0)

    def there_and_back(x):
        return jshard.place(along_rows(jshard.place(x, lies(COLUMNS))), lies(ROWS))

    x = placed()[0]
    result = jax.jit(there_and_back)(x)
    np.testing.assert_allclose(result, np.cumsum(np.pad(X, ((2, 2), (0, 0)))[::-1], axis=0), rtol=1e-5)
    assert lies_as(result, ROWS) and result.addressable_shards[0].data.shape == (3, 12)
    gradient = jax.jit(jax.grad(lambda x: (there_and_back(x) ** 2).sum()))(x)
    dense = jax.grad(lambda x: (along_rows(x) ** 2).sum())(X.astype(np.float32))
    np.testing.assert_allclose(gradient, dense, rtol=1e-5)
    assert lies_as(gradient, ROWS)
    assert explain(there_and_back, x, backward=False).counts() == {"all_to_all": 2}


def test_product_that_jax_finds_ambiguous_is_chosen_by_jshard(load):
    load(4)
    x = placed()[0]
    assert refused(lambda x: x @ x.T, x)
    result = jax.jit(lambda x: jshard.matmul(x, x.T))(x)
    np.testing.assert_allclose(result, X @ X.T, rtol=1e-5)
