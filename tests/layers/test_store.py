"""`store` on models whose sizes do not all divide: values, gradients, wire and places equal what `explain` says."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jshard
from tests.support import cases

rng = np.random.default_rng(0)
SHAPES = {"table": (16, 6), "up": (6, 12), "bias": (12,), "head": (12, 10), "end": (10,), "scale": ()}
BATCH = rng.integers(0, 16, (8,)), rng.integers(0, 10, (8,))
ALONE = {"row": "data", "store": "data", "match": ["**"]}


def loss(params, tokens, targets):
    x = jnp.take(params["table"], tokens, axis=0)
    x = jax.nn.relu(x @ params["up"] + params["bias"])
    logs = jax.nn.log_softmax(x @ params["head"] * params["scale"] + params["end"])
    return -jnp.take_along_axis(logs, targets[:, None], -1).mean()


def parameters():
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(1 + rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def over(mesh, claims, **more):
    return {"jshard": {"mesh": mesh, **more}, **claims}


TENSOR = {
    "up": {"row": "data", "column": "tensor", "store": "data", "match": ["up", "bias"]},
    "head": {"row": "data", "reduction": "tensor", "store": "data", "match": ["head", "end"]},
    "all": ALONE,
}
# Where each parameter rests: nothing of up, bias, head and end divides by 8.
LAYOUTS = {
    "fsdp": (over({"data": 8}, {"all": ALONE}), {"table": P("data", None)}),
    "left to XLA": (over({"data": 8}, {"all": ALONE}, axis_types="auto"), {"table": P("data", None)}),
    "tensor and fsdp": (
        over({"data": 2, "tensor": 4}, TENSOR),
        {"table": P("data", None), "up": P("data", "tensor"), "bias": P("tensor"), "head": P("tensor", "data"), "end": P("data")},
    ),
    "fsdp over two": (
        over({"data": 2, "tensor": 4}, {"all": {**ALONE, "store": ["data", "tensor"]}}),
        {"table": P(("data", "tensor"), None), "up": P("data", "tensor"), "bias": P("tensor"), "head": P("tensor", "data"),
         "end": P("data")},
    ),
}  # fmt: skip


@pytest.mark.quick("fsdp over two")
@pytest.mark.filterwarnings("ignore:signal .* of the parameter bytes replicated")
@pytest.mark.parametrize("name", LAYOUTS)
def test_store_of_sizes_that_do_not_divide_equals_one_device(name):
    expected = jax.value_and_grad(loss)(parameters(), *BATCH)
    configuration, rests = LAYOUTS[name]
    jshard.load(configuration)
    sharded = jshard.shard(loss)
    params = sharded.place(parameters(), *BATCH)
    for key, x in params.items():
        cases.assert_lies(x, rests.get(key, P(*[None] * x.ndim)))
    step = jax.jit(jax.value_and_grad(sharded))
    found = step(params, *BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    if name != "left to XLA":
        jax.tree.map(lambda x, like: cases.assert_lies(x, like.sharding.spec), found[1], params)
        ledger = jshard.explain(step, params, *BATCH)
        got, asked = cases.collectives_got(step.lower(params, *BATCH).compile()), cases.collectives_asked(ledger)
        assert all(
            op == "all_gather" for op, _ in (asked - got) + (got - asked)
        )  # XLA for CPU gathers once for both uses
        assert got <= asked
        for row in ledger.claims:  # at rest is where the arrays are
            (part,) = {shard.data.shape for shard in params[row.parameter].addressable_shards}
            assert row.part == part


def test_store_gives_each_replicated_parameter_a_row_with_its_bytes_and_the_reason():
    jshard.load(LAYOUTS["tensor and fsdp"][0])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        f = jshard.shard(lambda params, *batch: loss(params, *batch))  # that no other test has traced
        ledger = jshard.explain(f, f.place(parameters(), *BATCH), *BATCH)
    assert {row.parameter: row.differs for row in ledger.claims} == {
        "table": "", "up": "", "head": "",
        "bias": "store: replicated over data, as 3 does not divide by 2; 12 B on each device",
        "end": "replicated, as a bias of a reduction must be",
        "scale": "store: replicated over data, as it is one number; 4 B on each device",
    }  # fmt: skip
    (warning,) = {str(each.message) for each in told}
    assert warning == (
        'signal "up" (<dict>) leaves 4.18 % of the parameter bytes replicated (52 B of 1.21 KiB): "bias" (12,) and 1 more; '
        "store: replicated over data, as 3 does not divide by 2"
    )


@pytest.mark.parametrize(("numbers", "percent"), [(7, None), (9, "1.11")])
def test_store_warns_above_a_hundredth_of_the_parameter_bytes(numbers, percent):
    jshard.load(LAYOUTS["fsdp"][0])
    params = {"w": jnp.ones((8, 100)), "b": jnp.ones(numbers)}
    f = jshard.shard(lambda params, x: (x @ params["w"].T).sum() * params["b"].sum())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        f.place(params, jnp.ones((8, 100)))
    assert bool(told) == (percent is not None)
    assert all(
        f'leaves {percent} % of the parameter bytes replicated (36 B of 3.16 KiB): "b" (9,); store' in str(each.message)
        for each in told
    )
