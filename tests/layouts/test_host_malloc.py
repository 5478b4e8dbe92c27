"""Memory that a process frees stays with it, unless the user has told malloc something: counted by what the system hands out."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jshard.layouts.pretend import keep_freed

PROGRAM = """
import resource
import jax, jshard
{start}
import jax.numpy as jnp
step = jax.jit(lambda x: x + 1)
x = jnp.zeros(16 << 20)
pages = []
for _ in range(10):  # results lie side by side before they fit where others were
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step(x).block_until_ready()
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(pages))
"""
PAGES = 5 * (64 << 20) // os.sysconf("SC_PAGE_SIZE")  # of what five steps take and free


def faults(start: str, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu", **variables}
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(start=start)], capture_output=True, text=True, check=True, env=environment
    )
    return int(program.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc than glibc's")
@pytest.mark.usefixtures("fresh")
def test_pretended_devices_take_the_memory_of_a_step_from_the_system_once():
    assert faults("jshard.pretend(2)") < PAGES / 20
    assert faults("") > PAGES / 20  # if these get few, this test says nothing


def test_what_the_user_has_said_of_malloc_stays():
    assert not keep_freed({"MALLOC_ARENA_MAX": "4"})
    assert not keep_freed({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})


def test_memory_is_not_kept_beside_gpus_and_tpus():
    assert not keep_freed({"JAX_PLATFORMS": "cuda,cpu"})


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc than glibc's")
def test_threads_take_large_memory_from_the_heap_too():
    """It lies before the heap's end, where nothing is mapped by itself, and the end stays when it is freed."""
    program = """
import ctypes, threading
from jshard.layouts.pretend import keep_freed
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.free.argtypes, libc.sbrk.argtypes = [ctypes.c_void_p], [ctypes.c_long]
assert keep_freed({"JAX_PLATFORMS": "cpu"})
found = []
thread = threading.Thread(target=lambda: found.append(libc.malloc(16 << 20)))
thread.start(), thread.join()
end = libc.sbrk(0)
assert 0 < end - found[0] < 64 << 20, (found, end)
libc.free(found[0])
assert libc.sbrk(0) == end
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    path = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", program], check=True, env=environment | {"PYTHONPATH": path})
