"""Cast values to invariant where `check_vma` can't infer it: a primitive that changes a type and computes nothing."""

from __future__ import annotations

from collections.abc import Set

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import ManualAxisType

invariant_cast_p = Primitive("invariant_cast")
invariant_cast_p.def_abstract_eval(lambda x: x.update_manual_axis_type(ManualAxisType()))
invariant_cast_p.def_impl(lambda x: x)
mlir.register_lowering(invariant_cast_p, lambda _, x: [x])
batching.defvectorized(invariant_cast_p)


def set_varying(x: Array, mesh_axes: Set[str]) -> Array:
    """Mark `x` as varying over `mesh_axes` and no others; nothing checks that it is so."""
    if jax.typeof(x).mat.varying == mesh_axes:
        return x
    x = invariant_cast_p.bind(x)
    return lax.pcast(x, tuple(sorted(mesh_axes)), to="varying") if mesh_axes else x
