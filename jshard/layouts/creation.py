"""Creation of sharded arrays, with at most a shard on each device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jshard.errors import JShardError
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import is_explicit, with_axis_types
from jshard.programs.jaxprs import Jaxpr, bound, closed_over, cut, evaluate, is_in, level, makers, outline


def create(
    initializer: Callable[..., jax.Array], key: jax.Array, shape: tuple[int, ...], dtype: Any, layout: Layout
) -> jax.Array:
    """Compute `initializer(key, shape, dtype)` by shards, with the bits of one device outside jit."""
    check_shape(shape)
    layout.shard_shape(shape, label="a new array")
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return create_by(lambda: initializer(key, shape, dtype), layout)


def create_by(drawn: Callable[[], jax.Array], layout: Layout) -> jax.Array:
    """Compute `drawn()` by shards, with the bits of a single device outside jit. Equal layers
    differ only in the arrays read by `drawn`, and share a program."""
    program, consts = closed_over(jax.make_jaxpr(drawn)())
    jaxpr, read = cut(program, program.outvars)  # without dead equations, whose factors no equation would make
    consts = [consts[n] for n in read]
    shape = jaxpr.outvars[0].aval.shape
    for factor in _factors(jaxpr):
        where = layout if factor.aval.shape == shape else Layout(layout.mesh, *((),) * factor.aval.ndim)
        (before, read), (jaxpr, left) = cut(jaxpr, [factor]), cut(jaxpr, jaxpr.outvars, [factor])
        made = _created(before, [consts[n] for n in read], where)
        consts = [*(consts[n] for n in left), made]
    return typed_as(_created(jaxpr, consts, layout), layout.sharding)


def _created(jaxpr: Jaxpr, consts: Sequence[Any], layout: Layout) -> jax.Array:
    return _compiled_creation(_Drawing(_identity(jaxpr), jaxpr), layout)(*consts)


def _factors(jaxpr: Any) -> list[Any]:
    """Return the arrays made by an equation and added by another: XLA for CPUs would round only once."""
    made, sums = makers(jaxpr), ("add", "sub")
    added = [v for eqn in level(jaxpr) if eqn.primitive.name in sums for v in eqn.invars]
    is_factor = lambda v: is_in(v, made) and v.aval.ndim and jnp.issubdtype(v.aval.dtype, jnp.inexact)
    factors = [v for v in dict.fromkeys(filter(is_factor, added)) if len(made[v].outvars) == 1]
    return [v for v in factors if made[v].primitive.name not in sums]


def check_shape(shape: tuple[int, ...]) -> None:
    """Raise an error for sizes such as 16.0: it equals 16, so every cache would mix them up."""
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in shape):
        raise JShardError(f"a new array has the shape {shape}", hint="give it whole numbers")


@dataclasses.dataclass(frozen=True)
class _Drawing:
    """A program that draws an array; equal to programs with other constants."""

    identity: Any
    jaxpr: Any = dataclasses.field(compare=False)


def _identity(jaxpr: Jaxpr) -> Any:
    """Return an identity for programs, equal for programs with different constants."""
    # An id stays unique: the compiled program keeps its object alive.
    known = lambda value: value if is_hashable(value) else (type(value), id(value))
    return outline(jaxpr, lambda eqn: (eqn.primitive, *map(known, eqn.params.values())))


def is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def typed_as(created: object, sharding: NamedSharding) -> Any:
    """Add the layout to the type of a new array on an explicit mesh; a traced jit leaves it out."""
    traced = isinstance(created, Tracer) and is_explicit(sharding.mesh)
    return jax.sharding.reshard(created, sharding) if traced else created


@functools.lru_cache(maxsize=1024)
def _compiled_creation(drawing: _Drawing, layout: Layout) -> Any:
    # Absent devices make nothing, and vmap takes no out_shardings there: `typed_as` adds the layout.
    absent = isinstance(layout.mesh, AbstractMesh)

    def creation(*consts: object) -> jax.Array:
        (created,) = _step_by_step(drawing.jaxpr, consts)
        is_narrow = not absent and layout.mesh_axes and created.shape[-1] // layout.ways(-1) < NARROW
        return _moved_from_rows(created, layout) if is_narrow else created

    return jax.jit(creation, out_shardings=None if absent else layout.sharding)


NARROW = 8  # XLA's CPU loops over fewer numbers round erf_inv differently (docs/design/0005-layers.md)
SMALL = 2**18  # numbers: a mebibyte of float32


def _moved_from_rows(created: jax.Array, layout: Layout) -> jax.Array:
    """Draw with a whole last axis: its mesh axes split rows first, and then move back. Rows are
    padded to a divisible number, as XLA does when it draws."""
    mesh, *rows, last = with_axis_types(layout.mesh, "auto"), *layout.axes

    def constrained(array: jax.Array, *axes: tuple[str, ...]) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*axes)))

    def left_over(axis: int) -> int:
        return -created.shape[axis] % (layout.ways(axis) * layout.ways(-1))

    if created.shape[-1] < NARROW:  # their rounding depends on the number of rows too
        return constrained(created) if created.size <= SMALL else created
    axes = [axis for axis in range(created.ndim - 1) if not left_over(axis) or not rows[axis]]
    if not axes:  # no rows, or no further split of them
        return constrained(created, *rows, ())
    axis = min(axes, key=left_over)
    drawn = [(*names, *last) if at == axis else names for at, names in enumerate(rows)]
    padded = [(0, left_over(axis) if at == axis else 0) for at in range(created.ndim)]
    created = constrained(jax.numpy.pad(constrained(created, *drawn, ()), padded), *drawn, ())
    return jax.lax.slice_in_dim(constrained(created, *rows, last), 0, created.shape[axis] - padded[axis][1], axis=axis)


def _step_by_step(jaxpr: Jaxpr, xs: Sequence[Any]) -> list[Any]:
    """Run a jaxpr with every operation rounded as if it ran alone. XLA would fold constants of a
    whole program, and draw numbers with another last bit than Flax."""
    apart = jax.lax.optimization_barrier
    return evaluate(
        jaxpr,
        xs,
        lambda eqn, given: apart(tuple(bound(eqn, given))),
        lambda literal: apart(jax.numpy.asarray(literal.val, literal.aval.dtype)),
    )
