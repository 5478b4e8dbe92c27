"""GT's own form: it loads unchanged and places as it says; forward and backward on different devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jshard.errors import JShardError
from jshard.inspect.ledger.ledger import read
from jshard.layers import Linear, matmul
from jshard.signals.active_config import load, mesh, unload
from jshard.signals.scope import signal

pytestmark = pytest.mark.usefixtures("nothing_loaded")

X = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)


def devices(x) -> list[int]:
    return sorted(device.id for device in x.devices())


def shards(x) -> dict[int, np.ndarray]:
    return {shard.device.id: np.asarray(shard.data) for shard in x.addressable_shards}


@pytest.mark.parametrize("path", ["arrays", "compiled", "stages", "pipeline"])
def test_example_configurations_load_unchanged(path):
    assert load(f"examples/gt/{path}.yaml").signals


def test_workers_null_is_all_devices():
    load("examples/gt/arrays.yaml")
    x = signal.tensor(X, name="batch")
    assert devices(x) == list(range(8))
    for worker, part in shards(x).items():
        np.testing.assert_array_equal(part, X[worker : worker + 1])


def test_axis_and_workers_place_an_array():
    load("examples/gt/arrays.yaml")
    x = signal.tensor(X, name="features")
    assert devices(x) == [0, 1]
    np.testing.assert_array_equal(shards(x)[0], X[:, :2])
    np.testing.assert_array_equal(shards(x)[1], X[:, 2:])


def test_replicated_is_whole_on_every_worker():
    load("examples/gt/arrays.yaml")
    x = signal.tensor(X, name="weights")
    assert devices(x) == list(range(8))
    for part in shards(x).values():
        np.testing.assert_array_equal(part, X)


def test_workers_in_another_order_hold_the_parts_in_that_order():
    load({"s": {"shard": {"axis": 0, "workers": [3, 1]}}})
    x = signal.tensor(X, name="s")
    np.testing.assert_array_equal(shards(x)[3], X[:4])
    np.testing.assert_array_equal(shards(x)[1], X[4:])


def test_tensor_uses_the_active_signal_in_and_out_of_jit():
    load(
        {
            "jshard": {"mesh": {"data": 2, "tensor": 4}},
            "s": {"row": "data", "column": "tensor"},
            "t": {"shard": {"axis": -1, "mesh": "data"}},
        }
    )
    with signal("s"):
        x = signal.tensor(X)
        y = jax.jit(lambda x: signal.tensor(x, name="t"))(x)
        z = jax.jit(signal.tensor)(X)
    assert x.sharding.spec == P("data", "tensor")
    assert y.sharding.spec == P(None, "data")
    assert z.sharding.spec == P("data", "tensor")
    for each in (x, y, z):
        np.testing.assert_array_equal(each, X)


def test_tensor_that_does_not_divide_is_one_sentence():
    load({"s": {"shard": {"axis": 0, "workers": [0, 1, 2]}}})
    with pytest.raises(JShardError) as caught:
        signal.tensor(X, name="s")
    assert (
        str(caught.value)
        == 'signal "s" (<dict>) splits axis 0 of size 8 over mesh axis "workers" of size 3; use 6 or 9, or pad'
    )


@pytest.mark.parametrize("axis", [-3, 2, 3])
def test_axis_that_the_array_does_not_have_is_one_sentence(axis):
    load({"s": {"shard": {"axis": axis, "workers": [0, 1]}}, "first": {"shard": {"axis": -2, "workers": [0, 1]}}})
    with pytest.raises(JShardError) as caught:
        signal.tensor(X, name="s")
    assert str(caught.value) == f'signal "s" (<dict>) shards axis {axis} of a rank-2 array; use 0 or 1'
    np.testing.assert_array_equal(shards(signal.tensor(X, name="first"))[1], X[4:])


def test_worker_that_does_not_exist_is_one_sentence():
    load({"s": {"shard": {"axis": 0, "workers": [0, 9]}}})
    with pytest.raises(JShardError) as caught:
        signal.tensor(X, name="s")
    assert (
        str(caught.value) == 'signal "s" (<dict>) names worker 9, but the mesh has 8 devices; use numbers from 0 to 7'
    )


def test_rank_0_array_can_not_be_split():
    load({"jshard": {"mesh": {"data": 2}}, "s": {"row": "data"}})
    with pytest.raises(JShardError) as caught:
        signal.tensor(3.0, name="s")
    assert str(caught.value) == 'signal "s" (<dict>) splits a rank-0 array; place it outside the signal'


def test_a_mesh_larger_than_the_machine_is_one_sentence():
    load({"jshard": {"mesh": {"data": 4, "tensor": 4}}})
    with pytest.raises(JShardError) as caught:
        mesh()
    assert str(caught.value) == (
        "jshard.mesh (<dict>) asks for data 4 x tensor 4 = 16 devices, but 8 are here; make it smaller, or pretend with "
        "JAX_NUM_CPU_DEVICES=16 PJRT_NPROC=32 JAX_PLATFORMS=cpu"
    )


def test_an_open_mesh_axis_that_does_not_come_out_even_is_one_sentence():
    load({"jshard": {"mesh": {"data": -1, "tensor": 3}}})
    with pytest.raises(JShardError) as caught:
        mesh()
    assert str(caught.value) == (
        'jshard.mesh (<dict>) leaves mesh axis "data" open, but 8 devices do not divide by 3; give sizes whose product divides 8'
    )


def test_no_configuration_has_no_mesh():
    unload()
    with pytest.raises(JShardError) as caught:
        mesh()
    assert str(caught.value) == 'no configuration is loaded; call jshard.load("configs/mlp.yaml") or set JSHARD_CONFIG'


# -- backward elsewhere (G8) --


@pytest.mark.quick("1")
@pytest.mark.parametrize("axis", [0, 1])
def test_forward_on_some_devices_and_backward_on_others(axis):
    load(
        {
            "f": {"shard": {"axis": axis, "workers": [0, 1]}, "backward": "b"},
            "b": {"shard": {"axis": axis, "workers": [2, 3]}},
        }
    )
    with signal("f"):
        layer = Linear(4, 6, rngs=nnx.Rngs(0))
        x = signal.tensor(X)
        y = layer(x)
    assert [devices(each) for each in (layer.kernel[...], x, y)] == [[0, 1]] * 3

    def loss(layer, x):
        with signal("f"):
            return jnp.sum(layer(x) ** 2)

    gradients = jax.grad(loss, argnums=(0, 1))(layer, x)
    plain = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    expected = jax.grad(lambda layer, x: jnp.sum(layer(x) ** 2), argnums=(0, 1))(plain, X)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert devices(ours) == [2, 3]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_context_gives_a_backward_that_the_configuration_does_not():
    load({"f": {"shard": {"axis": 0, "workers": [0, 1]}}, "b": {"shard": {"axis": 0, "workers": [2, 3]}}})
    w = np.ones((4, 6), np.float32)

    def loss(x):
        with signal.context("f", backward="b"):
            return jnp.sum(matmul(x, w))

    assert devices(jax.grad(loss)(signal.tensor(X, name="f"))) == [2, 3]
    with pytest.raises(JShardError) as caught, signal.context("f", backward="bb"):
        pass
    assert str(caught.value) == 'signal "bb" is not in <dict>; did you mean "b"?'


def test_the_cotangent_of_a_placed_array_lies_as_its_backward_says():
    load(
        {
            "f": {"shard": {"axis": 0, "workers": [0, 1]}, "backward": "b"},
            "b": {"shard": {"axis": 1, "workers": [2, 3]}},
        }
    )
    gradient = jax.grad(lambda x: jnp.sum(signal.tensor(x, name="f") ** 2))(signal.tensor(X, name="f"))
    assert devices(gradient) == [2, 3]
    np.testing.assert_array_equal(shards(gradient)[2], 2 * X[:, :2])


def test_backward_on_other_devices_inside_jit_is_one_sentence():
    load(
        {
            "f": {"shard": {"axis": 0, "workers": [0, 1]}, "backward": "b"},
            "b": {"shard": {"axis": 0, "workers": [2, 3]}},
        }
    )
    with signal("f"):
        layer = Linear(4, 6, rngs=nnx.Rngs(0))
        x = signal.tensor(X)
    with pytest.raises(JShardError) as caught:
        jax.jit(jax.grad(lambda x: jnp.sum(layer(x))))(x)
    assert str(caught.value) == (
        'signal "b" (<dict>) has its own devices for a backward, which one compiled program can\'t reach; call jax.grad '
        'outside jax.jit, or give signal "b" mesh axes instead of workers'
    )


def test_a_cotangent_that_goes_to_other_devices_inside_a_program_is_one_sentence():
    load(
        {
            "f": {"shard": {"axis": 0, "workers": [0, 1]}, "backward": "b"},
            "b": {"shard": {"axis": 0, "workers": [2, 3]}},
        }
    )
    with pytest.raises(JShardError) as caught:
        jax.make_jaxpr(jax.grad(lambda x: jnp.sum(signal.tensor(x, name="f"))))(X)
    assert str(caught.value) == (
        'signal "b" (<dict>) is on workers 2, 3 and signal "f" (<dict>) on workers 0, 1, but one program or gradient can\'t '
        "span both; call jshard.shard(model), which makes their workers stages of one mesh, or name the same workers for both"
    )


ROWS = {"jshard": {"mesh": {"data": 2, "tensor": 4}}, "f": {"row": "data", "backward": "b"}, "whole": {}}


@pytest.mark.parametrize(("backward", "moves"), [({"row": "data"}, [0, 2, 1]), ({"column": "tensor"}, [2, 2, 2])])
def test_the_cotangent_of_a_typed_array_goes_back_to_where_the_array_was(backward, moves):
    load({**ROWS, "b": backward})
    for spec, count in zip([P("data", None), P(None, "tensor"), P(None, None)], moves, strict=True):
        x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=jax.NamedSharding(mesh(), spec))
        program = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(signal.tensor(x, name="f") ** 2)))(x)
        assert program.out_avals[0].sharding.spec == spec
        assert len(read(program).lines) == count


def test_a_backward_on_workers_of_a_typed_array_is_one_sentence():
    load({**ROWS, "b": {"shard": {"axis": 0, "workers": [2, 3]}}})
    x = signal.tensor(X, name="f")
    with pytest.raises(JShardError) as caught:
        jax.vjp(lambda x: signal.tensor(x, name="f"), x)[1](x)
    assert str(caught.value) == (
        'signal "b" (<dict>) can\'t have the cotangent of an array on an explicit mesh, which stays on that mesh; give signal '
        '"b" mesh axes instead of workers'
    )


def test_tensor_inside_a_shard_map_is_one_sentence():
    load({"jshard": {"mesh": {"data": 8}}, "s": {"row": "data"}})
    with pytest.raises(JShardError) as caught:
        jax.shard_map(lambda x: signal.tensor(x, name="s"), mesh=mesh(), in_specs=P("data"), out_specs=P("data"))(
            signal.tensor(X, name="s")
        )
    assert str(caught.value) == (
        "signal \"s\" (<dict>) can't place an array inside a shard_map, where x is one device's part already; place it "
        "before: jshard.signal.tensor(x) outside the shard_map"
    )
