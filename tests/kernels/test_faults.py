"""Faults planted in a kernel, each found; and what the barriers are for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.kernels.tpu import dma
from tests.kernels.barriers import missing_barriers, remote_copies

HERE = Path(__file__).parent
IN_PROCESS = ["none", "no_receive_wait", "no_send_wait", "slot_written_twice", "wrong_neighbour", "out_of_bounds"]


def started(*faults: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(HERE / "planted.py"), *faults],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
    )


@pytest.fixture(scope="module")
def found():
    """What a process with the faults of IN_PROCESS printed: fault and copies -> words."""
    out, _ = started(*IN_PROCESS, "no_end_barrier").communicate(timeout=280)
    return {tuple(line.split(",")[:2]): set(line.split(",")[2:]) for line in out.splitlines() if "," in line}


@pytest.mark.slow
@pytest.mark.parametrize("copies", ["on_wait", "eager"])
def test_rounds_on_the_same_buffers_are_clean(found, copies):
    """100 of them, or 20 where every copy happens at once."""
    assert found["none", copies] == {"clean"}


@pytest.mark.slow
def test_why_the_end_barrier(found):
    """Without it a device begins the next round, and overwrites what another one has not read yet."""
    assert "race" in found["no_end_barrier", "on_wait"]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("no_receive_wait", {"wrong", "race"}),
        ("no_send_wait", {"left over"}),
        ("slot_written_twice", {"race"}),
        ("wrong_neighbour", {"race", "wrong", "left over"}),
        ("out_of_bounds", {"refused"}),
    ],
)
def test_planted_fault_is_found(found, fault, word):
    assert found[fault, "on_wait"] & word, found[fault, "on_wait"]


@pytest.mark.slow
def test_deadlock_is_ended_by_a_time_limit():
    """The same process without the fault is done by then: the limit is its time and as much again."""
    clean, begun = started("no_send_wait"), time.monotonic()
    out, _ = clean.communicate(timeout=120)
    assert "left over" in out
    stuck = started("deadlock")
    with pytest.raises(subprocess.TimeoutExpired):
        stuck.communicate(timeout=2 * (time.monotonic() - begun))
    stuck.kill()
    stuck.communicate()


# -- what only the jaxpr shows --


def jaxpr_of(mesh, body, **sizes):
    here = mesh(**sizes)
    x = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=jax.NamedSharding(here, P("t")))
    with kernels.interpret():
        return jax.make_jaxpr(jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P("t")))(x)


BODIES = {
    **{a: lambda x, a=a: kernels.all_reduce(x, "t", algorithm=a) for a in ("one_shot", "ring")},
    "reduce_scatter": lambda x: kernels.reduce_scatter(x, "t", algorithm="ring"),
    "all_gather": lambda x: kernels.all_gather(x, "t", algorithm="ring"),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_kernel_waits_at_a_barrier_before_it_writes_to_others(mesh, name):
    jaxpr = jaxpr_of(mesh, BODIES[name], t=2)
    assert remote_copies(jaxpr) > 0
    assert missing_barriers(jaxpr) == []


def test_kernel_without_an_entry_barrier_is_found(mesh, monkeypatch):
    monkeypatch.setattr(dma, "barrier", lambda *_: None)
    tpu_kernel = jaxpr_of(mesh, lambda x: kernels.all_reduce(x[:3], "t", algorithm="one_shot"), t=2)
    assert missing_barriers(tpu_kernel) == [
        'kernel "all_reduce_one_shot" copies to another device before it has waited at a barrier; '
        "begin it with a signal to everyone whom it will write to, and a wait for as many"
    ]


def test_delayed_device_still_gets_the_right_sum(mesh, interpreted):
    def late(i):
        time.sleep(0.3 * (int(i) == 1))
        return np.float32(0)

    def body(x):
        wait = jax.pure_callback(late, jax.ShapeDtypeStruct((), np.float32), jax.lax.axis_index("t"), vmap_method=None)
        return kernels.all_reduce(x + wait, "t", algorithm="one_shot")

    here = mesh(t=4)
    x = jax.device_put(np.arange(8, dtype=np.float32), jax.NamedSharding(here, P("t")))
    run = jax.shard_map(body, mesh=here, in_specs=P("t"), out_specs=P())
    np.testing.assert_array_equal(jax.jit(run)(x), np.arange(8).reshape(4, 2).sum(0))
