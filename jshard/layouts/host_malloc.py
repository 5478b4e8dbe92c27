"""Memory that is freed stays with the process.

XLA for CPUs takes the memory of a step anew each time. glibc gives what is large back to the system at once, which then hands
it out again page by page: that took a third of a step of four processes (docs/design/0015-processes.md).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

from jshard.hardware.host import computes_on_cpus

# The numbers of mallopt(3), and their values.
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
