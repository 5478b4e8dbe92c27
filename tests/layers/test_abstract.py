"""A model of shapes alone lies where the real one lies, and costs no memory."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.layers.creating import abstract, created
from jshard.layouts.mesh import absent_mesh
from jshard.signals.active_config import on_mesh, unload

SIGNALS = {
    "up": {"row": "data", "column": "tensor", "store": {"optimizer": "data"}},
    "down": {"row": "data", "reduction": "tensor", "store": "data"},
}


class Model(nnx.Module):
    def __init__(self, features: int = 16, *, rngs: nnx.Rngs):
        self.mlp = jshard.MLP(8, features, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)


def built(features: int = 16):
    model = Model(features, rngs=nnx.Rngs(0))
    return model, jshard.Optimizer(model, optax.adamw(1e-3))


@pytest.fixture(params=["explicit", "auto"], autouse=True)
def _loaded(request):
    jshard.load({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": request.param}, **SIGNALS})
    yield
    unload()


def leaves(made):
    return jax.tree_util.tree_flatten_with_path(nnx.state(made))[0]


def test_abstract_lies_as_the_real_one():
    real, shapes = leaves(built()), leaves(abstract(built))
    assert [path for path, _ in shapes] == [path for path, _ in real]
    for (path, shape), (_, array) in zip(shapes, real, strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype), path
        if isinstance(array.sharding, jax.NamedSharding):  # what no signal places is on one device until it is settled
            assert shape.sharding.is_equivalent_to(array.sharding, array.ndim), path
        else:
            assert shape.sharding.spec == jax.P(), path


def test_abstract_makes_no_array_however_large():
    gc.collect()
    before = len(jax.live_arrays())
    model, optimizer = abstract(lambda: built(2**33))  # 2 TB, and twice that in the optimizer
    gc.collect()
    assert len(jax.live_arrays()) <= before
    assert model.mlp.up.kernel.shape == (8, 2**33)
    assert optimizer.opt_state[0].mu.mlp.up.kernel.shape == (8, 2**33)


def test_abstract_needs_no_device_of_the_mesh():
    jshard.load({"jshard": {"mesh": {"data": 8, "tensor": 512}}, **SIGNALS})
    absent = absent_mesh({"data": 8, "tensor": 512})
    with on_mesh(absent):
        model, _ = abstract(lambda: built(4096))
    assert model.mlp.up.kernel.sharding == jax.NamedSharding(absent, jax.P(None, "tensor"))


def test_abstract_without_a_configuration_is_plain_shapes():
    unload()
    assert {type(leaf) for _, leaf in leaves(abstract(built))} == {jax.ShapeDtypeStruct}


def test_created_parameters_rest_in_the_dtype_that_their_signal_says():
    jshard.load(
        {"jshard": {"mesh": {"data": 8}}, "all": {"store": "data", "dtype": {"param": "bfloat16"}, "match": ["**"]}}
    )
    linear = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    kernel = created(linear, lambda: jshard.shard(linear(), jax.ShapeDtypeStruct((8, 8), np.float32))).kernel[...]
    assert kernel.addressable_shards[0].data.shape == (1, 8)
    np.testing.assert_array_equal(kernel, linear().kernel.astype(jnp.bfloat16))
