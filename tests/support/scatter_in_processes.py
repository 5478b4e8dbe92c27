"""What test_scattering.py runs in several processes: each checks what it got and prints what the test compares."""

from __future__ import annotations

import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType

import jshard
from jshard.errors import JShardError
from jshard.layouts import index_ranges as boxes
from jshard.layouts import p2p as carry
from jshard.layouts.gathering import on_host, put
from tests.support.processes import join

LAYOUTS = [(None, None), ("a", None), (None, ("b", "a")), ("a", "b")]  # replicated, rows, columns, both


def made(*shape, dtype=np.float32, seed=0):
    """Any bits there are: -0.0, infinities and every NaN among them."""
    random = np.random.default_rng(seed)
    if np.dtype(dtype) == bool:
        return random.integers(0, 2, shape).astype(bool)
    return random.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


def bits(x):
    return np.ascontiguousarray(x).tobytes()


def check_placement(y, layout, whole):
    assert isinstance(y, jax.Array)
    assert y.sharding == layout.sharding
    assert y.dtype == whole.dtype
    assert len(y.addressable_shards) == jax.local_device_count()
    for shard in y.addressable_shards:
        assert shard.data.shape == layout.shard_shape(whole.shape)
        assert bits(shard.data) == bits(whole[shard.index]), (layout, shard.index, whole.dtype)


def only_on(root, x):
    return x if jax.process_index() == root else None


def layouts_and_roots(mesh):
    """Parts take several blocks, which overlap."""
    for number, axes in enumerate(LAYOUTS):
        layout = jshard.Layout(mesh, *axes)
        whole = made(16, 24, seed=number)
        root = number % 2
        y = jshard.scatter(only_on(root, whole), layout, root=root)
        check_placement(y, layout, whole)
        gathered = jshard.gather(y, root=1 - root)
        assert (gathered is None) == (jax.process_index() != 1 - root)
        assert gathered is None or bits(gathered) == bits(whole)
        check_placement(jshard.scatter(only_on(root, whole), layout, root=root, method="broadcast"), layout, whole)
    assert bits(jshard.gather(y)) == bits(whole)
    check_placement(
        jshard.scatter(only_on(root, whole), jax.NamedSharding(mesh, jax.P("a", "b")), root=root), layout, whole
    )
    y = jshard.scatter(only_on(1, whole), jax.NamedSharding(mesh, jax.P("a")), root=1)  # the others don't know the rank
    check_placement(y, jshard.Layout(mesh, "a", None), whole)
    with mock.patch.object(carry, "EVERYONE", ("cpu",)):  # as on TPUs
        check_placement(jshard.scatter(only_on(root, whole), layout, root=root), layout, whole)


def dtypes(mesh):
    for dtype in (bool, np.int8, np.uint16, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.complex64):
        layout, whole = jshard.Layout(mesh, "a", "b"), made(8, 16, dtype=dtype)
        if np.dtype(dtype) == np.complex64:
            whole = np.arange(128).reshape(8, 16).astype(dtype) * 1j
        y = jshard.scatter(only_on(1, whole), layout, root=1)
        check_placement(y, layout, whole)
        assert bits(jshard.gather(y)) == bits(whole)
    for shape in ((), (0, 4), (8,), (4, 2, 2, 8)):
        layout, whole = jshard.Layout(mesh, *(("a" if size == 8 else None) for size in shape)), made(*shape)
        check_placement(jshard.scatter(only_on(0, whole), layout), layout, whole)


def gradients(mesh):
    """The root's array gets its gradient; the others, who gave an empty array, get an empty one."""
    layout = jshard.Layout(mesh, "a", "b")
    x, w = np.arange(128, dtype=np.float32).reshape(8, 16), np.arange(128, dtype=np.float32).reshape(8, 16)[::-1]
    weights = jshard.scatter(only_on(0, w), layout)

    @jax.jit
    def total(y, weights):
        return jnp.sum(y * y * weights)

    with jax.set_mesh(mesh):
        given = x if jax.process_index() == 1 else np.empty(0, np.float32)
        gradient = jax.grad(lambda x: total(jshard.scatter(x, layout, root=1), weights))(given)
        expected = 2 * x * w if jax.process_index() == 1 else np.empty(0, np.float32)
        assert gradient.shape == expected.shape
        np.testing.assert_array_equal(gradient, expected)
        back = jax.grad(lambda y: jnp.sum(jshard.gather(y) * w))(jshard.scatter(only_on(0, x), layout))
    check_placement(back, layout, w)


def puts(mesh):
    """What every process has, keys of random numbers too, and back."""
    keys, where = jax.random.split(jax.random.key(0), 8), jax.NamedSharding(mesh, jax.P("a"))
    y = put(keys, where)
    assert (y.dtype, y.sharding) == (keys.dtype, where)
    assert bits(on_host(jax.random.key_data(y))) == bits(jax.random.key_data(keys))
    whole = made(8, 4)
    check_placement(put(whole, jax.NamedSharding(mesh, jax.P("a", None))), jshard.Layout(mesh, "a", None), whole)
    assert bits(on_host(put(whole, jax.NamedSharding(mesh, jax.P())))) == bits(whole)


def moves(mesh):
    """To half of the devices, a process each still having one or half of the processes having none; to the host, and back."""
    layout = jshard.Layout(mesh, "a", "b")
    whole = made(8, 16)
    tree = {"w": jshard.scatter(only_on(0, whole), layout), "count": 3, "own": jnp.full(3, 4.0)}
    half = jax.sharding.Mesh(mesh.devices[:, :1], ("a", "b"), axis_types=mesh.axis_types)
    for to in (half, jax.devices()[: mesh.size // 2][::-1]):
        moved, own = (jshard.place(tree, to)[key] for key in ("w", "own"))
        assert own.sharding.device_set == moved.sharding.device_set
        assert all((np.asarray(shard.data) == 4).all() for shard in own.addressable_shards)
        assert jshard.gather(own).tolist() == jshard.gather(tree["own"]).tolist() == [4, 4, 4]
        assert moved.sharding.num_devices == mesh.size // 2
        for shard in moved.addressable_shards:
            assert bits(shard.data) == bits(whole[shard.index])
            assert shard.data.size == whole.size // (mesh.size // 2)
        assert bits(jshard.gather(moved)) == bits(whole)
        check_placement(jshard.place({"w": moved}, mesh)["w"], layout, whole)
    away = jshard.place(tree, jax.memory.Space.Host)
    assert away["w"].sharding.memory_kind == "pinned_host"
    assert away["count"] == 3
    check_placement(jshard.place(away, mesh)["w"], layout, whole)


def faults(mesh):
    """Each is the same sentence on all processes, and nobody waits for anybody afterwards."""
    me = jax.process_index()
    x = np.zeros((8, 4), np.float32)
    layout = jshard.Layout(mesh, "a", None)
    own = jax.sharding.Mesh(np.array(jax.local_devices()), ("w",))
    shared = jshard.scatter(only_on(0, x), layout)
    calls = {
        "nobody gives": lambda: jshard.scatter(None, layout),
        "all give": lambda: jshard.scatter(x, layout, root=1),
        "root": lambda: jshard.scatter(x, layout, root=jax.process_count()),
        "method": lambda: jshard.scatter(only_on(0, x), layout, method="brodcast"),
        "other roots": lambda: jshard.scatter(only_on(0, x), layout, root=int(me == 1)),
        "rank": lambda: jshard.scatter(only_on(0, x[0]), layout),
        "shape": lambda: jshard.scatter(only_on(0, x[:5]), layout),
        "double": lambda: jshard.scatter(only_on(0, x.astype(np.float64)), layout),
        "words": lambda: jshard.scatter(only_on(0, np.array(["a"])), layout),
        "scattered": lambda: jshard.scatter(only_on(0, shared), layout),
        "own meshes": lambda: jshard.scatter(only_on(0, x[:, 0]), jshard.Layout(own, "w")),
        "one shared": lambda: jshard.gather(jnp.ones(2) if me else shared),
        "gather root": lambda: jshard.gather(jnp.ones(3), root=-1),
        "gather roots": lambda: jshard.gather(shared, root=me),
        "move": lambda: jshard.place(shared, jax.devices()[2 * me : 2 * me + 2]),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
        except JShardError as error:
            told[name] = str(error)
    return told


def sums():
    """A reduce-scatter, and the gradient of an all-gather, add in the order of devices, whichever part is whose."""
    count = jax.device_count()
    line = jshard.Layout(jax.make_mesh((count,), ("d",), axis_types=(AxisType.Explicit,)), "d", None)
    whole = np.random.default_rng(0).normal(size=(count * count, 33)).astype(np.float32)
    expected = np.zeros((count, 33), np.float32)
    for part in whole.reshape(count, count, 33):
        expected += part

    def body(x):
        gathered, pull = jax.vjp(lambda x: jshard.collectives.all_gather(x, "d"), x[:1])
        del gathered
        return jshard.collectives.reduce_scatter(x, "d"), *pull(x)

    run = jax.jit(jax.shard_map(body, mesh=line.mesh, in_specs=jax.P("d"), out_specs=(jax.P("d"), jax.P("d"))))
    for found in run(jshard.scatter(only_on(0, whole), line)):
        check_placement(found, line, expected)


def main(*words):
    join()
    count = jax.device_count()
    mesh = jax.make_mesh((count // 2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    told = {}
    boxes.BLOCK = 100
    layouts_and_roots(mesh)
    gradients(mesh)
    puts(mesh)
    moves(mesh)
    sums()
    if "all" in words:
        dtypes(mesh)
        told["faults"] = faults(mesh)
    eight = jshard.scatter(only_on(0, np.arange(1.0, 9.0, dtype=np.float32)), jshard.Layout(mesh, ("a", "b")))
    told["eight"] = [shard.data.tolist() for shard in eight.addressable_shards]
    print("told " + json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
