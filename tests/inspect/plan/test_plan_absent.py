"""Plans for TPUs and GPUs that are not there, by their own compilers; only where the extras are installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard
from jshard.inspect.plan import plan
from jshard.inspect.plan.planning import mesh_on, moved_to
from jshard.inspect.plan.topology import Topology
from jshard.printing.units import size
from jshard.signals.active_config import configuration, unload
from tests.support import decoder

TOPOLOGIES = ["v4:2x2x1", "v5e:4x4", "v5p:8x8x16", "v6e:16x16", "tpu7x:2x2x2", "h100:8", "h200:8", "b200:8"]


@pytest.fixture(autouse=True)
def _alone(kept_plans):
    yield
    unload()


def loss(model, x):
    return jnp.square(model(x)).mean()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_compiles(extra, name):
    extra(name)
    devices = Topology.of(name).devices
    jshard.load(
        {
            "jshard": {"mesh": {"data": -1, "tensor": 4}},
            "up": {"row": "data", "column": "tensor"},
            "down": {"row": "data", "reduction": "tensor"},
        }
    )
    with moved_to(mesh_on(Topology.of(name), configuration())):
        model = nnx.eval_shape(lambda: jshard.MLP(128, 256, 128, use_bias=False, rngs=nnx.Rngs(0)))
        x = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
        made = plan(loss, model, x, topology=name)
    assert made.mesh == {"data": devices // 4, "tensor": 4}
    assert made.comparison.asked == made.asked.total > 0
    assert made.comparison.got == sum(got.total for got in made.got) > 0
    assert made.memory.fits and made.memory.capacity == Topology.of(name).chip.device_memory
    assert {part.name for part in made.estimate.parts} == {"arithmetic", "memory", "wire", "work", "wait"}
    assert made.estimate.seconds == made.estimate.seconds_of("work") + made.estimate.seconds_of("wait") > 0
    assert "(a model, nothing was measured)" in str(made)


def test_single_chip_compiles(extra):
    extra("v5e:1x1")
    made = plan(lambda x: x @ x.T, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), topology="v5e:1x1")
    assert (made.comparison.asked, made.comparison.got) == (0, 0)


@pytest.mark.parametrize("name", ["cpu:4", "v5e:2x2"])
def test_plan_of_two_slices_says_what_crosses(extra, name):
    """Pretended devices are in no slices, but their compiler is asked for the same sums."""
    extra(name)
    rows = {"row": ["slice", "data"]}
    mesh = {"slice": {"size": 2, "over": "dcn"}, "data": 2, "tensor": 2}
    jshard.load({"jshard": {"mesh": mesh, "topology": name}, "up": {**rows, "column": "tensor"},
                 "down": {**rows, "reduction": "tensor"}, "rows": rows})  # fmt: skip
    there = Topology.chosen(None, configuration())
    with moved_to(mesh_on(there, configuration())):
        model = nnx.eval_shape(lambda: jshard.MLP(128, 512, 128, use_bias=False, rngs=nnx.Rngs(0)))
        x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
        made = plan(lambda model: jshard.mean(model(x_of(x)) ** 2), model)
    assert (made.topology.slices, made.mesh) == (2, {"slice": 2, "data": 2, "tensor": 2})
    rows = {(row.signal, row.collective, row.mesh_axes): row for row in made.comparison.rows}
    part = 4 * 128 * 512 // 2 // 2  # of a kernel's gradient: over tensor, and over the devices of a slice
    for signal in ("up", "down"):
        row = rows[signal, "all_reduce", ("slice",)]
        assert (row.asked, row.got, row.wire_got) == (1, 1, part)
    crossing = [got for got in made.got if there.spans_slices(got.members)]
    assert sum(got.total for got in crossing) >= 2 * part
    told = str(made)
    assert f"between slices: {size(sum(got.total for got in crossing))} of it in " in told
    if there.chip.link:
        assert "at 3.12 GB/s a device and 16 us a hop" in told and len(crossing) == 3
        wire = next(part for part in made.estimate.parts if part.words.endswith("between slices"))
        assert (wire.rate, wire.amount) == (3.125e9, sum(got.total for got in crossing))


def x_of(shape):
    """An input that nobody differentiates by."""
    return jshard.signal.tensor(jnp.ones(shape.shape, shape.dtype), name="rows")


def test_program_that_is_too_large_for_a_chip_is_a_verdict_and_not_a_failure(extra):
    extra("v5e:1x1")

    def f(x):
        return (jnp.sort(x @ x.T, axis=0) * 2).sum()

    made = plan(f, jax.ShapeDtypeStruct((60_000, 64), jnp.float32), topology="v5e:1x1", backward=False)
    assert made.memory.fits is False
    assert made.memory.needed > made.memory.capacity == int(15.75 * 2**30)
    assert "memory: does not fit: " in str(made)


def test_gathers_hide_behind_products_on_a_tpu(extra):
    extra("v5e:2x4")
    made = plan_decoder("v5e:2x4", decoder.TINY, data=2, tensor=4)
    # Each gather is of some KiB, which the wire takes in less time than any operation beside it.
    assert 0 < made.comparison.hidden <= sum(got.total for got in made.got if got.asynchronous)
    assert not [each for _, each in made.comparison.differences if each.kind in ("added", "dropped", "split")]


@pytest.mark.parametrize("name", ["v5e:8x8", "v5p:4x4x4"])
def test_what_is_stored_over_all_of_a_slice_is_gathered_and_not_summed(extra, name):
    """XLA would run these gathers as all-reduces of twice the bytes."""
    extra(name)
    wire = {}
    for how in ("auto", "xla"):
        kernel = {"all_gather": how, "reduce_scatter": "permute"}
        jshard.load({"jshard": {"mesh": {"data": 64}}, "fc": {"row": "data", "store": "data", "kernel": kernel}})
        with moved_to(mesh_on(Topology.of(name), configuration())):
            with jshard.signal("fc"):
                model = nnx.eval_shape(lambda: jshard.Linear(1024, 512, use_bias=False, rngs=nnx.Rngs(0)))
            made = plan(nnx.value_and_grad(loss), model, jax.ShapeDtypeStruct((1024, 1024), jnp.float32), topology=name)
        gathers = [got for got in made.got if got.collective != "permute" and got.total > 1024]  # the loss is summed
        wire[how] = {got.collective for got in gathers}, sum(got.total for got in gathers)
    assert wire["auto"] == ({"all_gather"}, wire["xla"][1] / 2)
    assert wire["xla"][0] == {"all_reduce"}


def test_gpu_joins_gathers_and_adds_up_before_it_reduces(extra):
    extra("h100:8")
    made = plan_decoder("h100:8", decoder.TINY, data=2, tensor=4)
    assert {each.kind for _, each in made.comparison.differences} >= {"merged", "dropped"}
    assert made.comparison.got < made.comparison.asked


def plan_decoder(name: str, size: decoder.Size, **mesh: int):
    jshard.load(decoder.configured(**mesh))
    with moved_to(mesh_on(Topology.of(name), configuration())):
        step, args = decoder.training_step(size)
        return plan(step, *args, topology=name)
