"""JAX's slices and XLA's own, in one fusion, stay two instructions on CPU devices."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir

from jshard.layouts.before_compiling import change
from jshard.layouts.mesh import build_mesh

X = np.arange(8, dtype=np.float32).reshape(4, 2)
Y = X + 100


def own_part(x):
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("x"), 1, 1)


@pytest.mark.parametrize("others", [2, 3, 4])
def test_a_slice_of_jax_and_one_of_xla_with_one_number_are_two(others):
    """XLA cuts y where the shard_map takes a part of it, and each of the others: of those of three its number was JAX's."""
    mesh, split = build_mesh({"x": 2}, axis_types="auto"), jax.P(None, "x")

    @jax.jit
    def joined(x, y):
        join = jax.shard_map(
            lambda x, y: jnp.concatenate([own_part(x), y]), mesh=mesh, in_specs=(jax.P(), split), out_specs=split
        )
        part = jax.shard_map(lambda y: y, mesh=mesh, in_specs=split, out_specs=split)
        return join(x, y), [part(y + number) for number in range(others)]

    placed = jax.device_put((X, Y), jax.NamedSharding(mesh, jax.P()))
    np.testing.assert_array_equal(joined(*placed)[0], np.concatenate([X, Y]))
    found = re.findall(r"%([\w.-]+) = f32\S+ dynamic-slice\(", joined.lower(*placed).compile().as_text())
    assert len({name.replace("-", "_") for name in found}) == len(found) >= 2


def test_a_slice_has_the_name_that_xla_gives_and_others_keep_theirs():
    def sum_of_two(x, at):
        return jax.lax.dynamic_slice(x, (at,), (2,)).sum()

    module, names = jax.jit(sum_of_two).lower(X[0], 0).compiler_ir("stablehlo"), set()
    change(module, "cpu")

    def at(operation):
        place = operation.location
        names.update({(operation.name, place.name_str)} if isinstance(place, ir.NameLoc) else ())
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(at)
    assert ("stablehlo.dynamic_slice", "jit(sum_of_two)/dynamic-slice") in names
    assert ("stablehlo.reduce", "jit(sum_of_two)/reduce_sum") in names
