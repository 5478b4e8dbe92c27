"""V12: the layers of a 784-128-10 model come into being on their devices, part by part."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.inspect.compiled import collectives_in
from jshard.signals.active_config import unload


class Model(nnx.Module):
    def __init__(self, rngs):
        with jshard.signal("up"):
            self.up = jshard.Linear(784, 128, rngs=rngs)
        with jshard.signal("down"):
            self.down = jshard.Linear(128, 10, rngs=rngs)


@pytest.fixture(params=["explicit", "auto"], autouse=True)
def loaded(request):
    signals = {"up": {"column": "w"}, "down": {"reduction": "w"}}
    jshard.load({"jshard": {"mesh": {"w": 4}, "axis_types": request.param}, **signals})
    yield
    unload()


@pytest.mark.quick("auto")
def test_parameters_are_born_split_with_the_numbers_of_flax():
    model = Model(nnx.Rngs(0))
    assert {each.data.shape for each in model.up.kernel.addressable_shards} == {(784, 32)}
    assert {each.data.shape for each in model.up.bias.addressable_shards} == {(32,)}
    assert {each.data.shape for each in model.down.kernel.addressable_shards} == {(32, 10)}
    assert {each.data.shape for each in model.down.bias.addressable_shards} == {(10,)}
    rngs = nnx.Rngs(0)
    plain = nnx.Linear(784, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)
    for ours, theirs in zip((model.up, model.down), plain, strict=True):
        np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])
        np.testing.assert_array_equal(ours.bias[...], theirs.bias[...])


def test_no_device_ever_holds_a_whole_kernel():
    """Neither an array that is left over, nor room for one while the kernel is computed."""
    before = {id(array) for array in jax.live_arrays()}
    model = Model(nnx.Rngs(0))
    for array in jax.live_arrays():
        if id(array) not in before:
            assert all(shard.data.size <= 784 * 32 for shard in array.addressable_shards), array.shape

    def born():
        with jshard.signal("up"):
            return nnx.state(jshard.Linear(784, 128, rngs=nnx.Rngs(0)), nnx.Param)

    compiled = jax.jit(born).lower().compile()
    memory = compiled.memory_analysis()
    shard = 784 * 32 * 4 + 32 * 4
    assert memory.output_size_in_bytes <= shard + 64  # and a few for the tuple
    assert memory.temp_size_in_bytes < 3.1 * shard  # the random bits of a shard, on their way to numbers
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) == 784 * 32
    assert collectives_in(compiled) == []
    np.testing.assert_array_equal(compiled()["kernel"], model.up.kernel[...])
