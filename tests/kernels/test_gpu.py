"""The product of a GPU: lowered for chips that are not here, interpreted where JAX can, compiled where its compiler is."""

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
from jshard.kernels.gpu import blackwell, hopper
from jshard.kernels.gpu.matmul import EPILOGUES
from jshard.kernels.gpu.tile import Tile, tile_for
from jshard.kernels.local_matmul import ACTIVATIONS
from jshard.programs.flops import arithmetic_of
from tests.kernels.compile_absent_gpu import PRODUCTS, product

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
    # the sum for the activation's derivative, and the gradients of both operands; nothing reads the value
    assert counted.flops == {"bfloat16": 3 * 2.0 * 6 * 10 * 6}


@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [(8192, 8192, (128, 256)), (1024, 4096, (128, 128)), (1024, 1024, (64, 128)), (1, 1, (64, 128))],
)
def test_tile_is_the_largest_that_keeps_every_core_busy(m, n, tile):
    chosen = tile_for(m, n, 132, (128, 64))
    assert (chosen.rows, chosen.columns) == tile


def test_epilogues_are_the_activations():
    assert EPILOGUES.keys() - {None} == ACTIVATIONS.keys()
    x = jnp.linspace(-3, 3, 7)
    for name, activation in ACTIVATIONS.items():
        np.testing.assert_array_equal(EPILOGUES[name](x), activation(x))


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

CAN_INTERPRET = hasattr(mosaic_gpu, "InterpretGPUParams")
interpretable = pytest.mark.skipif(not CAN_INTERPRET, reason='jax interprets GPUs later on: pip install "jax>=0.11.2"')


@pytest.mark.skipif(CAN_INTERPRET, reason="this jax interprets GPUs")
def test_jax_that_interprets_no_gpu_is_told():
    x = np.ones((8, 8), jnp.bfloat16)
    with pytest.raises(JShardError) as error, kernels.interpret(chip="h200"):
        by_kernel(x, x)
    assert str(error.value) == (
        f'jax {jax.__version__} interprets no kernels for GPUs; type: pip install "jax>=0.11.2"'
    )


def integers(*shape, dtype="bfloat16", by=7):
    return (np.arange(int(np.prod(shape))) * by % 5 - 2).reshape(shape).astype(jnp.dtype(dtype))


@interpretable
@pytest.mark.parametrize("chip", ["h200", "b200"])
@pytest.mark.parametrize(
    ("m", "k", "n", "dtype", "out"),
    [
        (5, 7, 3, "bfloat16", None),
        pytest.param(130, 70, 200, "bfloat16", "float32", marks=pytest.mark.slow),
        pytest.param(64, 300, 129, "float16", None, marks=pytest.mark.slow),
    ],
)
def test_product_of_any_shape_is_exact(chip, m, k, n, dtype, out):
    x, w = integers(m, k, dtype=dtype), integers(k, n, dtype=dtype, by=3)
    with kernels.interpret(chip=chip):
        y = by_kernel(x, w, out_dtype=out)
    assert y.dtype == jnp.dtype(out or dtype)
    np.testing.assert_array_equal(y, (x.astype(np.float64) @ w.astype(np.float64)).astype(y.dtype))


@interpretable
@pytest.mark.parametrize("chip", ["h200", "b200"])
@pytest.mark.parametrize(
    "activation", ["gelu", *(pytest.param(each, marks=pytest.mark.slow) for each in (None, "relu", "silu", "tanh"))]
)
def test_bias_and_activation_come_before_the_one_rounding(chip, activation):
    x, w, b = integers(9, 20), integers(20, 6, by=3), integers(6) / 4
    with kernels.interpret(chip=chip):
        y = by_kernel(x, w, bias=b, activation=activation)
    exact = x.astype(np.float32) @ w.astype(np.float32) + b.astype(np.float32)
    expected = (exact if activation is None else ACTIVATIONS[activation](exact)).astype(jnp.bfloat16)
    np.testing.assert_allclose(y.astype(np.float32), expected.astype(np.float32), rtol=2**-8, atol=1e-6)


@interpretable
@pytest.mark.slow
def test_gradient_is_that_of_the_plain_product():
    x, w, b = integers(6, 7), integers(7, 3, by=3), integers(3)

    def run(algorithm):
        y, pull = jax.vjp(lambda *each: kernels.matmul(*each[:2], bias=each[2], algorithm=algorithm), x, w, b)
        return y, *pull(y)

    with kernels.interpret(chip="b200"):
        ours = run("pallas")
    jax.tree.map(np.testing.assert_array_equal, ours, run("xla"))


@interpretable
@pytest.mark.slow
def test_batches_are_multiplied_together_or_in_turn():
    x, w = integers(2, 3, 7), integers(2, 7, 4, by=3)
    for axes in ((0, None), (None, 0), (0, 0)):
        operands = [each if axis == 0 else each[0] for each, axis in zip((x, w), axes, strict=True)]
        with kernels.interpret(chip="b200"):
            y = jax.jit(jax.vmap(by_kernel, axes))(*operands)
        np.testing.assert_array_equal(y, jax.vmap(jnp.dot, axes)(*operands))


@interpretable
@pytest.mark.parametrize("family", [hopper, blackwell])
def test_blocks_that_take_several_tiles_mix_nothing_up(family):
    """Two blocks go through six tiles and twice around the stages of shared memory, by a tile that is not the default."""
    x, w, b = integers(384, 640), integers(640, 256, by=3), integers(256, dtype="float32")
    params = mosaic_gpu.InterpretGPUParams(detect_races=True)
    with mosaic_gpu.force_gpu_interpret_mode(params):
        out = jax.ShapeDtypeStruct((384, 256), jnp.float32)
        y = jax.jit(lambda *each: family.matmul(*each, lambda y: y * 2, out, Tile(128, 128), 2))(x, w, b)
    np.testing.assert_array_equal(y, 2 * (x.astype(np.float32) @ w.astype(np.float32) + b))


@interpretable
@pytest.mark.slow
def test_planted_faults_are_found():
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, str(here.with_name("planted_gpu.py"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(here.parents[2])},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert dict(line.rsplit(",", 1) for line in done.stdout.splitlines()) == {
        "hopper,none": "clean",
        "hopper,store_not_awaited": "race",
        "blackwell,none": "clean",
        "blackwell,store_not_awaited": "race",
        "blackwell,stage_written_before_it_is_read": "race",
        "blackwell,stage_read_before_it_has_arrived": "race",
        "blackwell,sums_read_before_they_are_done": "race",
        "blackwell,sums_not_cleared": "wrong",
    }


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
    found = read(done.stdout)
    assert [each["product"] for each in found] == list(PRODUCTS)
    keys = "product", "chip", "jax", "assembler"
    known = {tuple(each[key] for key in keys): each for each in read(RECORDED.read_text())}
    for each in found:
        sound(each)
        assert each == known.get(tuple(each[key] for key in keys), each)  # to the register, with the recorded versions


RECORDED = Path(__file__).parents[2] / "docs" / "measurements" / "gpu_registers.jsonl"


def read(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def sound(product):
    """Nothing spilled, and the instruction that only this generation has: a kernel in name only would be seen."""
    assert product["spilled"] == 0 and 0 < product["registers"] <= 255, product
    assert product["instruction"] == {"h": "wgmma.mma_async", "b": "tcgen05.mma"}[product["chip"][0]]


def test_recorded_products_spill_nothing_on_any_gpu():
    recorded = read(RECORDED.read_text())
    assert {(each["chip"], each["product"]) for each in recorded} == {
        (chip, name) for chip in GPUS for name in PRODUCTS
    }
    for each in recorded:
        sound(each)


def test_products_to_compile_are_all_that_there_are():
    assert {activation for _, activation, _ in PRODUCTS.values()} == EPILOGUES.keys()
    assert callable(product(None, None, None))
