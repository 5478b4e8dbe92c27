"""sum, mean and max of a split array: the local part, then exactly one all-reduce, through either door."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard.errors import JShardError
from jshard.inspect.compiled import collectives_in, wire_bytes
from jshard.inspect.plan import explain
from jshard.layers.reduce import _program
from jshard.signals.active_config import unload

# Small integers with ties in every row and column: sums are exact, and a maximum is held by many.
X = (np.arange(8 * 16).reshape(8, 16) * 7 % 5 - 2).astype(np.float32)
KINDS = {"sum": (jshard.sum, jnp.sum), "mean": (jshard.mean, jnp.mean), "max": (jshard.max, jnp.max)}
SPLITS = {"rows": ("w", None), "columns": (None, "w"), "both": ("w", "v"), "stacked": (("w", "v"), None)}


@pytest.fixture(autouse=True)
def loaded():
    signals = {
        "rows": {"row": "w"},
        "columns": {"column": "w"},
        "inner": {"reduction": "w"},
        "both": {"row": "w", "column": "v"},
        "rung": {"row": "w", "kernel": {"all_reduce": "ring"}},
    }
    jshard.load({"jshard": {"mesh": {"w": 4, "v": 2}}, **signals})
    yield
    unload()


def place(x, axes):
    return jshard.place(x, jshard.Layout(jshard.mesh(), *axes))


def kinds(compiled):
    """How many arrays each kind of collective carries."""
    return Counter(got.collective for got in collectives_in(compiled) for _ in got.payloads)


def crossed(split, axis):
    """The mesh axes that a reduction over `axis` crosses, and the layout of what is left."""
    axes = [(names,) if isinstance(names, str) else names or () for names in SPLITS[split]]
    over = (0, 1) if axis is None else (axis,)
    return [name for each in over for name in axes[each]], [
        names for each, names in enumerate(axes) if each not in over
    ]


@pytest.mark.quick("mean-stacked")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_reduction_is_one_all_reduce_and_equals_the_dense_one(kind, split):
    ours, dense = KINDS[kind]
    x = place(X, SPLITS[split])
    for axis in (None, 0, 1):
        over, left = crossed(split, axis)
        for keepdims in (False, True):
            f = functools.partial(ours, axis=axis, keepdims=keepdims)
            compiled = jax.jit(f).lower(x).compile()
            result = compiled(x)
            assert kinds(compiled) == ({"all_reduce": 1} if over else {}), (axis, keepdims)
            np.testing.assert_array_equal(result, dense(X, axis=axis, keepdims=keepdims))
            kept = [SPLITS[split][each] if axis not in (None, each) else None for each in (0, 1)] if keepdims else left
            assert result.sharding == jshard.Layout(jshard.mesh(), *kept).sharding, (axis, keepdims)
            assert explain(f, x, backward=False).total == wire_bytes(compiled)


@pytest.mark.quick("mean-rows", "mean-stacked")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_a_reduction_equals_the_dense_one(kind, split):
    """That of a max is shared among all that hold it, on whichever device they are."""
    ours, dense = KINDS[kind]
    x = place(X, SPLITS[split])
    for axis in (None, 0, 1):
        weigh = (np.arange(16) + 1.0)[: dense(X, axis=axis).size].reshape(dense(X, axis=axis).shape).astype(np.float32)
        loss = lambda f, axis, weigh, x: (f(x, axis=axis) * weigh).sum()
        compiled = jax.jit(jax.grad(functools.partial(loss, ours, axis, weigh))).lower(x).compile()
        gradient = compiled(x)
        np.testing.assert_allclose(gradient, jax.grad(functools.partial(loss, dense, axis, weigh))(X), rtol=1e-6)
        assert gradient.sharding == x.sharding
        over, _ = crossed(split, axis)
        # Only a max must ask the others: for the maximum itself, and how many hold it.
        assert kinds(compiled) == ({"all_reduce": 2} if over and kind == "max" else {}), axis


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_reduction_inside_a_shard_map_is_one_all_reduce(kind):
    ours, dense = KINDS[kind]
    cases = [
        ("rows", "rows", None, jax.P()),
        ("rows", "rows", 0, jax.P()),
        ("rows", "rows", 1, jax.P("w")),
        ("columns", "columns", 0, jax.P("w")),
        ("columns", "columns", 1, jax.P()),
        ("inner", "rows", 0, jax.P()),
        ("both", "both", None, jax.P()),
        ("both", "both", 0, jax.P("v")),
        ("both", "both", (0, 1), jax.P()),
    ]
    for name, split, axis, left in cases:

        @functools.partial(jax.shard_map, mesh=jshard.mesh(), in_specs=jax.P(*SPLITS[split]), out_specs=left)
        def body(x, name=name, axis=axis):
            with jshard.signal(name):
                return ours(x, axis=axis)

        x = place(X, SPLITS[split])
        compiled = jax.jit(body).lower(x).compile()
        crosses = axis is None or axis == (0, 1) or SPLITS[split][axis] is not None
        assert kinds(compiled) == ({"all_reduce": 1} if crosses else {}), (name, axis)
        np.testing.assert_array_equal(compiled(x), dense(X, axis=axis))

        def loss(f, x):
            return (f(x) ** 2).sum()

        gradient = jax.jit(jax.grad(functools.partial(loss, body)))(x)
        expected = jax.grad(functools.partial(loss, functools.partial(dense, axis=axis)))(X)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_reduction_of_a_whole_array_is_split_as_the_signal_says():
    """`reduction` of an array: each device takes a part, at no cost, and one all-reduce joins them."""
    with jshard.signal("inner"):
        compiled = jax.jit(jshard.sum).lower(place(X, (None, None))).compile()
        np.testing.assert_array_equal(jshard.sum(X, axis=0), X.sum(0))  # from the host
    assert kinds(compiled) == {"all_reduce": 1}
    assert compiled(place(X, (None, None))) == X.sum()


def test_reduction_of_integers_and_of_narrow_floats():
    whole = X.astype(np.int32)
    x = place(whole, SPLITS["rows"])
    assert (jshard.sum(x).dtype, jshard.max(x).dtype, jshard.mean(x).dtype) == (np.int32, np.int32, np.float32)
    assert (jshard.sum(x), jshard.max(x), jshard.mean(x)) == (whole.sum(), whole.max(), whole.mean(dtype=np.float32))
    narrow = place(X.astype(jnp.bfloat16), SPLITS["rows"])
    assert jshard.mean(narrow).dtype == jnp.bfloat16
    assert jshard.mean(narrow) == jnp.mean(X.astype(jnp.bfloat16))


def test_reduction_takes_negative_and_several_axes_and_arrays_of_three():
    cube = np.arange(4 * 8 * 2).reshape(4, 8, 2).astype(np.float32)
    x = place(cube, ("w", "v", None))
    for axis in (-1, -3, (0, 1), (0, -1), (0, 1, 2)):
        np.testing.assert_array_equal(jax.jit(functools.partial(jshard.sum, axis=axis))(x), cube.sum(axis))
        compiled = jax.jit(functools.partial(jshard.max, axis=axis)).lower(x).compile()
        assert kinds(compiled) == ({} if axis == -1 else {"all_reduce": 1})
        np.testing.assert_array_equal(compiled(x), cube.max(axis))


def test_reduction_over_no_axis_moves_nothing():
    with jshard.signal("inner"):
        np.testing.assert_array_equal(jshard.sum(X, axis=()), X)


def test_reductions_alike_are_one_program():
    x, before = place(X[:, :5], SPLITS["rows"]), _program._cache_size()
    assert jshard.sum(x, axis=(1, 0)) == jshard.sum(x, axis=(0, 1))
    assert _program._cache_size() == before + 1


def test_reduction_inside_a_shard_map_of_what_is_whole_or_without_a_configuration(mesh):
    np.testing.assert_array_equal(local(lambda x: jshard.sum(x, axis=0), jax.P())(X), X.sum(0))
    unload()
    f = jax.shard_map(jshard.sum, mesh=mesh(axis_types="auto", data=8), in_specs=jax.P("data"), out_specs=jax.P())
    assert f(X) == X.sum()


def test_reduction_by_a_kernel_is_told_where_devices_are_asked():
    x = place(X, SPLITS["rows"])
    with jshard.signal("rung"):
        assert jshard.max(x, axis=1).shape == (8,)
        for f, why in (
            (jshard.max, "which adds, and jshard.max does not"),
            (jshard.sum, "a kernel for TPUs, and this is cpu"),
        ):
            with pytest.raises(JShardError) as error:
                f(x)
            assert str(error.value) == (
                f'signal "rung" (<dict>) takes all_reduce by ring, {why}; write all_reduce: auto'
            )


def under_rows(x):
    with jshard.signal("rows"):
        return jshard.sum(x)


def test_reduction_without_a_configuration_is_the_plain_one():
    unload()
    assert jshard.sum(X) == X.sum()
    np.testing.assert_array_equal(jshard.max(X, axis=1, keepdims=True), X.max(1, keepdims=True))
    assert jshard.mean(X) == X.mean()


@pytest.mark.parametrize("axis_types", ["explicit", "auto"])
def test_reduction_on_any_mesh_of_an_array_that_lies_there_without_a_configuration(mesh, axis_types):
    unload()
    x = jax.device_put(X, jax.NamedSharding(mesh(axis_types=axis_types, data=8), jax.P("data")))
    for f in (jshard.sum, jax.jit(jshard.sum)):
        assert f(x) == X.sum()


def test_reduction_on_other_devices_than_the_loaded_mesh(mesh):
    x = jax.device_put(X, jax.NamedSharding(mesh(data=8), jax.P("data")))
    for f in (jshard.sum, jax.jit(jshard.sum)):
        result = f(x)
        assert result == X.sum() and result.sharding.mesh == mesh(data=8)


def local(f, spec):
    return jax.shard_map(f, mesh=jshard.mesh(), in_specs=spec, out_specs=jax.P())


def test_what_all_devices_along_an_axis_have_is_not_summed_over_it():
    """Rows are split over w, says the signal; inside this shard_map they are not."""
    whole_rows = jax.P(None, "v")
    with jshard.signal("both"):
        f = jax.shard_map(
            lambda x: jshard.sum(x, axis=0), mesh=jshard.mesh(), in_specs=whole_rows, out_specs=jax.P("v")
        )
        np.testing.assert_array_equal(f(place(X, whole_rows)), X.sum(0))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: jshard.sum(X, axis=2), "jshard.sum over axis 2 of a rank-2 array; use an axis from 0 to 1"),
        (lambda: jshard.sum(X, axis=3), "jshard.sum over axis 3 of a rank-2 array; use an axis from 0 to 1"),
        (
            lambda: under_rows(X[:3]),
            'signal "rows" (<dict>) splits axis 0 of size 3 over mesh axis "w" of size 4; use 4, or pad',
        ),
        (lambda: jshard.mean(2.0, axis=0), "jshard.mean over axis 0 of a rank-0 array; leave the axis out"),
        (lambda: jshard.max(X, axis=(0, -3)), "jshard.max over axis -3 of a rank-2 array; use an axis from 0 to 1"),
        (
            lambda: local(lambda x: jshard.mean(x, axis=0), jax.P("w", "v"))(place(X, SPLITS["both"])),
            "jshard.mean over axis 0 inside a shard_map can't tell which mesh axes of v, w split it; "
            "call it under a signal that says so, or reduce every axis: jshard.mean(x)",
        ),
    ],
)
def test_reduction_that_can_not_be_is_told_in_one_sentence(call, sentence):
    with pytest.raises(JShardError) as error:
        call()
    assert str(error.value) == sentence
