"""Create arrays sharded: no device ever holds more than its part."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jshard.errors import JShardError
from jshard.jaxprs import bound, run
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import is_explicit, with_axis_types


def create(
    initializer: Callable[..., jax.Array], key: jax.Array, shape: tuple[int, ...], dtype: Any, layout: Layout
) -> jax.Array:
    """Compute `initializer(key, shape, dtype)` shard by shard: the same bits on every mesh as outside jit on one device."""
    check_shape(shape)
    layout.shard_shape(shape, label="a new array")
    drawn = _Initializer(initializer, _drawn_by(initializer))
    created = _compiled_creation(drawn, shape, jax.dtypes.canonicalize_dtype(dtype), layout)(key)
    return typed_as(created, layout.sharding)


def check_shape(shape: tuple[int, ...]) -> None:
    """Refuse what is no shape: 16.0 equals 16, and would be taken for it, in either direction, by every cache."""
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in shape):
        raise JShardError(f"a new array has the shape {shape}", hint="give it whole numbers")


@dataclasses.dataclass(frozen=True)
class _Initializer:
    """What draws an array; equal to others that draw the same."""

    draw: Callable[..., jax.Array] = dataclasses.field(compare=False)
    drawn_by: Any


def _drawn_by(initializer: Any) -> Any:
    """Tell JAX's initializers apart by code and arguments: it makes a function at each `lecun_normal()`, for which each layer
    of a deep model would need a program of its own. Any other function is told apart by itself."""
    jax_s_own = jax.nn.initializers.normal.__globals__
    if not isinstance(initializer, FunctionType) or initializer.__globals__ is not jax_s_own:
        return initializer
    arguments = [
        cell.cell_contents for cell in initializer.__closure__ or ()
    ]  # the default is a dtype, and one is given
    if not all(isinstance(each, int | float | str | type | tuple | list | None) for each in arguments):
        return initializer
    return initializer.__code__, tuple((type(each), repr(each)) for each in arguments)  # -0.0 == 0.0


def typed_as(created: Any, sharding: NamedSharding) -> Any:
    """What a jit with these `out_shardings` made, on an explicit mesh with the layout in its type, which a traced jit
    leaves out."""
    traced = isinstance(created, Tracer) and is_explicit(sharding.mesh)
    return jax.sharding.reshard(created, sharding) if traced else created


@functools.lru_cache(maxsize=1024)
def _compiled_creation(initializer: _Initializer, shape: tuple[int, ...], dtype: Any, layout: Layout) -> Any:
    def creation(key: jax.Array) -> jax.Array:
        (created,) = _step_by_step(lambda key: initializer.draw(key, shape, dtype), key)
        return _moved_from_rows(created, layout) if _is_narrow(layout, shape) else created

    # On absent devices nothing is made, and vmap takes no out_shardings there: the type that follows says the same.
    absent = isinstance(layout.mesh, AbstractMesh)
    return jax.jit(creation, out_shardings=None if absent else layout.sharding)


def create_all(f: Callable[[], Any], where: Any) -> Any:
    """Compute `f()`, a tree of arrays, shard by shard as `where` has it: the same bits on every mesh as outside jit on one
    device, where `f` draws each array by one initializer."""

    def creation() -> list[jax.Array]:
        drawn = _step_by_step(f)
        layouts = [Layout.from_sharding(each, x.ndim) for x, each in zip(drawn, jax.tree.leaves(where), strict=True)]
        each = zip(drawn, layouts, strict=True)
        return [_moved_from_rows(x, layout) if _is_narrow(layout, x.shape) else x for x, layout in each]

    made = jax.jit(creation, out_shardings=jax.tree.leaves(where))()
    return jax.tree.unflatten(jax.tree.structure(where), made)


NARROW = 8  # XLA's CPU loops over fewer numbers round erf_inv in another way (docs/design/0005-layers.md)
SMALL = 2**18  # numbers: a mebibyte of float32


def _is_narrow(layout: Layout, shape: tuple[int, ...]) -> bool:
    absent = isinstance(layout.mesh, AbstractMesh)
    return not absent and bool(layout.mesh_axes) and shape[-1] // layout.ways(-1) < NARROW


def _moved_from_rows(created: jax.Array, layout: Layout) -> jax.Array:
    """Draw with the last axis not split: the mesh axes that split it split rows instead, and then move back. Rows that don't
    divide are padded, as XLA pads them when it draws."""
    mesh, *rows, last = with_axis_types(layout.mesh, "auto"), *layout.axes

    def constrained(array: jax.Array, *axes: tuple[str, ...]) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*axes)))

    def left_over(axis: int) -> int:
        return -created.shape[axis] % (layout.ways(axis) * layout.ways(-1))

    if created.shape[-1] < NARROW:  # how these are rounded hangs on the number of rows too
        return constrained(created) if created.size <= SMALL else created
    axes = [axis for axis in range(created.ndim - 1) if not left_over(axis) or not rows[axis]]
    if not axes:  # no rows, or every row axis is split already, into parts that can't be split again
        return constrained(created, *rows, ())
    axis = min(axes, key=left_over)
    drawn = [(*names, *last) if at == axis else names for at, names in enumerate(rows)]
    padded = [(0, left_over(axis) if at == axis else 0) for at in range(created.ndim)]
    created = constrained(jax.numpy.pad(constrained(created, *drawn, ()), padded), *drawn, ())
    return jax.lax.slice_in_dim(constrained(created, *rows, last), 0, created.shape[axis] - padded[axis][1], axis=axis)


def _step_by_step(f: Callable[..., Any], *args: jax.Array) -> list[jax.Array]:
    """The arrays of `f(*args)`, each operation rounded as when it runs alone: compiled as a whole, XLA would fold constants
    together and draw numbers that differ in the last bit from what Flax draws."""
    apart = jax.lax.optimization_barrier
    return run(
        jax.make_jaxpr(f)(*args),
        args,
        lambda eqn, given: apart(tuple(bound(eqn, given))),
        lambda literal: apart(jax.numpy.asarray(literal.val, literal.aval.dtype)),
    )
