"""The collectives, by mesh axis, for use inside a shard_map; and the one table of what each costs on the wire.

Every function takes one array and one mesh axis or several, works with `check_vma` on, and differentiates. An array
that does not vary over the mesh axis counts as the same value on every device. No mesh axis at all, `()`, is the
identity. Nothing is cast: a bfloat16 sum is a bfloat16 sum on the wire.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshard.errors import JShardError, nearest

MeshAxis = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective: what JAX and XLA call it, and the bytes each device puts on the wire.

    `payload` says which array is the full one: `operand`, or `result` for a gather. `wire(payload bytes, group size)`.
    """

    name: str
    primitives: frozenset[str]
    opcode: str
    payload: Literal["operand", "result"]
    steps: Callable[[int, int], int]  # payload bytes, group -> bytes times group

    def wire(self, payload: int, group: int) -> int:
        """Bytes on the wire per device, rounded up to whole ones. A group of one costs nothing."""
        return 0 if group <= 1 else -(-self.steps(payload, group) // group)


def _row(name: str, primitives: str, payload: Literal["operand", "result"], steps: Callable[[int, int], int]):
    known = primitives.split()
    spelled = frozenset(known + [f"{primitive}_start" for primitive in known])  # asynchronous halves carry the same
    opcode = {"permute": "collective-permute", "broadcast": "collective-broadcast"}.get(name, name.replace("_", "-"))
    return name, Collective(name, spelled, opcode, payload, steps)


COLLECTIVES: dict[str, Collective] = dict(
    [
        _row(
            "all_reduce",
            "psum psum_invariant pmax pmin unreduced_psum unreduced_pmax unreduced_pmin",
            "operand",
            lambda b, n: 2 * b * (n - 1),
        ),
        _row("all_gather", "all_gather all_gather_invariant all_gather_reduced", "result", lambda b, n: b * (n - 1)),
        _row("reduce_scatter", "reduce_scatter unreduced_reduce_scatter", "operand", lambda b, n: b * (n - 1)),
        _row("all_to_all", "all_to_all", "operand", lambda b, n: b * (n - 1)),
        _row("permute", "ppermute", "operand", lambda b, n: b * n),
        _row("broadcast", "pbroadcast pbroadcast_dynamic", "operand", lambda b, n: b * n),
    ]
)


def all_reduce(x: Array, mesh_axis: MeshAxis, *, op: Literal["sum", "max", "min", "mean"] = "sum") -> Array:
    """The sum (or max, min, mean) of `x` over the devices along `mesh_axis`; every device gets it.

    Several mesh axes are reduced together, in one collective. The gradient of a max or min is shared equally among the
    devices that hold it, at the cost of one more all-reduce.
    """
    if op not in ("sum", "max", "min", "mean"):
        raise _not_a_choice("all_reduce", "op", op, ("sum", "max", "min", "mean"))
    mesh_axes = canonicalize_mesh_axes("all_reduce", mesh_axis)
    if not mesh_axes:
        return jnp.asarray(x)
    x = pvary(x, mesh_axes)
    if op in ("max", "min"):
        return _extreme(mesh_axes, op, x) if jnp.issubdtype(x.dtype, jnp.inexact) else _pick(mesh_axes, op, x)
    total = lax.psum(x, mesh_axes)
    return total / axis_size(mesh_axes) if op == "mean" else total


def all_gather(
    x: Array, mesh_axis: MeshAxis, *, axis: int = 0, result: Literal["varying", "invariant"] = "varying"
) -> Array:
    """The shards of all devices along `mesh_axis`, joined along array axis `axis`.

    The gradient of a "varying" result is a reduce-scatter; of an "invariant" one, which says that all devices go on
    to do the same with it, only a slice. Several mesh axes go one at a time, the minor (last) one first.
    """
    mesh_axes, x, axis = canonicalize_gather("all_gather", x, mesh_axis, axis, result)
    for name in reversed(mesh_axes):
        to = "varying" if result == "varying" else "invarying"
        x = lax.all_gather(pvary(x, (name,)), name, axis=axis, tiled=True, to=to)
    return x


def reduce_scatter(x: Array, mesh_axis: MeshAxis, *, axis: int = 0) -> Array:
    """The sum of `x` over the devices along `mesh_axis`, of which each keeps its own part of array axis `axis`.

    Several mesh axes go one at a time, the major (first) one first: the inverse order of `all_gather`.
    """
    mesh_axes, x, axis = canonicalize_scatter("reduce_scatter", x, mesh_axis, axis)
    for name in mesh_axes:
        x = lax.psum_scatter(pvary(x, (name,)), name, scatter_dimension=axis, tiled=True)
    return x


def permute(
    x: Array, mesh_axis: MeshAxis, *, shift: int | None = None, pairs: Sequence[tuple[int, int]] | None = None
) -> Array:
    """Each device's `x` sent on along `mesh_axis`: by `shift` places around the ring (1 unless said), or as `pairs`
    of (source, target) say. Who is sent nothing gets zeros. Several mesh axes count as one, major first.
    """
    mesh_axes = canonicalize_mesh_axes("permute", mesh_axis)
    if shift is not None and pairs is not None:
        raise JShardError("permute was given both a shift and pairs", mend="give one of them: permute(..., shift=1)")
    size = axis_size(mesh_axes)
    if pairs is None:
        pairs = [(source, (source + (1 if shift is None else shift)) % size) for source in range(size)]
    _pairs_fit(pairs, mesh_axes, size)
    if not mesh_axes:
        return jnp.asarray(x)
    return lax.ppermute(pvary(x, mesh_axes), *_in_mesh_order(pairs, mesh_axes))


def all_to_all(x: Array, mesh_axis: MeshAxis, *, split_axis: int, concat_axis: int) -> Array:
    """`x` split along array axis `split_axis`, one part to each device along `mesh_axis`; what arrives is joined
    along `concat_axis`. Several mesh axes count as one, major first.
    """
    mesh_axes = canonicalize_mesh_axes("all_to_all", mesh_axis)
    x = jnp.asarray(x)
    split_axis = _axis("all_to_all", "splits", x, split_axis)
    concat_axis = _axis("all_to_all", "joins", x, concat_axis)
    _divides("all_to_all", x, split_axis, mesh_axes)
    if not mesh_axes:
        return x
    return lax.all_to_all(pvary(x, mesh_axes), mesh_axes, split_axis, concat_axis, tiled=True)


def broadcast(x: Array, mesh_axis: MeshAxis, *, root: int = 0) -> Array:
    """The `x` of device `root` along `mesh_axis`, on every device. Costs one all-reduce; -0.0 may arrive as 0.0."""
    mesh_axes = canonicalize_mesh_axes("broadcast", mesh_axis)
    size = axis_size(mesh_axes)
    if not 0 <= root < size:
        raise JShardError(
            f"broadcast from device {root} over mesh axis {_named(mesh_axes)} of size {size}",
            mend=f"use a root from 0 to {size - 1}",
        )
    if not mesh_axes:
        return jnp.asarray(x)
    x = pvary(x, mesh_axes)
    alone = jnp.where(lax.axis_index(mesh_axes) == root, x, jnp.zeros((), x.dtype))
    return lax.psum(alone, mesh_axes).astype(x.dtype)  # bool travels as int32


def axis_size(mesh_axis: MeshAxis) -> int:
    """How many devices lie along `mesh_axis`; of several, their product."""
    return math.prod(lax.axis_size(name) for name in canonicalize_mesh_axes("axis_size", mesh_axis))


def axis_index(mesh_axis: MeshAxis) -> Array:
    """Which of the devices along `mesh_axis` this one is; over several, counted major first."""
    mesh_axes = canonicalize_mesh_axes("axis_index", mesh_axis)
    return lax.axis_index(mesh_axes) if mesh_axes else jnp.zeros((), jnp.int32)


def _in_mesh_order(
    pairs: Sequence[tuple[int, int]], mesh_axes: tuple[str, ...]
) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
    """The mesh axes in the order of the mesh, and `pairs` numbered so. lax.ppermute counts in that order whatever it is
    given: silently on jax 0.10.2, with an error on 0.12."""
    order = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in mesh_axes)
    if len(order) < len(mesh_axes):  # an axis of vmap, which no mesh orders
        return mesh_axes, list(pairs)
    numbers = np.arange(axis_size(order)).reshape([axis_size(name) for name in order])
    place = numbers.transpose([order.index(name) for name in mesh_axes]).ravel().tolist()
    return order, [(place[source], place[target]) for source, target in pairs]


# -- max and min: JAX has no derivative for them --


def _pick(mesh_axes: tuple[str, ...], op: str, x: Array) -> Array:
    return lax.pmax(x, mesh_axes) if op == "max" else lax.pmin(x, mesh_axes)


_extreme = jax.custom_jvp(_pick, nondiff_argnums=(0, 1))


@_extreme.defjvp
def _extreme_jvp(mesh_axes, op, primals, tangents):
    (x,), (x_dot,) = primals, tangents
    y = _extreme(mesh_axes, op, x)
    holds = (x == y).astype(x.dtype)
    share = holds / lax.psum(holds, mesh_axes)
    return y, lax.psum(x_dot * share, mesh_axes)


# -- what may be asked --


def pvary(x: Array, mesh_axes: tuple[str, ...]) -> Array:
    """`x` as something that may differ from device to device along all of `mesh_axes`: the primitives insist."""
    x = jnp.asarray(x)
    missing = tuple(name for name in mesh_axes if name not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def canonicalize_mesh_axes(op_name: str, mesh_axis: MeshAxis) -> tuple[str, ...]:
    """`mesh_axis` as a tuple of mesh axes that the surrounding shard_map has."""
    mesh_axes = (mesh_axis,) if isinstance(mesh_axis, str) else tuple(mesh_axis)
    for name in mesh_axes:
        if not _is_bound(name):
            raise _unbound(op_name, name)
        if mesh_axes.count(name) > 1:
            once = ", ".join(f'"{other}"' for other in dict.fromkeys(mesh_axes))
            raise JShardError(f'{op_name} names mesh axis "{name}" twice', mend=f"use ({once},)")
    return mesh_axes


def canonicalize_gather(
    op_name: str, x: Array, mesh_axis: MeshAxis, axis: int, result: str
) -> tuple[tuple[str, ...], Array, int]:
    """The mesh axes, array and axis of what joins shards, if it can be."""
    if result not in ("varying", "invariant"):
        raise _not_a_choice(op_name, "result", result, ("varying", "invariant"))
    mesh_axes, x = canonicalize_mesh_axes(op_name, mesh_axis), jnp.asarray(x)
    return mesh_axes, x, _axis(op_name, "joins", x, axis)


def canonicalize_scatter(op_name: str, x: Array, mesh_axis: MeshAxis, axis: int) -> tuple[tuple[str, ...], Array, int]:
    """The mesh axes, array and axis of what splits an array, if it can be."""
    mesh_axes, x = canonicalize_mesh_axes(op_name, mesh_axis), jnp.asarray(x)
    axis = _axis(op_name, "splits", x, axis)
    _divides(op_name, x, axis, mesh_axes)
    return mesh_axes, x, axis


def _is_bound(name: str) -> bool:
    try:
        lax.axis_size(name)
    except NameError:  # JAX's only public way to ask; it also knows the axis names of vmap
        return False
    return True


def _unbound(op_name: str, name: str) -> JShardError:
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(mesh.manual_axes)
    if not manual:
        return JShardError(
            f'{op_name} over mesh axis "{name}" was called outside a shard_map that has that axis',
            mend="call it inside jax.shard_map(f, mesh=jshard.mesh(), in_specs=..., out_specs=...)",
        )
    if name in mesh.axis_names:
        return JShardError(
            f'{op_name} over mesh axis "{name}" inside a shard_map over {_named(manual)} only',
            mend=f"use jax.shard_map(..., axis_names={{{_named((*manual, name))}}})",
        )
    close = nearest(name, manual)
    return JShardError(
        f'{op_name} over mesh axis "{name}" inside a shard_map over {_named(manual)}',
        mend=f'did you mean "{close}"?' if close else f"use {_named(manual, ' or ')}",
    )


def _named(mesh_axes: Sequence[str], joint: str = ", ") -> str:
    return joint.join(f'"{name}"' for name in mesh_axes)


def _not_a_choice(op_name: str, key: str, word: str, choices: tuple[str, ...]) -> JShardError:
    close = nearest(str(word), choices)
    return JShardError(
        f'{op_name} has no {key} "{word}"',
        mend=f'did you mean "{close}"?' if close else f"use {_named(choices, ' or ')}",
    )


def _axis(op_name: str, verb: str, x: Array, axis: int) -> int:
    if -x.ndim <= axis < x.ndim:
        return axis % x.ndim
    use = {0: "give it an array with axes", 1: "use 0", 2: "use 0 or 1"}.get(x.ndim, f"use 0 to {x.ndim - 1}")
    raise JShardError(f"{op_name} {verb} axis {axis} of a rank-{x.ndim} array", mend=use)


def _divides(op_name: str, x: Array, axis: int, mesh_axes: tuple[str, ...]) -> None:
    group, size = axis_size(mesh_axes), x.shape[axis]
    if size % group:
        below, above = size // group * group, -(-size // group) * group
        raise JShardError(
            f"{op_name} splits axis {axis} of size {size} over mesh axis {_named(mesh_axes)} of size {group}",
            mend=f"use {f'{below} or ' if below else ''}{above}, or pad",
        )


def _pairs_fit(pairs: Sequence[tuple[int, int]], mesh_axes: tuple[str, ...], size: int) -> None:
    for role, places in (("source", [pair[0] for pair in pairs]), ("target", [pair[1] for pair in pairs])):
        for place in places:
            if not 0 <= place < size:
                raise JShardError(
                    f"permute names {role} {place} over mesh axis {_named(mesh_axes)} of size {size}",
                    mend=f"use 0 to {size - 1}",
                )
            if places.count(place) > 1:
                raise JShardError(
                    f"permute names {role} {place} more than once in pairs={list(pairs)}",
                    mend=f"give each {role} one pair",
                )


def check_vma_enabled() -> bool:
    """Whether the shard_map around checks which values vary from device to device (`check_vma`)."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(manual) and bool(jax.typeof(lax.pcast(jnp.zeros(()), manual[0], to="varying")).mat.varying)
