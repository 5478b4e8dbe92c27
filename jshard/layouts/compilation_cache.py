"""CPU programs in JAX's compilation cache, with their collectives kept in order. Otherwise devices
wait for each other in two collectives until XLA ends the process after 40 s, or meet in the wrong
collective (docs/design/0003-pretend-devices.md)."""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax._src import compiler

from jshard.layouts.collective_order import in_order


class _InOrder:
    """An executable to be cached, with ordered collectives."""

    def __init__(self, executable: Any):
        self.executable = executable

    def serialize(self) -> bytes:
        return in_order(self.executable.serialize())


def keep_in_order() -> None:
    """Make JAX's compilation cache keep the collectives of CPU programs in order."""
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
        write(key, seconds, name, backend, _InOrder(executable) if backend.platform == "cpu" else executable, *rest)

    compiler._cache_write = written
