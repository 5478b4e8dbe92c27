"""Kernels with a fault planted, run in a process of their own: `python tests/kernels/planted.py FAULT...`

Prints a line for each: the fault, and what was found. A deadlock prints nothing and is ended from outside.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from unittest import mock

os.environ.update(JAX_NUM_CPU_DEVICES="4", JAX_PLATFORMS="cpu", PJRT_NPROC="32")

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from jshard import kernels
from jshard.kernels.tiles import pack, unpack
from jshard.kernels.tpu import all_reduce as tpu
from jshard.kernels.tpu import dma
from jshard.kernels.tpu.dma import Group, barrier, in_blocks, remote_copy
from tests.support.compiled_before import interpreting


class Halfway:
    """A copy of which one wait is forgotten."""

    def __init__(self, copy, forgotten):
        self.copy, self.forgotten = copy, forgotten

    def start(self):
        self.copy.start()

    def wait(self):
        if self.forgotten != "send":
            self.copy.wait_send()
        if self.forgotten != "receive":
            self.copy.wait_recv()


def first_slot(source, target, semaphores, device_id):
    return remote_copy(source, target.ref.at[0] if hasattr(target, "ref") else target, semaphores, device_id)


def too_far(rows, body):
    in_blocks(rows, lambda r: body(pl.ds(r.start + 8, r.size)))


def only_once():
    """The entry barrier, and none at the end of a round."""
    passed = []

    def entry(group, rank, who):
        if not passed:
            passed.append(barrier(group, rank, who))

    return entry


def wrong_neighbour(self, rank, by):
    return jax.lax.rem(rank + 1, self.size)  # whoever was meant


def one_too_many(group, rank, who):
    barrier(group, rank, who)
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), 1)


PLANTED = {
    "none": lambda: contextlib.nullcontext(),
    "no_receive_wait": lambda: mock.patch.object(dma, "remote_copy", lambda *a: Halfway(remote_copy(*a), "receive")),
    "no_send_wait": lambda: mock.patch.object(dma, "remote_copy", lambda *a: Halfway(remote_copy(*a), "send")),
    "slot_written_twice": lambda: mock.patch.object(dma, "remote_copy", first_slot),
    "out_of_bounds": lambda: mock.patch.object(dma, "in_blocks", too_far),
    "no_end_barrier": lambda: mock.patch.object(dma, "barrier", only_once()),
    "wrong_neighbour": lambda: mock.patch.object(Group, "shift", wrong_neighbour),
    "deadlock": lambda: mock.patch.object(dma, "barrier", one_too_many),
    "no_entry_barrier": lambda: mock.patch.object(dma, "barrier", lambda *_: None),
}


def program(rounds, devices):
    """The one-shot kernel, `rounds` times over on the same buffers between one entry and the last end barrier."""
    axes = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((devices,), ("t",), axis_types=axes, devices=jax.devices()[:devices])

    def body(x):
        return unpack(tpu.one_shot(pack(x, 1)[0], Group.of(("t",)), x, rounds=rounds), x.shape)[0]

    x = np.arange(20, dtype=np.float32).reshape(devices, 20 // devices)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("t"), out_specs=P()))
    return run, jax.device_put(x, jax.NamedSharding(mesh, P("t"))), x.sum(0)


def found(fault, copies, rounds):
    printed = io.StringIO()
    with PLANTED[fault](), kernels.interpret(copies=copies), contextlib.redirect_stdout(printed):
        run, x, expected = program(rounds, 2 if rounds > 3 else 4)
        error, got = "", None
        try:
            got = np.asarray(run(x))
        except Exception as raised:  # what it was is in its text, as the interpreter's threads hand on no types
            error = f"{type(raised).__name__} {raised}"
        finally:
            with contextlib.suppress(Exception):
                jax.effects_barrier()
            pltpu.reset_tpu_interpret_mode_state()
    text = printed.getvalue() + error
    words = ["race"] if "RACE DETECTED" in text else []
    words += ["left over"] if "non-zero count" in text else []
    if got is None:
        return words or ["refused" if "out of bound" in text.lower() or "out-of-bound" in text.lower() else error[:200]]
    return words + ([] if np.array_equal(got, expected) else ["wrong"])


if __name__ == "__main__":
    with interpreting():
        for fault in sys.argv[1:]:
            for copies in ("on_wait", "eager") if fault == "none" else ("on_wait",):
                rounds = {"none": 100 if copies == "on_wait" else 20, "no_end_barrier": 3}.get(fault, 1)
                print(fault, copies, *(found(fault, copies, rounds) or ["clean"]), sep=",", flush=True)
