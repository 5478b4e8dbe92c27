"""A function and its arguments as they are traced: which arrays, under which names, and whether a backward pass is added."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.inspect.ledger.tracing import Traced, is_array, ledger_of

MODEL = nnx.eval_shape(lambda: nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0)))
X = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("args", "kwargs", "names"),
    [
        ((MODEL, X), {}, [("kernel",), None]),
        ((X, (MODEL,)), {}, [("kernel",), None]),
        (({"a": MODEL},), {}, [("a", "kernel")]),
        ((X,), {"model": MODEL}, [("kernel",), None]),
    ],
    ids=["an argument", "in a tuple", "in a dict", "a keyword"],
)
def test_parameters_are_named_by_their_path_in_the_model(args, kwargs, names):
    assert Traced(len, args, kwargs).parameters == names


@pytest.mark.parametrize(("sizes", "found"), [((1,), []), ((2,), [2]), ((1, 2, 8), [2, 8])])
def test_meshes_are_those_of_several_devices(sizes, found, mesh):
    spread = [jax.NamedSharding(mesh(data=size), jax.P()) for size in sizes]
    shapes = [jax.ShapeDtypeStruct((8,), jnp.float32, sharding=each) for each in spread]
    assert sorted(each.size for each in Traced(len, (X, *shapes), {}).meshes) == found


@pytest.mark.parametrize(
    ("f", "x", "lacks"),
    [
        (jnp.sin, X, True),
        (jax.grad(lambda x: x.sum()), X, False),
        (lambda x: x.astype(int), X, False),
        (lambda x: x * 1.0, np.ones(3, np.int32), False),
    ],
    ids=["smooth", "a gradient", "to whole numbers", "of whole numbers"],
)
def test_a_backward_pass_is_added_where_there_can_be_one_and_is_none(f, x, lacks):
    assert Traced(f, (x,), {}).lacks_backward(None) is lacks


def test_an_array_has_a_shape_and_a_dtype():
    has = types.SimpleNamespace
    assert is_array(X) and not is_array(has(shape=())) and not is_array(has(dtype=X.dtype))


def constrained(x):
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(jshard.mesh(), jax.P("data")))


def moved(x):
    return jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=jshard.mesh(), in_specs=jax.P("data"), out_specs=jax.P()
    )(x)


@pytest.mark.parametrize(
    ("loaded", "lies", "f", "found"),
    [
        (None, ["auto"], jnp.sin, True),
        (None, ["explicit"], jnp.sin, False),
        (None, ["explicit", "auto"], lambda x, y: (x, y), True),
        (None, [None], jnp.sin, False),
        ("auto", [None], jnp.sin, False),
        ("auto", [None], jnp.cos, False),
        ("auto", [None], constrained, True),
        ("auto", [None], moved, True),
        ("auto", ["auto"], jnp.sin, True),
        ("auto", ["explicit"], jnp.sin, True),
        ("explicit", ["explicit"], jnp.sin, False),
        ("explicit", ["auto"], jnp.sin, False),
    ],
)
def test_a_ledger_says_where_the_compiler_adds_to_it(loaded, lies, f, found, mesh):
    meshes = {axis_types: mesh(data=2, axis_types=axis_types) for axis_types in ("auto", "explicit")}
    shardings = [each and jax.NamedSharding(meshes[each], jax.P("data")) for each in lies]
    arrays = tuple(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=each) for each in shardings)
    jshard.unload()
    if loaded:
        jshard.load({"jshard": {"mesh": {"data": 2}, "axis_types": loaded}})
    assert ledger_of(Traced(f, arrays, {}), [], backward=False).is_auto is found
