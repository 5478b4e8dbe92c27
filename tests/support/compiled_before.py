"""What tests compile takes a third of the time, and is kept outside the checkout: a second run compiles only what changed.

Import this before JAX. Processes that a test starts read and write there too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
PLACE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jshard-tests-ordered")
PLACE /= f"jax-{version('jax')}-python-{sys.version_info[0]}.{sys.version_info[1]}"
# JAX's key is that of a program before jshard changes it.
CHANGED_BY = [
    ROOT / f"jshard/layouts/{each}.py"
    for each in ("before_compiling", "instruction_names", "kernel_gradients", "collective_order")
]
# `jshard.plan` keeps what compilers for absent chips made. A change of what starts them compiles all of it again.
COMPILED_BY = [ROOT / f"jshard/inspect/plan/{each}.py" for each in ("aot", "aot_worker", "cache")]


def _checksum(files: list[Path]) -> str:
    return f"{zlib.crc32(b''.join(each.read_bytes() for each in files)):08x}"


PLANS = PLACE / f"plans-{_checksum(COMPILED_BY)}"
PLACE /= _checksum(CHANGED_BY)
WEEK = 7 * 24 * 3600

OLD = version("jax").startswith("0.10.")  # the oldest JAX that jshard takes
# For programs this small nearly all of the time goes into code that is made to run fast (docs/design/0017-quick-suite.md).
QUICK = "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=1"
if OLD:  # a later XLA knows no other emitters, and ends a process that names them
    QUICK += " --xla_cpu_use_fusion_emitters=false"

# Programs that are called are one whatever their names in processes that `name_what_is_read` has changed.
OF_NEW_PROCESSES = {"JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"}

os.environ.setdefault("XLA_FLAGS", QUICK)
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": str(PLACE),
    # Names and lines are part of a program: two that differ by them only would share the causes of one. (In tests
    # and their forks only of programs that are compiled to be read: `name_what_is_read`.)
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "true",
    # Another checkout, or a model in another run's folder, would make all of them other programs.
    "JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX": rf"^{re.escape(str(ROOT))}(?=/)|^{re.escape(tempfile.gettempdir())}"
    r"/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?(?=/)",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


# Rooms whose tests run a program once or twice.
QUICKEST = "tests/inspect/", "tests/layers/", "tests/layouts/", "tests/signals/"


def compile_quickest() -> None:
    """For tests of these rooms XLA for CPUs compiles at its lowest level, in two thirds of the time. Not what draws normal numbers, by the
    inverse of an error function, whose last bit there is another in each program. Not where the suite runs as users compile."""
    from jax._src import compiler
    from jax._src.interpreters import mlir

    if os.environ["XLA_FLAGS"] != QUICK:
        return
    compile_ = compiler.compile_or_get_cached

    def compiled(backend: Any, computation: Any, devices: Any, options: Any, *args: Any, **more: Any) -> Any:
        is_quick = backend.platform == "cpu" and os.environ.get("PYTEST_CURRENT_TEST", "").startswith(QUICKEST)
        if is_quick and b"erf_inv" not in mlir.module_to_bytecode(computation):
            options.executable_build_options.debug_options.xla_backend_optimization_level = 0
        return compile_(backend, computation, devices, options, *args, **more)

    compiler.compile_or_get_cached = compiled


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Compile interpreted kernels without optimization, and hand the interpreter arrays that JAX has not placed on a device.
    Not where the suite runs as users compile."""
    import jax
    from jax._src import callback

    if os.environ["XLA_FLAGS"] != QUICK:
        yield
        return
    unplaced = mock.patch.object(callback, "api", SimpleNamespace(device_put=lambda args, device: args))
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with unplaced:
            yield
            jax.effects_barrier()
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def name_what_is_read() -> None:
    """Names and lines belong to the key of what `lower().compile()` gives, whose text can be read. Of a program that is only
    called nobody sees them: the same operation on other lines would be another program, a third of all."""
    import jax
    from jax._src import stages
    from jax._src.config import compilation_cache_include_metadata_in_key
    from jax._src.interpreters import pxla

    compile_, named = stages.Lowered.compile, weakref.WeakSet()

    def compiled(self: Any, *args: Any, **options: Any) -> Any:
        computation = self._lowering
        if computation not in named:  # a call may have found the program of another line
            computation._executable = None
            pxla._cached_compilation.evict_weakref(computation._hlo)
            named.add(computation)
        with compilation_cache_include_metadata_in_key(True):
            return compile_(self, *args, **options)

    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)
    stages.Lowered.compile = compiled


def as_tests_do() -> None:
    """Share programs and contexts, in tests and in the processes that they start."""
    name_what_is_read()
    reuse_contexts()
    write_in_one_move()


def write_in_one_move() -> None:
    """JAX writes an entry in place, where another worker can read half of it."""
    from jax._src.lru_cache import LRUCache

    def put(self: LRUCache, key: str, value: bytes) -> None:
        entry = Path(self.path, f"{key}-cache")
        if not entry.exists():
            written = Path(self.path, f"{os.getpid()}-{time.monotonic_ns()}-part")
            written.write_bytes(value)
            written.replace(entry)

    LRUCache.put = put


def write_from_every_process() -> None:
    """Of several processes JAX lets the first write, and no two have the key of a program in common: the others compiled theirs
    in every run. Before jshard is imported."""
    from jax._src import compiler

    write, first = compiler._cache_write, SimpleNamespace(global_state=SimpleNamespace(process_id=0))
    compiler._cache_write = FunctionType(write.__code__, {**vars(compiler), "distributed": first})


def reuse_contexts() -> None:
    """JAX 0.10 makes an MLIR context for each program, 4 ms of processor time; JAX 0.12 gives a thread ten programs in one,
    and here it is forty."""
    from jax._src.interpreters import mlir

    if not OLD:
        return
    new, held = mlir.make_ir_context, threading.local()

    def make_ir_context() -> Any:
        held.programs = (getattr(held, "programs", 0) + 1) % 40
        if held.programs == 1:
            held.context = new()
        return held.context

    mlir.make_ir_context = make_ir_context


def count_and_sweep(since: float) -> tuple[int, int]:
    """Return how many programs were compiled before a time and after it; remove those that are a week old."""
    PLACE.mkdir(parents=True, exist_ok=True)
    times: list[float] = []
    for entry in os.scandir(PLACE):
        with contextlib.suppress(FileNotFoundError):  # another run has just moved or removed it
            written = entry.stat().st_mtime
            if written < time.time() - WEEK:
                os.unlink(entry)
            elif entry.name.endswith("-cache"):
                times.append(written)
    return sum(time < since for time in times), sum(time >= since for time in times)
