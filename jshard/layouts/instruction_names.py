"""Names by which XLA for CPUs and GPUs can tell the instructions of a program apart.

JAX names an instruction after its primitive, `dynamic_slice.4`, and XLA its own after the operation, `dynamic-slice.4`. Where
both end up in one fusion, XLA writes both as the function `dynamic_slice_4` and runs one of them twice: the result is wrong
without a word (docs/design/0003-pretend-devices.md). Of one name XLA itself gives no number twice.
"""

from __future__ import annotations

from typing import Any

from jax._src import compiler
from jax.extend.mlir import ir

# What XLA may add to a program and may fuse, of what a primitive of JAX is named after.
SHARED = frozenset(
    "dynamic_slice dynamic_update_slice is_finite reduce_precision select_and_scatter shift_left shift_right_arithmetic "
    "shift_right_logical".split()
)


def tell_apart() -> None:
    """Have JAX give its instructions the names that XLA gives to its own."""
    compiled = compiler.backend_compile_and_load

    def compile_named(backend: Any, module: Any, *rest: Any) -> Any:
        if backend.platform != "tpu":
            with module.context:
                module.operation.walk(_rename)
        return compiled(backend, module, *rest)

    compiler.backend_compile_and_load = compile_named


def _rename(operation: Any) -> Any:
    place = operation.location
    if operation.name.removeprefix("stablehlo.") in SHARED and isinstance(place, ir.NameLoc):
        *scopes, name = place.name_str.split("/")
        operation.location = ir.Location.name("/".join([*scopes, name.replace("_", "-")]), place.child_loc)
    return ir.WalkResult.ADVANCE
