"""Every kernel lowered by Mosaic for chips that are not here, on bare CPU JAX; compiled too where libtpu is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.kernels.chip import CHIPS
from jshard.programs.jaxprs import equations as every_equation
from tests.kernels.barriers import missing_barriers

TPUS = [chip.name for chip in CHIPS.values() if chip.platform == "tpu"]


def traced(body, shape, dtype, sizes, chip="v5e", specs=None):
    """The program for a mesh of absent chips, x[shape] split by its first axis over all of it."""
    device = AbstractDevice(device_kind=CHIPS[chip].kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes), abstract_device=device
    )
    spec = P(tuple(sizes)) if specs is None else specs
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=jax.NamedSharding(mesh, spec))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)).trace(x)


def lowered(body, shape, dtype, sizes, chip="v5e"):
    return traced(body, shape, dtype, sizes, chip).lower(lowering_platforms=("tpu",)).as_text()


def differentiated(f):
    return lambda x: jax.grad(lambda x: f(x).astype(jnp.float32).sum())(x)


def remat_in_scan(x):
    @jax.checkpoint
    def block(x, _):
        return jax.lax.pcast(jnp.sin(kernels.all_reduce(x, "t", algorithm="ring")), "t", to="varying"), None

    return jax.lax.scan(block, x, None, length=2)[0]


KERNELS = {
    "one_shot": (lambda x: kernels.all_reduce(x, "t", algorithm="one_shot"), 1),
    "ring": (lambda x: kernels.all_reduce(x, "t", algorithm="ring"), 1),
    "reduce_scatter": (lambda x: kernels.reduce_scatter(x, "t", algorithm="ring"), 1),
    "all_gather": (lambda x: kernels.all_gather(x, "t", algorithm="ring"), 1),
    "matmul": (lambda x: kernels.matmul(x, x.T, bias=x[:, 0], activation="gelu", algorithm="pallas"), 1),
    "remat_in_scan": (differentiated(remat_in_scan), 1),
}  # fmt: skip


@pytest.mark.quick(*(f"{name}-v5e" for name in KERNELS))
@pytest.mark.parametrize("chip", TPUS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_lowers_for_an_absent_chip(name, chip):
    body, count = KERNELS[name]
    for dtype in ("float32", "bfloat16"):
        program = traced(body, (8 * 8, 200), dtype, {"t": 8}, chip)
        assert missing_barriers(program.jaxpr) == []
        text = program.lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") >= count


@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_integers_lower(dtype):
    for name in ("one_shot", "ring", "reduce_scatter", "all_gather"):
        assert "tpu_custom_call" in lowered(KERNELS[name][0], (8 * 8, 77), dtype, {"t": 8})


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [({"a": 16, "t": 16}, ("t",)), ({"u": 16, "t": 64}, ("t",)), ({"a": 16, "b": 16, "c": 24}, ("a", "b", "c"))],
    ids=["ring-in-256", "ring-in-1024", "torus-at-6144"],
)
def test_kernel_lowers_inside_many_chips(sizes, axes):
    algorithm = "torus" if len(axes) > 1 else "ring"
    devices = 1
    for size in sizes.values():
        devices *= size
    body = lambda x: kernels.all_reduce(x, axes, algorithm=algorithm)
    assert "tpu_custom_call" in lowered(body, (devices, 1024), "bfloat16", sizes, "v5p")


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", list(KERNELS))
def test_ring_of_64_is_no_longer_a_program_than_one_of_8(name):
    """Rings are rolled: what differs is only numbers, and so is the time it takes."""
    equations = {}
    for n in (8, 64):
        equations[n] = len(list(every_equation(traced(KERNELS[name][0], (n * n, 128), "float32", {"t": n}).jaxpr)))
    assert equations[64] <= equations[8]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_kernels_compile_for_absent_chips(extra):
    """With libtpu beside jax (pip install libtpu), each kernel for each chip for real."""
    extra("v5e:2x4")
    begun = time.monotonic()
    here = Path(__file__)
    environment = {
        **os.environ, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "PYTHONPATH": str(here.parents[2])
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(here.with_name("compile_absent.py"))],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("compiled") == len(KERNELS) * 5 + 3, (time.monotonic() - begun, done.stdout)
