"""The products of GPUs with a fault planted, interpreted in a process of their own: `python tests/kernels/planted_gpu.py`

Prints a line for each: the family, the fault, and what was found.
"""

from __future__ import annotations

import contextlib
import os
import sys
from unittest import mock

os.environ.update(JAX_PLATFORMS="cpu", PJRT_NPROC="32")

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from jshard.kernels.gpu import blackwell, hopper
from jshard.kernels.gpu.tile import Tile


def without_wait(number):
    """The kernel's waits at barriers, but for one: in the order in which it is written."""
    wait, seen = plgpu.barrier_wait, []

    def waits(barrier):
        seen.append(barrier)
        if len(seen) != number:
            wait(barrier)

    return mock.patch.object(plgpu, "barrier_wait", waits)


def store_not_awaited():
    wait = plgpu.wait_smem_to_gmem
    return mock.patch.object(plgpu, "wait_smem_to_gmem", lambda n, **more: wait(n, **more) if n == 0 else None)


def sums_not_cleared():
    multiply = plgpu.tcgen05_mma
    return mock.patch.object(plgpu, "tcgen05_mma", lambda *a, accumulate: multiply(*a, accumulate=True))


PLANTED = {
    ("hopper", "none"): contextlib.nullcontext,
    ("hopper", "store_not_awaited"): store_not_awaited,
    ("blackwell", "none"): contextlib.nullcontext,
    ("blackwell", "store_not_awaited"): store_not_awaited,
    ("blackwell", "stage_written_before_it_is_read"): lambda: without_wait(1),
    ("blackwell", "stage_read_before_it_has_arrived"): lambda: without_wait(2),
    ("blackwell", "sums_read_before_they_are_done"): lambda: without_wait(3),
    ("blackwell", "sums_not_cleared"): sums_not_cleared,
}


def found(family, fault):
    x, w, b = ((np.arange(a * b) * 7 % 5 - 2).reshape(a, b) for a, b in ((128, 640), (640, 256), (1, 256)))
    out = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    kernel = {"hopper": hopper, "blackwell": blackwell}[family].matmul
    with PLANTED[family, fault](), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        try:
            run = jax.jit(lambda x, w, b: kernel(x, w, b, lambda y: y, out, Tile(128, 128), 1))
            y = np.asarray(run(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), b[0].astype(np.float32)))
        except Exception as raised:  # what it was is in its text, as the interpreter's threads hand on no types
            return "race" if "race" in str(raised).lower() else "refused"
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
    return "clean" if np.array_equal(y, x @ w + b) else "wrong"


if __name__ == "__main__":
    for family, fault in PLANTED:
        print(family, fault, found(family, fault), sep=",", flush=True)
    sys.stdout.flush()
    os._exit(0)  # what a fault left running would be waited for
