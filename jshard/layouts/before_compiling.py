"""Changes to programs before XLA compiles them for CPUs or GPUs: against wrong or slow code."""

from __future__ import annotations

from typing import Any

from jax._src import compiler
from jax.extend.mlir import ir

from jshard.layouts.instruction_names import tell_apart
from jshard.layouts.kernel_gradients import turn_products

CHANGES = {"cpu": (tell_apart, turn_products), "tpu": ()}
OTHERS = (tell_apart,)


def change_programs() -> None:
    """Make JAX pass its programs to XLA with these changes."""
    compiled = compiler.backend_compile_and_load

    def compile_changed(backend: Any, module: Any, *rest: object) -> Any:
        change(module, backend.platform)
        return compiled(backend, module, *rest)

    compiler.backend_compile_and_load = compile_changed


def change(module: Any, platform: str) -> None:
    """Change a program in place, for compilation on a platform."""
    changes = CHANGES.get(platform, OTHERS)

    def at(operation: object) -> Any:
        for each in changes:
            each(operation)
        return ir.WalkResult.ADVANCE

    if changes:
        with module.context:
            module.operation.walk(at)
