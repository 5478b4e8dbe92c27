"""Sums over mesh axes of which some cross slices: inside each slice first, then between them. On pretended devices, which
are in none."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from jshard.errors import JShardError
from jshard.inspect.ledger.ledger import read
from jshard.kernels.all_reduction import all_reduce
from jshard.signals.active_config import unload

ACROSS = {"slice": {"size": 2, "over": "dcn"}, "data": 2, "tensor": 2}


@pytest.fixture(autouse=True)
def slices():
    jshard.load({"jshard": {"mesh": ACROSS}})
    yield
    unload()


def summed(names, algorithm):
    def body(x):
        return all_reduce(x[0], names, algorithm=algorithm)

    def run(x):
        return jax.shard_map(body, mesh=jshard.mesh(), in_specs=P(jshard.mesh().axis_names), out_specs=P(left))(x)

    left = tuple(name for name in ACROSS if name not in names)
    return run


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("names", "shape", "expected"),
    [
        (("slice", "data"), (6, 3), [("reduce_scatter", "data", 72), ("all_reduce", "slice", 36), ("all_gather", "data", 72)]),
        (("data", "slice"), (3, 5), [("reduce_scatter", "data", 64), ("all_reduce", "slice", 32), ("all_gather", "data", 64)]),
        (("slice", "data", "tensor"), (3, 4), [
            ("reduce_scatter", "data", 48), ("reduce_scatter", "tensor", 24), ("all_reduce", "slice", 12),
            ("all_gather", "tensor", 24), ("all_gather", "data", 48)]),
        (("slice", "data"), (1,), [("all_reduce", "slice, data", 4)]),
        (("data", "tensor"), (6, 3), [("all_reduce", "data, tensor", 72)]),
        (("slice",), (6, 3), [("all_reduce", "slice", 72)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("algorithm", ["auto", "hierarchical"])
def test_sum_over_slices_is_the_psum_and_a_part_of_it_goes_between_them(names, shape, expected, algorithm):
    x = np.random.default_rng(0).integers(-8, 8, (8, *shape)).astype(np.float32)  # sums of these are exact
    x = jax.device_put(x, NamedSharding(jshard.mesh(), P(jshard.mesh().axis_names)))
    run, psum = summed(names, algorithm), summed(names, "xla")
    np.testing.assert_array_equal(run(x), psum(x))
    assert run(x).sharding == psum(x).sharding
    gradient = lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(x)
    np.testing.assert_array_equal(gradient(run), gradient(psum))
    lines = read(jax.make_jaxpr(run)(x)).lines
    assert [(line.collective, line.axis, line.payload) for line in lines] == expected
    backward = read(jax.make_jaxpr(jax.grad(lambda x: run(x).sum()))(x)).lines
    assert [line.collective for line in backward if line.phase == "backward"] == []


def test_sum_in_a_hierarchy_that_nobody_has_written_is_an_error():
    jshard.load({"jshard": {"mesh": {"data": 4, "tensor": 2}}})
    with pytest.raises(JShardError) as error:
        jax.eval_shape(
            jax.shard_map(
                lambda x: all_reduce(x, "data", algorithm="hierarchical"),
                mesh=jshard.mesh(), in_specs=P("data"), out_specs=P(),
            ),
            jax.device_put(np.ones((8, 2)), NamedSharding(jshard.mesh(), P("data"))),
        )  # fmt: skip
    assert str(error.value) == (
        'all_reduce can\'t run by "hierarchical": no mesh axis crosses slices; '
        "write jshard: {mesh: {slice: {size: 2, over: dcn}, ...}}"
    )
