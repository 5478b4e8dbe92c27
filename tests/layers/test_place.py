"""`jshard.place` of models and trees: a model moves to fewer devices, to the host and back; no device ever holds more than its part."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from jshard.errors import JShardError
from jshard.layers import transfer
from jshard.layouts import index_ranges as boxes
from jshard.signals.active_config import unload
from tests.support import cases

SIGNALS = {"up": {"column": "w"}, "down": {"reduction": "w"}}
KERNEL = 784 * 128


class Model(nnx.Module):
    def __init__(self, rngs):
        with jshard.signal("up"):
            self.up = jshard.Linear(784, 128, rngs=rngs)
        with jshard.signal("down"):
            self.down = jshard.Linear(128, 10, rngs=rngs)
        self.again = self.down  # the same module by another name
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.fixture(params=["explicit", "auto"])
def model(request):
    jshard.load({"jshard": {"mesh": {"w": 4}, "axis_types": request.param}, **SIGNALS})
    yield Model(nnx.Rngs(0))
    unload()


def numbers(model):
    return {path: np.asarray(leaf) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def assert_equal(one, other):
    assert numbers(one).keys() == numbers(other).keys()
    for path, number in numbers(one).items():
        np.testing.assert_array_equal(number, numbers(other)[path])


def live():
    gc.collect()
    return {id(array): array for array in jax.live_arrays()}


def parts(arrays):
    """The bytes that each device holds of these; some are views of others."""
    held: dict[object, dict[int, int]] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            held.setdefault(shard.device, {})[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device: sum(buffers.values()) for device, buffers in held.items()}


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["mesh", "devices", "numbers"])
def test_model_moves_to_fewer_devices(model, name):
    chosen = jax.devices()[5:7]
    mesh = jax.sharding.Mesh(np.array(chosen), ("w",), axis_types=model.up.kernel[...].sharding.mesh.axis_types)
    before = live()
    small = jshard.place(model, {"mesh": mesh, "devices": chosen, "numbers": [5, 6]}[name])
    for path, leaf in nnx.to_flat_state(nnx.state(small, nnx.Param)):
        old = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))[path][...]
        assert leaf[...].sharding == NamedSharding(mesh, old.sharding.spec), path
    assert small.up.kernel[...].addressable_shards[0].data.shape == (784, 64)
    assert small.down.kernel[...].addressable_shards[0].data.shape == (64, 10)
    assert_equal(small, model)
    made = [array for key, array in live().items() if key not in before]
    assert all(shard.data.size <= KERNEL // 2 for array in made for shard in array.addressable_shards)
    held = parts(array for array in made if set(chosen) & array.sharding.device_set)
    assert set(held) == set(chosen)
    half = 4 * (KERNEL + 128 + 128 * 10) // 2 + 4 * 10
    assert all(half <= each <= half + 64 for each in held.values())  # and a few for the state of dropout


@pytest.mark.quick("auto")
def test_model_on_fewer_devices_computes_the_same(model):
    x = np.random.default_rng(0).integers(-3, 4, (8, 784)).astype(np.float32)
    whole = np.asarray(jax.jit(lambda model, x: model(x))(model, x))
    kind = "explicit" if jax.sharding.AxisType.Explicit in jshard.mesh().axis_types else "auto"
    jshard.load({"jshard": {"mesh": {"w": 2}, "axis_types": kind}, **SIGNALS})
    small = jshard.place(model, jshard.mesh())
    np.testing.assert_allclose(jax.jit(lambda model, x: model(x))(small, x), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("auto")
def test_no_device_holds_a_whole_kernel_on_the_way(model, monkeypatch):
    """Not for a moment: every array that comes into being is seen."""
    monkeypatch.setattr(boxes, "BLOCK", 2**12)
    seen, before = [], live()
    wait = jax.block_until_ready

    def watched(x):
        made = [array for array in jax.live_arrays() if id(array) not in before]
        seen.append(max((shard.data.nbytes for array in made for shard in array.addressable_shards), default=0))
        return wait(x)

    monkeypatch.setattr(jax, "block_until_ready", watched)
    jshard.place(model, jax.devices()[4:6])
    assert len(seen) > 50
    assert 4 * KERNEL // 8 <= max(seen) <= 4 * KERNEL // 2


@pytest.mark.quick("auto")
def test_model_moves_to_the_host_and_back(model):
    mesh = model.up.kernel[...].sharding.mesh
    before = live()
    away = jshard.place(model, jax.memory.Space.Host)
    for _, leaf in nnx.to_flat_state(nnx.state(away)):
        assert leaf[...].sharding.memory_kind == "pinned_host"
    assert away.up.kernel[...].addressable_shards[0].data.shape == (784, 32)
    assert all(a.sharding.memory_kind == "pinned_host" for key, a in live().items() if key not in before)
    assert_equal(away, model)
    back = jshard.place(away, mesh)
    assert back.up.kernel[...].sharding == model.up.kernel[...].sharding
    assert_equal(back, model)
    elsewhere = jshard.place(away, jax.devices()[6:8])
    assert elsewhere.up.kernel[...].sharding.device_set == set(jax.devices()[6:8])
    assert elsewhere.up.kernel[...].sharding.memory_kind == "device"
    assert_equal(elsewhere, model)


def test_place_keeps_what_is_shared_shared_and_keys_keys(model):
    small = jshard.place(model, [0, 1])
    assert small.again is small.down
    assert small.again.kernel is small.down.kernel
    assert small.down is not model.down
    key, old = small.dropout.rngs.key[...], model.dropout.rngs.key[...]
    assert key.dtype == old.dtype
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(old))


def test_optimizer_moves_with_its_model(model):
    optimizer = jshard.Optimizer(model, optax.adam(1e-3))
    small, moved = jshard.place((model, optimizer), [2, 3])
    for leaf in jax.tree.leaves(nnx.state((small, moved))):
        assert leaf.sharding.device_set == set(jax.devices()[2:4])
    assert moved.opt_state[0].mu["up"]["kernel"][...].addressable_shards[0].data.shape == (784, 64)


def test_place_moves_the_arrays_of_any_tree_and_leaves_the_rest(mesh):
    line = mesh(a=2, b=4)
    x = jshard.scatter(np.arange(64, dtype=np.float32).reshape(8, 8), jshard.Layout(line, "a", "b"))
    host = np.ones(3)
    moved = jshard.place({"x": x, "y": [x, jnp.float32(2), 7, "word", host, None]}, jax.devices()[:4])
    assert moved["x"] is moved["y"][0]
    assert dict(moved["x"].sharding.mesh.shape) == {"a": 1, "b": 4}
    np.testing.assert_array_equal(moved["x"], x)
    assert len(moved["y"][1].sharding.device_set) == 4
    np.testing.assert_array_equal(placed := moved["y"][4], host)
    assert len(placed.sharding.device_set) == 4
    assert [*moved["y"][2:4], moved["y"][5]] == [7, "word", None]
    alone = jshard.place(x, [7])
    assert alone.sharding.device_set == {jax.devices()[7]}
    np.testing.assert_array_equal(alone, x)
    grown = jshard.place(alone, line)
    assert grown.sharding.is_equivalent_to(x.sharding, 2)


def test_place_of_a_plain_model_is_to_whole_arrays():
    moved = jshard.place(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), [3])
    assert moved.kernel[...].devices() == {jax.devices()[3]}


SIGNAL = {"jshard": {"mesh": {"data": 2, "tensor": 4}}, "inputs": {"row": "data"}}


def test_place_of_a_tree_is_that_of_each_array_by_a_layout_and_by_a_signal():
    batch = {"x": np.ones((8, 4), np.float32), "y": [jnp.arange(8), 7]}
    assert jshard.place(batch, "inputs")["x"] is batch["x"]  # nothing is loaded
    with cases.loaded(SIGNAL) as mesh:
        for to in ("inputs", P("data"), NamedSharding(mesh, P("data"))):
            placed = jshard.place(batch, to)
            assert [leaf.sharding.spec[0] for leaf in (placed["x"], placed["y"][0])] == ["data"] * 2
            assert placed["y"][1] == 7
            compiled = jax.jit(lambda x, to=to: jshard.place({"x": x}, to))(batch["x"])
            cases.assert_lies(compiled["x"], P("data"))
        model = jshard.place(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), P("data"))
        assert {leaf.sharding.shard_shape(leaf.shape)[0] for leaf in jax.tree.leaves(nnx.state(model))} == {4}


def test_place_on_one_device_by_a_sharding_a_device_or_its_number():
    device = jax.devices()[3]
    for to in (jax.sharding.SingleDeviceSharding(device), device, [device], [3]):
        assert jshard.place({"w": np.ones(4)}, to)["w"].devices() == {device}


def test_place_brings_an_array_back_from_its_host_to_the_layout_that_it_has(mesh):
    line = jshard.Layout(mesh(a=4), "a")
    away = jshard.place(jshard.place(np.arange(8.0), line), jax.memory.Space.Host)
    back = jshard.place(away, line)
    assert (away.sharding.memory_kind, back.sharding.memory_kind) == ("pinned_host", "device")
    np.testing.assert_array_equal(back, np.arange(8.0))


def test_place_refuses_a_signal_for_a_model_and_devices_inside_jit():
    with cases.loaded(SIGNAL):
        for call, sentence in (
            (
                lambda: jshard.place(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "inputs"),
                'jshard.place of a Linear to signal "inputs", but signals claim its parameters one by one; '
                "write jshard.shard(model, x), or name a mesh",
            ),
            (
                lambda: jax.jit(lambda x: jshard.place(x, [0]))(1.0),
                "jshard.place to a mesh, devices or a memory was called inside jit, which runs on one mesh; "
                'name a layout, as in jax.P("data"), or call it outside of jit',
            ),
            (lambda: jshard.place(1.0, "input"), 'signal "input" is not in <dict>; did you mean "inputs"?'),
        ):
            with pytest.raises(JShardError) as error:
                call()
            assert str(error.value) == sentence


def test_devices_that_reach_no_memory_of_their_host_are_told(monkeypatch):
    """All that JAX pretends do; a plugin may have devices that do not."""
    monkeypatch.setattr(transfer, "HOST", "elsewhere")
    with pytest.raises(JShardError, match="^cpu reaches no memory of its host through JAX; use jax.tree.map"):
        jshard.place(jnp.ones(3), jax.memory.Space.Host)


def test_place_refuses_where_nothing_can_go(mesh):
    line = mesh(a=4)
    x = jshard.scatter(np.zeros((8, 3), np.float32), jshard.Layout(line, "a", None))
    y = jax.device_put(np.zeros(4, np.float32), NamedSharding(mesh(b=2), P("b")))
    for model, to, sentence in (
        ({"w": x}, jax.memory.Space.Any, "jshard.place to MemorySpace.Any; use jax.memory.Space.Host, a mesh or devices"),
        ({"w": x}, ["cpu:1"], "jshard.place to a str in a list; list devices, or their numbers"),
        ({"k": x}, mesh(b=2), 'jshard.place: k is split over mesh axis "a", which the mesh {b: 2} does not have; '
         "give the mesh an axis a, if only of size 1"),
        ({"w": np.ones(2)}, [], "jshard.place to 0 devices, over which the mesh {devices: 1} can't be made smaller; "
         "give it a number of devices that divides 1, or a mesh"),
        ({"w": x}, [9], "jshard.place to device 9, but 8 are here; use 0 to 7"),
        ({"w": x}, mesh(b=2), 'jshard.place: w is split over mesh axis "a", which the mesh {b: 2} does not have; '
         "give the mesh an axis a, if only of size 1"),
        ({"w": x}, mesh(a=3 * 2), 'jshard.place: w splits axis 0 of size 8 over mesh axis "a" of size 6; use 6 or 12, or pad'),
        ({"w": x}, [0, -1], "jshard.place to device -1, but 8 are here; use 0 to 7"),
        ({"w": x}, [0, 8], "jshard.place to device 8, but 8 are here; use 0 to 7"),
        ({"w": x}, [0, 1, 2], "jshard.place to 3 devices, over which the mesh {a: 4} can't be made smaller; "
         "give it a number of devices that divides 4, or a mesh"),
        ({"w": x}, [], "jshard.place to 0 devices, over which the mesh {a: 4} can't be made smaller; "
         "give it a number of devices that divides 4, or a mesh"),
        ({"w": np.ones(2)}, [2, 3], "jshard.place to 2 devices, over which the mesh {devices: 1} can't be made smaller; "
         "give it a number of devices that divides 1, or a mesh"),
        ({"w": x, "v": y}, [0, 1], "jshard.place to 2 devices of arrays on 2 meshes; name the mesh: jshard.place(model, mesh)"),
    ):  # fmt: skip
        with pytest.raises(JShardError) as raised:
            jshard.place(model, to)
        assert str(raised.value) == sentence
