"""The product of a GPU, by JAX's own kernel: lowered for chips that are not here, compiled where its compiler is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.errors import JShardError
from jshard.kernels.chip import CHIPS
from jshard.kernels.gpu_matmul import tile_for
from jshard.kernels.local_matmul import _kernel
from jshard.programs.flops import arithmetic_of
from tests.kernels.compile_absent_gpu import DTYPES

GPUS = ["h100", "h200", "b200"]


def lowered(body, chip, dtype="bfloat16", **more):
    return traced(body, chip, dtype, **more).lower(lowering_platforms=("cuda",)).as_text()


def traced(body, chip, dtype="bfloat16", *, shape=(200, 72), names=()):
    """The program for eight absent GPUs, x[shape] split by its first axis over the mesh axes `names`."""
    kind, cores = CHIPS[chip].kind, CHIPS[chip].gpu.get("cores", 108)
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    mesh = AbstractMesh((4, 2), ("t", "d"), axis_types=(AxisType.Explicit,) * 2, abstract_device=device)
    spec = P(names) if names else P()
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=jax.NamedSharding(mesh, spec))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)).trace(x)


def by_kernel(x, w, **more):
    return kernels.matmul(x, w, algorithm="pallas", **more)


BODIES = {
    "bare": (lambda x: by_kernel(x, x.T @ x), 1),
    "bias": (lambda x: by_kernel(x, x.T @ x, bias=x[0], activation="gelu"), 1),
    "wider": (lambda x: by_kernel(x, x.T @ x, out_dtype="float32"), 1),
    "gradient": (  # two of equal shapes are one function
        jax.grad(lambda x: by_kernel(x, x.T, bias=x[:, 0], activation="silu").sum().astype(jnp.float32)),
        3,
    ),
    "vmap": (lambda x: jax.vmap(lambda x: by_kernel(x, x.T @ x))(jnp.stack([x, x]))[0], 1),
    "remat_in_scan": (
        lambda x: jax.lax.scan(jax.checkpoint(lambda x, _: (by_kernel(x, x.T @ x), None)), x, None, length=2)[0],
        1,
    ),
}


@pytest.mark.seconds
@pytest.mark.parametrize("chip", GPUS)
@pytest.mark.parametrize("name", BODIES)
def test_product_lowers_for_an_absent_gpu_with_check_vma_on(name, chip):
    body, count = BODIES[name]
    text = lowered(body, chip, names=("t", "d"))
    assert text.count("custom_call @mosaic_gpu") >= count


def test_auto_on_a_gpu_is_the_plain_product():
    assert "mosaic_gpu" not in lowered(lambda x: kernels.matmul(x, x.T @ x), "h200")


def test_plan_counts_what_the_kernel_multiplies():
    loss = lambda x: by_kernel(x, x.T, bias=x[:, 0], activation="gelu").astype(jnp.float32).sum()
    counted = arithmetic_of(traced(jax.grad(loss), "h200", shape=(6, 10)).jaxpr)
    # the sum, which the activation's derivative reads, and the gradients of both operands
    assert counted.flops == {"bfloat16": 3 * 2.0 * 6 * 10 * 6}


@pytest.mark.parametrize(
    ("m", "n", "hopper", "blackwell"),
    [
        (8192, 8192, (128, 256), (256, 256)), (1024, 4096, (128, 128), (128, 128)),
        (1024, 1024, (64, 128), (128, 128)), (1, 1, (64, 128), (128, 128)),
    ],
)  # fmt: skip
def test_tile_is_the_largest_that_keeps_every_core_busy(m, n, hopper, blackwell):
    assert (tile_for(m, n, 132, "hopper"), tile_for(m, n, 148, "blackwell")) == (hopper, blackwell)


# -- what is refused --


@pytest.mark.parametrize(
    ("body", "chip", "dtype", "sentence"),
    [
        (
            lambda x: by_kernel(x, x.T @ x), "h200", "float32",
            'matmul can\'t run by "pallas": its kernel takes bfloat16, float16 on a GPU, and x is float32; '
            'cast x, or use algorithm="auto"',
        ),
        (
            lambda x: by_kernel(x, x.T @ x), "a100", "bfloat16",
            'matmul can\'t run by "pallas": its kernel drives h100, h200, b200, and this is a100; use algorithm="auto"',
        ),
        (
            lambda x: kernels.all_reduce(x, "t", algorithm="one_shot"), "h100", "bfloat16",
            'all_reduce can\'t run by "one_shot": its kernel drives a TPU, and this is h100; '
            'use algorithm="auto", or try it in kernels.interpret()',
        ),
    ],
)  # fmt: skip
def test_what_a_gpu_can_not_run_is_told(body, chip, dtype, sentence):
    with pytest.raises(JShardError) as error:
        lowered(body, chip, dtype, names=("t",))
    assert str(error.value) == sentence


def test_pretended_gpu_that_there_is_not_is_told():
    with pytest.raises(JShardError) as error, kernels.interpret(chip="h300"):
        pass
    assert str(error.value) == 'jshard knows no chip "h300"; did you mean "h200"?'


# -- interpreted --


def test_kernel_of_a_gpu_is_not_interpreted():
    x = np.ones((8, 8), jnp.bfloat16)
    with pytest.raises(JShardError) as error, kernels.interpret(chip="h200"):
        by_kernel(x, x)
    assert str(error.value) == (
        "matmul can't run by \"pallas\": its kernel for GPUs is JAX's own, which is not interpreted; "
        'use algorithm="auto"'
    )


def integers(*shape, dtype="bfloat16", by=7):
    return (np.arange(int(np.prod(shape))) * by % 5 - 2).reshape(shape).astype(jnp.dtype(dtype))


@pytest.fixture
def hopper(monkeypatch):
    """Interprets JAX's kernel for a Hopper, which asks its device how many cores it has."""
    if not hasattr(mosaic_gpu, "InterpretGPUParams"):
        pytest.skip('jax interprets GPUs later on: pip install "jax>=0.11.2"')
    monkeypatch.setattr("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu.get_num_sms", lambda: 2)
    params = mosaic_gpu.InterpretGPUParams(detect_races=True)
    with kernels.interpret(chip="h200"), mosaic_gpu.force_gpu_interpret_mode(params):
        yield


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("m", "k", "n", "dtype", "out"),
    [
        (5, 7, 3, "bfloat16", "bfloat16"),
        (5, 7, 3, "bfloat16", "float32"),
        pytest.param(130, 70, 200, "bfloat16", "float32", marks=pytest.mark.slow),
        pytest.param(64, 300, 129, "float16", "float16", marks=pytest.mark.slow),
    ],
)
def test_product_of_any_shape_is_exact(m, k, n, dtype, out):
    x, w = integers(m, k, dtype=dtype), integers(k, n, dtype=dtype, by=3)
    y = _kernel(x, w, jnp.dtype(out))
    assert y.dtype == jnp.dtype(out)
    np.testing.assert_array_equal(y, (x.astype(np.float64) @ w.astype(np.float64)).astype(y.dtype))


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_batches_are_multiplied_in_turn():
    x, w = integers(2, 3, 7), integers(2, 7, 4, by=3)
    for axes in ((0, None), (None, 0), (0, 0)):
        operands = [each if axis == 0 else each[0] for each, axis in zip((x, w), axes, strict=True)]
        y = jax.jit(jax.vmap(lambda x, w: _kernel(x, w, x.dtype), axes))(*operands)
        np.testing.assert_array_equal(y, jax.vmap(jnp.dot, axes)(*operands))


# -- compiled --


@pytest.mark.slow
@pytest.mark.parametrize("chip", GPUS)
def test_product_compiles_for_an_absent_gpu_and_spills_nothing(chip, extra):
    """In a process of its own: a kernel for the wrong chip may abort it."""
    extra(f"{chip}:8")
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, str(here.with_name("compile_absent_gpu.py")), chip],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(here.parents[2])},
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["dtype"] for each in found] == [*DTYPES[chip]]
    for each in found:  # by the instruction that only this generation has: a kernel in name only would be seen
        assert each["spilled"] == 0 and 0 < each["registers"] <= 255, each
        assert each["instruction"] == {"h": "wgmma.mma_async", "b": "tcgen05.mma"}[chip[0]]
