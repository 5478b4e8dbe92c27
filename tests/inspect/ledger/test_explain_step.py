"""A whole experiment explained: from shapes alone as from real arrays, and equal to what is compiled; at any size."""

from __future__ import annotations

import contextlib
import cProfile
import dataclasses
import gc
import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard
from jshard.cli.experiment import sketched
from jshard.cli.target import Target
from jshard.inspect.compiled import wire_bytes
from jshard.inspect.ledger import Ledger
from jshard.inspect.plan import explain
from jshard.layers.creating import abstract
from jshard.layouts.mesh import absent_mesh
from jshard.signals.active_config import mesh, on_mesh, unload
from jshard.training.experiments.experiment import Experiment
from tests.support.decoder import Block, Size, configured, training_step

ROOT = Path(__file__).parents[3]
DIGITS = "configs/digits.yaml"
SMALL = ["model.hidden=32", "batch=16"]

CASES = {
    "as it is": [],
    "fsdp": ["layer1.store=data", "layer2.store=data", "layer2.output=sum", "layer2.column=[]"],
    "optimizer only": ["layer1.store={optimizer: data}"],
    "adafactor": ["optimizer=adafactor"],
    "auto": ["jshard.axis_types=auto", "layer1.store={optimizer: data}"],
    "gathered": ["layer1.output=gather", "layer2={row: data}"],
    "one device": ["jshard.mesh.data=1", "jshard.mesh.tensor=1"],
}


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(ROOT)
    yield
    unload()


def real(overrides) -> Experiment:
    configuration = jshard.load(DIGITS, overrides)
    return Experiment.build(configuration, jshard.mesh())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_explained_step_is_that_of_real_arrays_and_of_the_compiled_program(name):
    overrides = [*SMALL, *CASES[name]]
    gc.collect()
    before = len(jax.live_arrays())
    with sketched(Target(DIGITS, tuple(overrides))) as sketch:
        told = sketch.explain()
        gc.collect()
        assert len(jax.live_arrays()) <= before
    experiment = real(overrides)
    assert str(experiment.explain()) == str(told)
    again = sum(line.total for line in told if line.cause.remat)  # which XLA for CPU joins with the first outside loops
    assert wire_bytes(experiment.lowered().compile()) in (told.total, told.total - again)


def test_explained_memory_is_that_of_the_arrays_on_one_device():
    overrides = [*SMALL, "layer1.store={optimizer: data}"]
    experiment = real(overrides)
    told = experiment.explain()
    arrays = jax.tree.leaves((experiment.model, experiment.optimizer))
    held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    assert held == sum(rest.parameters + rest.optimizer for rest in told.memory)
    gradients = jax.tree.leaves(experiment.model)
    assert sum(array.addressable_shards[0].data.nbytes for array in gradients) == sum(r.gradients for r in told.memory)


def test_explained_phases_have_the_update_apart():
    with sketched(Target(DIGITS, (*SMALL, "layer1.store={optimizer: data}"))) as sketch:
        told = sketch.explain()
    assert [(line.signal, line.collective, line.line) for line in told.only(phase="update")] == [
        ("layer1", "all_gather", "the command line")
    ] * 2
    assert set(told.by("phase")) == {"forward", "backward", "update"}


# -- size --

SEVENTY_BILLION = Size(
    layers=80, features=8192, heads=64, hidden=24576, vocabulary=32000, length=4096, batch=256
)  # 7.03e10 parameters


@contextlib.contextmanager
def on_a_pod(data: int, tensor: int):
    jshard.load(configured(data, tensor))
    with on_mesh(absent_mesh({"data": data, "tensor": tensor})):
        yield


def seconds(size: Size) -> tuple[float, Ledger]:
    with on_a_pod(16, 16):
        begin = time.process_time()
        step, arguments = training_step(size)
        ledger = explain(step, *arguments)
        return time.process_time() - begin, ledger


@pytest.mark.seconds
def test_seventy_billion_parameters_on_256_devices_are_explained_in_ten_seconds():
    assert 6.9e10 < SEVENTY_BILLION.parameters < 7.1e10
    gc.collect()
    before = len(jax.live_arrays())
    spent, told = seconds(SEVENTY_BILLION)
    gc.collect()
    assert len(jax.live_arrays()) <= before
    assert spent < 10
    gathered = told.only(signal="mlp/down", collective="all_gather", phase="forward", mesh_axes=("data",))
    assert [(line.count, line.payload) for line in gathered] == [(80, 24576 // 16 * 8192 * 2)]
    assert told.unused == ()


def calls(f: Callable[[], Any]) -> tuple[int, Any]:
    """How many functions `f` calls, in Python and in C: what a busy machine does not change."""
    profile = cProfile.Profile()
    result = profile.runcall(f)
    return sum(entry.callcount for entry in profile.getstats()), result


@pytest.mark.seconds
def test_scanned_depth_costs_no_work():
    seconds(dataclasses.replace(SEVENTY_BILLION, layers=2))  # what JAX imports and caches at first
    shallow, _ = calls(lambda: seconds(dataclasses.replace(SEVENTY_BILLION, layers=8)))
    deep, _ = calls(lambda: seconds(SEVENTY_BILLION))
    assert deep < 1.2 * shallow


class Unscanned(nnx.Module):
    """As many blocks one after the other as there are layers."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(size, rngs=rngs) for _ in range(size.layers)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def unscanned(layers: int, counted: Any) -> Any:
    """What `counted` makes of explaining so many layers."""
    size = dataclasses.replace(SEVENTY_BILLION, layers=layers)
    with on_a_pod(16, 16):
        # Not counted: Flax's count of random numbers makes JAX compose, and drop, an error text as long as the trace.
        model = abstract(lambda: Unscanned(size, rngs=nnx.Rngs(0)))
        sharding = jax.NamedSharding(mesh(), jax.P("data"))
        x = jax.ShapeDtypeStruct((size.batch, size.length, size.features), jnp.bfloat16, sharding=sharding)
        return counted(lambda: explain(lambda model, x: model(x), model, x))


@pytest.mark.slow
def test_unscanned_depth_costs_linear_work():
    unscanned(2, calls)  # what JAX imports and caches at first
    (shallow, few), (deep, many) = unscanned(8, calls), unscanned(16, calls)
    assert deep < 2.2 * shallow
    assert unscanned(32, operator.call).count == 2 * many.count == 4 * few.count > 32
