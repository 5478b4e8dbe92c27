"""What JAX's compilation cache may keep of programs for CPU devices.

XLA for CPUs runs the collectives of a program in one order on every device. In a program that comes back from the cache, those
of a loop's body are no longer ordered against those around the loop: devices wait for one another until XLA ends the process
after 40 s, or meet in the wrong collective (docs/design/0003-pretend-devices.md). Such programs are compiled anew.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
from jax._src import compiler

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(-start)?\("
)


def loses_order(hlo: str) -> bool:
    """Whether two computations of a compiled program hold collectives: a loop's body and what surrounds it, say."""
    return sum(COLLECTIVE.search(computation) is not None for computation in hlo.split("\n}")) > 1


def keep_only_ordered() -> None:
    """Have JAX's compilation cache keep no CPU program that would come back from it with its collectives out of order."""
    write = getattr(compiler, "_cache_write", None)
    if write is None:
        if jax.config.values["jax_compilation_cache_dir"]:
            warnings.warn(
                f"jax {jax.__version__} may keep CPU programs that hang when they come back: "
                "set JAX_ENABLE_COMPILATION_CACHE=false where you compute on CPU devices",
                stacklevel=2,
            )
        return

    def written(key: str, seconds: float, name: str, backend: Any, executable: Any, *rest: Any) -> None:
        if backend.platform != "cpu" or not any(loses_order(module.to_string()) for module in executable.hlo_modules()):
            write(key, seconds, name, backend, executable, *rest)

    compiler._cache_write = written
