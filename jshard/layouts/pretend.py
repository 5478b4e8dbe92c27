"""Pretend devices: several CPU devices on a machine that has no accelerator, for trying out a mesh."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

from jshard.errors import JShardError
from jshard.hardware.host import computes_on_cpus

# Each pretend device blocks a thread of XLA's pool while it waits for the others in a collective, and steps dispatched
# without waiting queue up behind it: with one thread a device, programs hang (docs/design/0003-pretend-devices.md).
THREADS_PER_DEVICE = 4


def start_no_other_backend() -> None:
    """Where there is no accelerator, JAX starts the backend of CPUs alone: libtpu would look for a TPU on the network, and
    CUDA's plugin says for a page what it does not find."""
    if computes_on_cpus() and not os.environ.get("JAX_PLATFORMS"):
        _set_platforms("cpu")


def _set_platforms(platforms: str) -> None:
    os.environ["JAX_PLATFORMS"] = platforms
    if _may_start():
        import jax

        jax.config.update("jax_platforms", platforms)


def _may_start() -> bool:
    """Whether JAX is imported, and so has read the environment, and has no backend yet, and so takes what it is told."""
    if "jax" not in sys.modules:
        return False
    from jax._src.xla_bridge import backends_are_initialized

    return not backends_are_initialized()


def pretend(count: int, platforms: str | None = "cpu") -> None:
    """Makes JAX start with `count` CPU devices. Call it before JAX does anything.

    With `platforms=None` accelerators stay the default where there are some, and the CPU devices are there beside them;
    where there are none, no other backend starts: libtpu would look for a TPU on the network. What the user has set in
    the environment (`PJRT_NPROC`, a larger `JAX_NUM_CPU_DEVICES`) stays as it is. A process that computes on CPUs keeps the
    memory that it frees. A call that is refused changes nothing.
    """
    if not isinstance(count, int) or count < 1:
        raise JShardError(f"jshard.pretend was given {count!r}", hint="give it a number of devices: jshard.pretend(8)")
    threads, asked = THREADS_PER_DEVICE * count, os.environ.get("JAX_NUM_CPU_DEVICES", "")
    if asked.isdecimal():
        count = max(count, int(asked))
    if platforms is None and computes_on_cpus():
        platforms = os.environ.get("JAX_PLATFORMS") or "cpu"
    if "jax" in sys.modules and not _may_start():
        _check_started(count, platforms)
    os.environ.setdefault("PJRT_NPROC", str(threads))
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    if platforms is not None:
        _set_platforms(platforms)
    keep_freed()
    if _may_start():
        import jax

        jax.config.update("jax_num_cpu_devices", count)


def _check_started(count: int, platforms: str | None) -> None:
    """Raise when JAX has started with fewer devices, or on another platform."""
    import jax

    there, backend = len(jax.devices("cpu")), jax.default_backend()
    if there < count or (platforms == "cpu" and backend != "cpu"):
        found = f"with {there} CPU {'device' if there < 2 else 'devices'}" if there < count else f"on {backend}"
        raise JShardError(
            f"{count} devices can't be pretended: JAX has already started {found}",
            hint=f"call jshard.pretend({count}) before anything that makes an array, or start Python with "
            f"JAX_NUM_CPU_DEVICES={count} PJRT_NPROC={THREADS_PER_DEVICE * count}"
            f"{f' JAX_PLATFORMS={platforms}' if platforms else ''}",
        )


# Memory that is freed stays with the process. XLA for CPUs takes the memory of a step anew each time. glibc gives what is large
# back to the system at once, which then hands it out again page by page: that took a third of a step of four processes
# (docs/design/0015-processes.md). The numbers of mallopt(3), and their values:
SETTINGS = {
    -4: 0,  # M_MMAP_MAX: nothing is mapped by itself, and so unmapped when it is freed
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: 2 GiB at the heap's end stay
    -8: 1,  # M_ARENA_MAX: the heaps of further threads hold 64 MiB, and map what is larger by itself
}


def keep_freed(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process keeps what it frees, from now on: one that computes on CPUs does, on Linux with glibc, unless the
    user has told malloc something in the environment (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES` and so on)."""
    tuned = "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    tuned |= any(name.startswith("MALLOC_") for name in environment)
    if tuned or sys.platform != "linux" or not computes_on_cpus(environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl has not
    return mallopt is not None and all(mallopt(number, value) for number, value in SETTINGS.items())
