"""Distinct names for instructions of JAX and of XLA, on CPUs and GPUs.

JAX names an instruction after its primitive, `dynamic_slice.4`, and XLA names its own after the operation,
`dynamic-slice.4`. If a fusion has both, XLA writes both as the function `dynamic_slice_4` and runs one of them
twice: the result is silently wrong (docs/design/0003-pretend-devices.md). XLA itself repeats no number of a name.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

# Primitives named like an operation that XLA may add and fuse.
SHARED = frozenset(
    "dynamic_slice dynamic_update_slice is_finite reduce_precision select_and_scatter shift_left shift_right_arithmetic "
    "shift_right_logical".split()
)


def tell_apart(operation: Any) -> None:
    """Give an instruction from JAX the name of XLA's own instructions."""
    place = operation.location
    if operation.name.removeprefix("stablehlo.") in SHARED and isinstance(place, ir.NameLoc):
        *scopes, name = place.name_str.split("/")
        operation.location = ir.Location.name("/".join([*scopes, name.replace("_", "-")]), place.child_loc)
