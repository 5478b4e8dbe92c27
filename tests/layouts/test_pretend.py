"""Pretend devices: as many as asked for, and they don't hang. Each program is a process of its own with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jshard
from jshard.hardware.host import free_port
from jshard.layouts.pretend import pretend
from tests.support.outside import users_environment

ROOT = Path(__file__).parents[2]
RUNS = int(os.environ.get("JSHARD_HANG_RUNS", "2"))
STEPS = int(os.environ.get("JSHARD_HANG_STEPS", "300"))


def run(program: str, *, timeout: float = 60, **environment: str) -> str:
    """What a program prints, with nothing of the tests' own devices in its environment."""
    clean = users_environment("XLA_FLAGS", "JSHARD_CONFIG", **environment)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=clean,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_pretend_gives_as_many_devices_as_asked():
    assert (
        run("import jshard; jshard.pretend(6); import jax; print(len(jax.devices()), jax.default_backend())") == "6 cpu"
    )


def test_pretend_works_when_jax_is_imported_but_has_not_started():
    assert run("import jax, jshard; jshard.pretend(3); print(len(jax.devices()))") == "3"


def test_pretend_gives_xla_four_threads_a_device():
    assert run("import os, jshard; jshard.pretend(8); print(os.environ['PJRT_NPROC'])") == "32"


def test_pretend_leaves_what_the_user_has_set():
    program = "import os, jshard; jshard.pretend(2); import jax; print(os.environ['PJRT_NPROC'], len(jax.devices()))"
    assert run(program, PJRT_NPROC="19", JAX_NUM_CPU_DEVICES="5") == "19 5"


def test_pretend_is_content_when_jax_has_started_with_enough():
    program = "import jax, jshard; jax.devices(); jshard.pretend(2); print(len(jax.devices()))"
    assert run(program, JAX_NUM_CPU_DEVICES="4", JAX_PLATFORMS="cpu") == "4"


def test_pretend_says_when_jax_has_started_with_fewer():
    program = """
import jax, jshard
jax.devices()
try:
    jshard.pretend(8)
except jshard.JShardError as error:
    print(error)
"""
    assert run(program, JAX_PLATFORMS="cpu") == (
        "8 devices can't be pretended: JAX has already started with 1 CPU device; call jshard.pretend(8) before "
        "anything that makes an array, or start Python with JAX_NUM_CPU_DEVICES=8 PJRT_NPROC=32 JAX_PLATFORMS=cpu"
    )


@pytest.fixture
def here(monkeypatch):
    """`pretend` in this process, where JAX has started: what it leaves in the environment."""

    devices = jax.devices("cpu")

    def called(*arguments, on_cpus=True, cpus=8, backend="cpu", **environment):
        monkeypatch.setattr(jax, "devices", lambda platform: devices[:cpus])
        monkeypatch.setattr(os, "environ", environment)
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(jshard.layouts.pretend, "computes_on_cpus", lambda: on_cpus)
        monkeypatch.setattr(jshard.layouts.pretend, "keep_freed", lambda: None)
        pretend(*arguments)
        return [environment.get(name) for name in ("PJRT_NPROC", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")]

    return called


def test_pretend_says_in_the_environment_what_the_user_has_not(here):
    assert here(4) == ["16", "4", "cpu"]
    assert here(4, JAX_NUM_CPU_DEVICES="x", JAX_PLATFORMS="tpu,cpu") == ["16", "4", "cpu"]
    assert here(4, JAX_NUM_CPU_DEVICES="2", PJRT_NPROC="3") == ["3", "4", "cpu"]
    assert here(4, JAX_NUM_CPU_DEVICES="6") == ["16", "6", "cpu"]


def test_pretend_keeps_accelerators_where_it_may(here):
    assert here(4, None) == ["16", "4", "cpu"]
    assert here(4, None, JAX_PLATFORMS="cpu,other") == ["16", "4", "cpu,other"]
    assert here(4, None, on_cpus=False) == ["16", "4", None]
    assert here(8, None, on_cpus=False, backend="gpu") == ["32", "8", None]


@pytest.mark.parametrize(
    ("arguments", "cpus", "backend", "found"),
    [
        ((8,), 8, "gpu", "on gpu"),
        ((4,), 8, "METAL", "on METAL"),
        ((9,), 8, "cpu", "with 8 CPU devices"),
        ((9, None), 8, "cpu", "with 8 CPU devices"),
        ((4,), 2, "cpu", "with 2 CPU devices"),
        ((4,), 2, "gpu", "with 2 CPU devices"),
        ((2,), 1, "cpu", "with 1 CPU device"),
    ],
)
def test_pretend_says_when_jax_has_started_on_an_accelerator_or_with_fewer(here, arguments, cpus, backend, found):
    with pytest.raises(jshard.JShardError) as told:
        here(*arguments, cpus=cpus, backend=backend)
    count = arguments[0]
    assert str(told.value) == (
        f"{count} devices can't be pretended: JAX has already started {found}; call jshard.pretend({count}) before "
        f"anything that makes an array, or start Python with JAX_NUM_CPU_DEVICES={count} PJRT_NPROC={4 * count} JAX_PLATFORMS=cpu"
    )


def test_pretend_leaves_accelerators_in_what_it_says(here):
    with pytest.raises(jshard.JShardError) as told:
        here(9, None, on_cpus=False, backend="gpu")
    assert str(told.value).endswith(", or start Python with JAX_NUM_CPU_DEVICES=9 PJRT_NPROC=36")


PLUGIN = """
import sys
from jax._src import xla_bridge

def start():
    print("another backend starts", file=sys.stderr)
    raise RuntimeError

def initialize():
    xla_bridge.register_backend_factory("another", start, priority=500, fail_quietly=True)
"""
MEMBER = {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}
OPENED = "from jshard.cli.target import Target; from jshard.cli.experiment import opened; opened(Target('configs/xor.yaml', ()))"
ONE = OPENED.replace("()", "('jshard.mesh.tensor=1',)") + "; import jax; jax.devices()"


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("program", "variables", "starts"),
    [
        ("import jax; jax.devices()", {}, True),
        ("import jshard; jshard.pretend(2); import jax; jax.devices()", {}, False),
        ("import jax, jshard; jshard.init(devices=2); jax.devices()", {}, False),
        ("import jax, jshard; jshard.init(devices=2); jax.devices()", MEMBER, False),
        (OPENED, {}, False),
        (ONE, {}, False),
        ("from jshard.cli import main; main(['explain', 'configs/cnn/tensor.yaml', '--trust'])", {}, False),
        (
            "import jax; from jshard.launch.initialize import pretend_part; pretend_part(4, 2, None); jax.devices()",
            {},
            False,
        ),
        (
            "from jshard.cli import main; main(['plan', 'configs/xor.yaml', '--trust', '--topology', 'cpu:4'])",
            {},
            False,
        ),
        ("from jshard.cli import main; main(['bench', 'kernels', '--size', '8B'])", {}, False),
    ],
)
def test_pretend_starts_no_other_backend(program, variables, starts, tmp_path):
    (tmp_path / "jax_plugins" / "another").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "another" / "__init__.py").write_text(PLUGIN)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    if variables:
        variables = {**variables, "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env=users_environment(PYTHONPATH=path, **variables),
    )  # fmt: skip
    assert (done.returncode, "another backend starts" in done.stderr) == (0, starts), done.stderr


UNWAITED = """
import sys, jshard
jshard.pretend(8)
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

def body(w, x):
    y = lax.psum(x @ w, "tensor")
    return w - 1e-6 * lax.psum(x.T @ y, "data")

ways = P("tensor", None), P("data", "tensor")
step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ways, out_specs=ways[0]), donate_argnums=0)
w, x = (jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, way)) for way in ways)
for _ in range(int(sys.argv[1])):
    w = step(w, x)
print(bool(jnp.isfinite(w).all()))
"""


@pytest.mark.quick("1")
@pytest.mark.parametrize("time", range(RUNS))
def test_pretend_steps_dispatched_without_waiting_do_not_hang(time):
    assert run(UNWAITED.replace("sys.argv[1]", str(STEPS)), timeout=30 + STEPS / 20) == "True"
