"""LoRA adapters under `jshard.jit`: by Flax and by qwix. Only adapters have gradients and optimizer state."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix takes older names of Flax
FSDP = {"jshard": {"mesh": {"data": 8}}, "all": {"row": "data", "store": "data", "match": ["**"]}}
BATCH = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


class Model(nnx.Module):
    def __init__(self, rngs, linear=nnx.Linear):
        self.up, self.down = linear(16, 32, rngs=rngs), linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def by_flax():
    return Model(nnx.Rngs(0), lambda *sizes, rngs: nnx.LoRALinear(*sizes, lora_rank=8, rngs=rngs))


def by_qwix():
    qwix = pytest.importorskip("qwix")
    provider = qwix.LoraProvider(module_path="up|down", rank=8, alpha=8.0)
    return qwix.apply_lora_to_model(Model(nnx.Rngs(0)), provider, BATCH, rngs=nnx.Rngs(1))


def step(model, optimizer, x):
    def loss(model, x):
        return ((model(x) - x) ** 2).mean()

    value, gradients = jshard.value_and_grad(loss, wrt=nnx.LoRAParam)(model, x)
    optimizer.update(model, gradients)
    return value


def losses(build, run):
    model = build()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    return [float(run(model, optimizer, BATCH)) for _ in range(3)]


@pytest.mark.parametrize("build", [by_flax, pytest.param(by_qwix, marks=pytest.mark.extra)], ids=["flax", "qwix"])
def test_adapters_train_as_on_one_device_and_alone_have_gradients(build):
    jshard.unload()
    alone = losses(build, nnx.jit(step))
    jshard.load(FSDP)
    assert losses(build, jshard.jit(step)) == pytest.approx(alone, rel=1e-5)
    model = build()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    ledger = jshard.explain(jshard.jit(step), model, optimizer, BATCH)
    scattered = [line for line in ledger if line.collective == "reduce_scatter"]
    adapters = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    assert sum(line.payload * line.count for line in scattered) == adapters
    assert not [line for line in ledger if line.collective == "all_reduce" and line.payload > 4]
    assert sum(each.optimizer for each in ledger.memory) < sum(each.parameters for each in ledger.memory)
