"""Pretend devices: several CPU devices on a machine without an accelerator, to try out a mesh."""

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
    """Start only JAX's CPU backend if there is no accelerator. Otherwise libtpu looks for a TPU on
    the network, and CUDA's plugin prints a page about its search."""
    if computes_on_cpus() and not os.environ.get("JAX_PLATFORMS"):
        _set_platforms("cpu")


def _set_platforms(platforms: str) -> None:
    os.environ["JAX_PLATFORMS"] = platforms
    if _may_start():
        import jax

        jax.config.update("jax_platforms", platforms)


def _may_start() -> bool:
    """Return whether JAX is imported, and so has read the environment, but has started no backend."""
    if "jax" not in sys.modules:
        return False
    from jax._src.xla_bridge import backends_are_initialized

    return not backends_are_initialized()


def pretend(count: int, platforms: str | None = "cpu") -> None:
    """Make JAX start with `count` CPU devices. Call it before JAX does anything.

    With `platforms=None`, accelerators stay the default if there are any, with CPU devices beside
    them; otherwise no other backend starts, since libtpu would look for a TPU on the network.
    Settings in the environment (`PJRT_NPROC`, a larger `JAX_NUM_CPU_DEVICES`) are kept. A process
    that computes on CPUs keeps the memory it frees. A refused call changes nothing.
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
    """Raise an error if JAX has started with fewer devices or on another platform."""
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


# Freed memory stays with the process. XLA for CPUs allocates the memory of each step again. glibc
# returns large blocks to the system at once, and gets them back page by page: a third of the time
# of a step in four processes (docs/design/0015-processes.md). Numbers of mallopt(3), with values:
SETTINGS = {
    -4: 0,  # M_MMAP_MAX: no block is mapped by itself, to be unmapped when freed
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: 2 GiB at the heap's end stay
    -8: 1,  # M_ARENA_MAX: heaps of further threads hold 64 MiB, and map larger blocks by themselves
}


def keep_freed(environment: Mapping[str, str] = os.environ) -> bool:
    """Make this process keep the memory it frees, and return whether it does. Only a process that
    computes on CPUs keeps it, on Linux with glibc, and unless the user has tuned malloc in the
    environment (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES` and so on)."""
    tuned = "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    tuned |= any(name.startswith("MALLOC_") for name in environment)
    if tuned or sys.platform != "linux" or not computes_on_cpus(environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl has not
    return mallopt is not None and all(mallopt(number, value) for number, value in SETTINGS.items())
