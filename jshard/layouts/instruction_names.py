"""Names by which XLA for CPUs and GPUs can tell the instructions of a program apart.

JAX names an instruction after its primitive, `dynamic_slice.4`, and XLA its own after the operation, `dynamic-slice.4`. Where
both end up in one fusion, XLA writes both as the function `dynamic_slice_4` and runs one of them twice: the result is wrong
without a word (docs/design/0003-pretend-devices.md). Of one name XLA itself gives no number twice.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

# What XLA may add to a program and may fuse, of what a primitive of JAX is named after.
SHARED = frozenset(
    "dynamic_slice dynamic_update_slice is_finite reduce_precision select_and_scatter shift_left shift_right_arithmetic "
    "shift_right_logical".split()
)


def tell_apart(operation: Any) -> None:
    """Give an instruction of JAX's the name that XLA gives to its own."""
    place = operation.location
    if operation.name.removeprefix("stablehlo.") in SHARED and isinstance(place, ir.NameLoc):
        *scopes, name = place.name_str.split("/")
        operation.location = ir.Location.name("/".join([*scopes, name.replace("_", "-")]), place.child_loc)
