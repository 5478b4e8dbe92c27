"""A Pallas kernel's traffic is what it declares, and one that sends to other devices has to declare."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import jshard
from jshard.errors import JShardError
from jshard.inspect.ledger import read
from jshard.inspect.plan import explain
from jshard.kernels.kernel_traffic import declare
from jshard.signals.active_config import unload


def doubled(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def kernel(x, body=doubled, **arguments):
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, **arguments)(x)


def sent_to_the_next(x_ref, o_ref, send, receive):
    device = {"tensor": lax.rem(lax.axis_index("tensor") + 1, 4)}
    copy = pltpu.make_async_remote_copy(x_ref, o_ref, send, receive, device_id=device)
    copy.start()
    copy.wait()


def copied(x_ref, o_ref, done):
    copy = pltpu.make_async_copy(x_ref, o_ref, done)
    copy.start()
    copy.wait()


in_any_memory = pl.BlockSpec(memory_space=pl.ANY)
# check_vma is off around these: a bare pallas_call has no type of what varies.
moved = functools.partial(kernel, in_specs=[in_any_memory], out_specs=in_any_memory)


def on(mesh, body):
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, P("data", "tensor")))
    spec = P("data", "tensor")
    return jax.make_jaxpr(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)


def test_declared_traffic_is_a_line_like_any_other(mesh):
    def body(x):  # (4, 4) on each device
        return kernel(x, metadata=declare("all_reduce", "tensor", x, algorithm="one_shot", wire=3 * 64))

    (line,) = read(on(mesh(data=2, tensor=4), body))
    assert (line.collective, line.mesh_axes, line.group, line.payload, line.shape) == (
        "all_reduce", ("tensor",), 4, 64, (4, 4)
    )  # fmt: skip
    assert (line.wire, line.total, line.dtype, line.via) == (192, 192, "float32", "kernel one_shot, as it declares")


def test_declared_traffic_is_counted_by_the_trips_of_a_scan(mesh):
    def body(x):
        def step(x, _):
            gathered = jax.ShapeDtypeStruct((4, 16), x.dtype)
            return kernel(
                x, metadata=declare("all_gather_matmul", ["tensor"], gathered, algorithm="ring", wire=192)
            ), None

        return lax.scan(step, x, None, length=5)[0]

    (line,) = read(on(mesh(data=2, tensor=4), body))
    assert (line.collective, line.count, line.payload, line.wire, line.total) == ("all_gather", 5, 256, 192, 960)


def test_declared_traffic_has_its_signal_and_yaml_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp.yaml").write_text("jshard:\n  mesh: {data: 2, tensor: 4}\n\nlayer: {reduction: tensor}\n")
    jshard.load("mlp.yaml")
    mesh = jshard.mesh()

    @jax.jit
    def f(x):
        def body(x):
            return kernel(x, metadata=declare("all_reduce", "tensor", x, algorithm="ring", wire=96))

        spec = P("data", "tensor")
        with jshard.signal("layer"):  # check_vma is off, as for `moved`
            return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, P("data", "tensor")))
    ledger = explain(f, x, backward=False)
    assert str(ledger).splitlines()[0] == (
        "mlp.yaml:4  layer  forward  all_reduce  over tensor (4)  1 x 64 B  float32  96 B on the wire  (kernel ring, as it "
        "declares)"
    )
    unload()


def test_kernel_that_sends_and_declares_nothing_is_refused(mesh):
    body = functools.partial(moved, body=sent_to_the_next, scratch_shapes=[pltpu.SemaphoreType.DMA] * 2, name="sender")
    with pytest.raises(JShardError) as error:
        read(on(mesh(data=2, tensor=4), body))
    place = str(error.value).split("(")[1].split(")")[0]
    assert place.startswith("test_kernel_traffic.py:")
    assert str(error.value) == (
        f"kernel sender ({place}) sends to other devices and declares no traffic; give its "
        "pallas_call metadata=jshard.kernels.declare(op, mesh_axis, payload, algorithm=, wire=)"
    )


def test_kernel_that_stays_on_its_device_declares_nothing(mesh):
    body = functools.partial(moved, body=copied, scratch_shapes=[pltpu.SemaphoreType.DMA])
    assert len(read(on(mesh(data=2, tensor=4), body))) == 0


def test_declaration_over_a_mesh_axis_that_is_not_there_is_refused(mesh):
    def body(x):
        return kernel(x, name="summer", metadata=declare("all_reduce", "model", x, algorithm="ring", wire=96))

    with pytest.raises(JShardError) as error:
        read(on(mesh(data=2, tensor=4), body))
    place = str(error.value).split("(")[1].split(")")[0]
    assert str(error.value) == (
        f'kernel summer ({place}) declares traffic over mesh axis "model", but the shard_map around it has no such axis; use '
        "data or tensor"
    )


def test_declaration_of_an_unknown_collective_is_refused():
    with pytest.raises(JShardError) as error:
        declare("sum", "tensor", jnp.ones(4), algorithm="ring", wire=0)
    assert str(error.value) == (
        'a kernel declares "sum", but the ledger has no such collective; use one of all_reduce, all_gather, '
        "reduce_scatter, all_to_all, permute, broadcast"
    )
