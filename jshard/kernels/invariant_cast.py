"""Primitives that change the varying type of a value and compute nothing. They cast to
invariant where `check_vma` can't infer it, or to varying and back over mesh axes of size 1."""

from __future__ import annotations

from collections.abc import Iterable, Set

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType

from jshard.kernels.slices import size_along

invariant_cast_p = Primitive("invariant_cast")
invariant_cast_p.def_abstract_eval(lambda x: x.update_manual_axis_type(ManualAxisType()))
invariant_cast_p.def_impl(lambda x: x)
mlir.register_lowering(invariant_cast_p, lambda _, x: [x])
batching.defvectorized(invariant_cast_p)


# With lax.pcast, JAX would sum gradients over the single device, and XLA would copy each array of such a sum.
def _one_device(name: str) -> Primitive:
    cast = Primitive(name)
    cast.def_abstract_eval(
        lambda x, varying: x.update(
            sharding=x.sharding.update(mesh=jax.sharding.get_abstract_mesh())  # a constant has no mesh
        ).update_manual_axis_type(ManualAxisType(varying=varying))
    )
    cast.def_impl(lambda x, varying: x)
    mlir.register_lowering(cast, lambda _, x, varying: [x])
    batching.defvectorized(cast)
    ad.deflinear2(cast, lambda ct, x, varying: [one_device_cast_p.bind(ct, varying=x.aval.mat.varying)])
    return cast


one_device_cast_p = _one_device("one_device_cast")
one_device_sum_p = _one_device("one_device_sum")  # in place of a psum on larger meshes: verify compares the two


def over_one_device(x: Array, mesh_axes: Iterable[str], *, varies: bool, is_sum: bool = False) -> Array:
    """Mark `x` as varying, or as invariant, over the `mesh_axes` of size 1; value and gradient do not change."""
    have = jax.typeof(x).mat.varying
    asked = frozenset(mesh_axes) - have if varies else have.intersection(mesh_axes)
    alone = frozenset(name for name in asked if size_along(name) == 1)
    names = have | alone if varies else have - alone
    return (one_device_sum_p if is_sum else one_device_cast_p).bind(x, varying=names) if alone else x


def set_varying(x: Array, mesh_axes: Set[str]) -> Array:
    """Mark `x` as varying over exactly `mesh_axes`; nothing checks it."""
    if jax.typeof(x).mat.varying == mesh_axes:
        return x
    x = invariant_cast_p.bind(x)
    return lax.pcast(x, tuple(sorted(mesh_axes)), to="varying") if mesh_axes else x
