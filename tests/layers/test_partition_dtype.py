"""`dtype` of a claim: parameters rest in one dtype, are multiplied in another, and are summed over devices in a third."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jshard
from tests.support import cases

P = jax.P
MASTERS = {"param": "float32", "compute": "bfloat16", "reduce": "float32"}
NARROW = {"compute": "bfloat16"}


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(nnx.relu(self.up(x))))


class Looped(nnx.Module):
    """One kernel that each turn of a loop multiplies by, and a stack of them."""

    def __init__(self, *, rngs):
        self.one = nnx.Param(rngs.params.normal((16, 16)) / 4)
        self.stack = nnx.Param(rngs.params.normal((4, 16, 16)) / 4)

    def __call__(self, x):
        return jax.lax.scan(lambda x, w: (x + x @ w @ self.one[...], None), x, self.stack[...])[0]


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def plans(dtype):
    row = {"row": "data", "dtype": dtype}
    return {
        "fsdp": {"all": {**row, "store": "data", "match": ["**"]}},
        "tensor": {
            "wide": {**row, "column": "tensor", "match": ["up/**"]},
            "sums": {**row, "reduction": "tensor", "match": ["down/**"]},
            "rest": {"row": "data", "match": ["**"]},
        },
    }


def loaded(signals):
    return cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}}, **signals})


def by_hand(model, x):
    """The same products in bfloat16, all else in float32."""

    def product(layer, x):
        wide = x.astype(jnp.bfloat16) @ layer.kernel[...].astype(jnp.bfloat16)
        return wide.astype(jnp.float32) + layer.bias[...]

    return jnp.mean(product(model.down, model.norm(nnx.relu(product(model.up, x)))) ** 2)


@pytest.mark.quick("tensor-narrow")
@pytest.mark.parametrize("dtype", [MASTERS, NARROW], ids=["masters", "narrow"])
@pytest.mark.parametrize("plan", ["fsdp", "tensor"])
def test_products_are_in_the_compute_dtype_and_gradients_in_that_of_the_parameters(plan, dtype):
    x = cases.numbers((8, 16))
    alone = Model(rngs=nnx.Rngs(0))
    full, _ = nnx.value_and_grad(loss)(alone, x)
    expected, of_hand = nnx.value_and_grad(by_hand)(alone, x)
    with loaded(plans(dtype)[plan]):
        model = jshard.shard(Model(rngs=nnx.Rngs(0)), x)
        value, gradients = nnx.jit(nnx.value_and_grad(jshard.shard(loss)))(model, x)
        np.testing.assert_allclose(value, expected, rtol=4e-3)
        assert abs(value - full) > abs(full) * 1e-6
        for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_hand), strict=True):
            assert one.dtype == jnp.float32
            np.testing.assert_allclose(one, other, rtol=0.1, atol=0.02 * float(jnp.abs(other).max()))
        spec = model.up.kernel[...].sharding.spec
        cases.assert_lies(gradients["up"]["kernel"][...], spec)


def lines(f, *args):
    return [(line.collective, line.phase, line.dtype, line.payload, line.count) for line in jshard.explain(f, *args)]


def test_stored_masters_are_gathered_narrow_and_their_gradients_scattered_wide():
    x = cases.numbers((8, 16))
    with loaded(plans(MASTERS)["fsdp"]):
        found = lines(jshard.shard(loss), jshard.shard(Model(rngs=nnx.Rngs(0)), x), x)
    kernels = {
        line for line in found if line[3] >= 256 and line[:2] != ("all_gather", "backward")
    }  # that of x's gradient
    assert kernels == {
        ("all_gather", "forward", "bfloat16", 16 * 32 * 2, 1), ("all_gather", "forward", "bfloat16", 32 * 8 * 2, 1),
        ("reduce_scatter", "backward", "float32", 16 * 32 * 4, 1), ("reduce_scatter", "backward", "float32", 32 * 8 * 4, 1),
    }  # fmt: skip
    with loaded(plans(NARROW)["fsdp"]):
        found = lines(jshard.shard(loss), jshard.shard(Model(rngs=nnx.Rngs(0)), x), x)
    kernels = [line for line in found if line[3] >= 256 and line[:2] != ("all_gather", "backward")]
    assert {line[2] for line in kernels} == {"bfloat16"}


@pytest.mark.seconds
def test_permutes_sum_in_the_reduce_dtype():
    x, words = cases.numbers((8, 16)), {"kernel": {"all_gather": "permute", "reduce_scatter": "permute"}}
    with loaded({"all": {**plans(MASTERS)["fsdp"]["all"], **words}}):
        model = jshard.shard(Model(rngs=nnx.Rngs(0)), x)
        found = lines(jshard.shard(loss), model, x)
        proof = jshard.verify(jshard.shard(loss), Model(rngs=nnx.Rngs(0)), x)
    gathered, scattered = (
        {(dtype, size * (16 * 32 // 2)), (dtype, size * (32 * 8 // 2))}
        for dtype, size in (("bfloat16", 2), ("float32", 4))
    )
    assert {line[2:4] for line in found if line[:2] == ("permute", "forward") and line[3] >= 128} == gathered
    assert {
        line[2:4] for line in found if line[:2] == ("permute", "backward") and line[3] >= 128
    } == gathered | scattered
    assert proof.ok, proof


@pytest.mark.parametrize(("dtype", "sums"), [(MASTERS, "float32"), (NARROW, "bfloat16")], ids=["masters", "narrow"])
def test_what_a_product_sums_over_devices_is_in_the_reduce_dtype(dtype, sums):
    x = cases.numbers((8, 16))
    size = jnp.dtype(sums).itemsize
    with loaded(plans(dtype)["tensor"]):
        model = jshard.shard(Model(rngs=nnx.Rngs(0)), x)
        found = jshard.explain(jshard.shard(loss), model, x)
    forward = found.only(signal="sums", phase="forward", collective="all_reduce")
    assert [(line.dtype, line.payload) for line in forward if line.axis == "tensor"] == [(sums, 4 * 8 * size)]
    of_kernels = [line for line in found.only(phase="backward", collective="all_reduce") if line.axis == "data"]
    assert {(line.dtype, line.payload) for line in of_kernels if line.payload > 128} >= {(sums, 16 * 8 * size)}


def test_a_kernel_that_a_loop_multiplies_by_is_cast_and_gathered_once():
    x = cases.numbers((8, 16))
    with loaded({"all": {"row": "data", "store": "data", "dtype": MASTERS, "match": ["**"]}}):
        model = jshard.shard(Looped(rngs=nnx.Rngs(0)), x)
        found = lines(jshard.shard(loss), model, x)
    kernels = {line for line in found if line[:2] != ("all_gather", "backward") and line[3] >= 256}
    assert kernels == {
        ("all_gather", "forward", "bfloat16", 512, 1 + 4),
        ("reduce_scatter", "backward", "float32", 1024, 1 + 4),
    }


def test_parameters_rest_in_their_dtype():
    x = cases.numbers((8, 16))
    with loaded({"all": {"row": "data", "store": "data", "dtype": {"param": "bfloat16"}, "match": ["**"]}}):
        model = jshard.shard(Model(rngs=nnx.Rngs(0)), x)
        assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("bfloat16")}
        cases.assert_lies(model.up.kernel[...], P("data"))
        module = jshard.shard(nn.Dense(32))
        variables = module.init(jax.random.key(0), x)
        assert variables["params"]["kernel"].dtype == jnp.bfloat16


WORDS = {
    "sequence": {"reduction": "tensor", "sequence": "tensor"},
    "gather": {"column": "tensor", "output": "gather"},
    "reduce": {"reduction": "tensor", "dtype": {"reduce": "float32"}},
}


@pytest.mark.parametrize("words", WORDS)
def test_a_parameter_that_the_model_casts_is_claimed_still(words):
    """A model in bfloat16 asks for the same collectives as one in float32, of half the bytes where no `reduce` says more."""
    x, moved = cases.numbers((8, 8, 16)), {}
    for dtype in (jnp.float32, jnp.bfloat16):
        with loaded({"all": {"row": "data", **WORDS[words], "match": ["**"]}}):
            model = jshard.shard(nnx.Linear(16, 32, dtype=dtype, rngs=nnx.Rngs(0)), x)
            ledger = jshard.explain(lambda model: nnx.grad(lambda model: model(x).sum())(model), model)
            moved[dtype] = [(line.collective, line.phase, line.count, line.payload) for line in ledger]
    halved = [(*line, payload if words == "reduce" else payload // 2) for *line, payload in moved[jnp.float32]]
    assert moved[jnp.bfloat16] == halved


@pytest.mark.parametrize(
    ("key", "word"),
    [("dtype.compute", "bfloat16"), ("kernel.reduce_scatter", "permute"), ("kernel.all_reduce", "ring")],
)
def test_dtypes_and_algorithms_of_a_claim_on_auto_axes_are_refused(key, word):
    first, second = key.split(".")
    signals = {"all": {"row": "data", first: {second: word}, "match": ["**"]}}
    with cases.loaded({"jshard": {"mesh": {"data": 2, "tensor": 4}, "axis_types": "auto"}, **signals}):
        with pytest.raises(jshard.JShardError) as error:
            jshard.shard(Model(rngs=nnx.Rngs(0)), cases.numbers((8, 16)))
    assert str(error.value).startswith(f'signal "all" (<dict>) says {key}, which jshard.shard does not do yet, for ')
