"""Collectives of XLA by mesh axis, inside a shard_map, and the table of their costs on the wire.

Each takes an array and one mesh axis or several, works with `check_vma` on, and differentiates.
An array that is invariant over a mesh axis counts as the same value on every device; over no mesh
axis, `()`, a collective is the identity. Nothing is cast: a bfloat16 sum travels as bfloat16.
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

from jshard.errors import JShardError, did_you_mean, multiples
from jshard.kernels.slices import size_along

MeshAxis = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of collective: its names in JAX and XLA, and the bytes each device puts on
    the wire. `payload` names the full array: `operand`, or `result` for a gather."""

    name: str
    primitives: frozenset[str]
    opcode: str
    payload: Literal["operand", "result"]
    parts: Callable[[int], int]  # for n devices: the number of n-ths of the payload that each sends

    def wire(self, payload: int, group: int) -> int:
        """Return the bytes a device sends, rounded up; 0 in a group of 1."""
        return 0 if group <= 1 else -(-payload * self.parts(group) // group)

    def hops(self, group: int) -> int:
        """Return the number of waits for a neighbour in a ring; a direct send waits once."""
        return self.parts(group) if self.name in ("all_reduce", "all_gather", "reduce_scatter") else 1


def _primitives(words: str) -> frozenset[str]:
    """Return JAX's primitives and their asynchronous starts; the other halves, `_done`, move nothing more."""
    return frozenset(word + half for word in words.split() for half in ("", "_start"))


_PSUM = _primitives("psum psum_invariant pmax pmin unreduced_psum unreduced_pmax unreduced_pmin")
_GATHER = _primitives("all_gather all_gather_invariant all_gather_reduced")
_SCATTER = _primitives("reduce_scatter unreduced_reduce_scatter")
_BROADCAST = _primitives("pbroadcast pbroadcast_dynamic")
COLLECTIVES: dict[str, Collective] = {
    row.name: row
    for row in (
        Collective("all_reduce", _PSUM, "all-reduce", "operand", lambda n: 2 * (n - 1)),
        Collective("all_gather", _GATHER, "all-gather", "result", lambda n: n - 1),
        Collective("reduce_scatter", _SCATTER, "reduce-scatter", "operand", lambda n: n - 1),
        Collective("all_to_all", _primitives("all_to_all"), "all-to-all", "operand", lambda n: n - 1),
        Collective("permute", _primitives("ppermute"), "collective-permute", "operand", lambda n: n),
        Collective("broadcast", _BROADCAST, "collective-broadcast", "operand", lambda n: n),
    )
}


def permute(
    x: Array, mesh_axis: MeshAxis, *, shift: int | None = None, pairs: Sequence[tuple[int, int]] | None = None
) -> Array:
    """Send each device's `x` along `mesh_axis`: `shift` places around the ring (default 1), or by (source, target) `pairs`.

    A device that receives nothing gets zeros. Several mesh axes count as one, major first.
    """
    mesh_axes = canonicalize_mesh_axes("permute", mesh_axis)
    if shift is not None and pairs is not None:
        raise JShardError("permute takes a shift or pairs, not both", hint="write permute(..., shift=1)")
    size = axis_size(mesh_axes)
    if pairs is None:
        pairs = [(source, (source + (1 if shift is None else shift)) % size) for source in range(size)]
    _check_pairs(pairs, mesh_axes, size)
    if not mesh_axes:
        return jnp.asarray(x)
    return lax.ppermute(pvary(x, mesh_axes), *_in_mesh_order(pairs, mesh_axes))


def send_recv(x: Array, *, source: int, target: int, axis: MeshAxis) -> Array:
    """Send the `x` of device `source` along mesh axis `axis` to device `target`; the others keep their own.

    Costs one collective-permute of one pair; so does its gradient,
    the other way. Several mesh axes count as one, major first.
    """
    mesh_axes = canonicalize_mesh_axes("send_recv", axis)
    size = axis_size(mesh_axes)
    for role, rank in (("source", source), ("target", target)):
        _check_rank("send_recv", role, rank, mesh_axes, size)
    if source == target:
        return jnp.asarray(x)
    x = pvary(x, mesh_axes)
    arrived = permute(x, mesh_axes, pairs=[(source, target)])
    return jnp.where(axis_index(mesh_axes) == target, arrived, x)  # permute gave the others zeros


def all_to_all(
    x: Array, mesh_axis: MeshAxis, *, split_axis: int | None = None, concat_axis: int | None = None
) -> Array:
    """Split `x` along `split_axis`, send a part to each device along `mesh_axis`, concatenate along `concat_axis`.

    Several mesh axes count as one, major first.
    """
    if split_axis is None or concat_axis is None:
        raise JShardError(
            f"all_to_all over mesh axis {_quoted((mesh_axis,) if isinstance(mesh_axis, str) else mesh_axis)} needs the axes "
            "it splits and joins",
            hint="write all_to_all(x, mesh_axis, split_axis=0, concat_axis=1)",
        )
    mesh_axes = canonicalize_mesh_axes("all_to_all", mesh_axis)
    x = jnp.asarray(x)
    split_axis = _axis("all_to_all", "splits", x, split_axis)
    concat_axis = _axis("all_to_all", "joins", x, concat_axis)
    _check_divides("all_to_all", x, split_axis, mesh_axes)
    if not mesh_axes:
        return x
    return lax.all_to_all(pvary(x, mesh_axes), mesh_axes, split_axis, concat_axis, tiled=True)


def broadcast(x: Array, mesh_axis: MeshAxis, *, root: int = 0) -> Array:
    """Give every device the `x` of device `root` along `mesh_axis`. Costs one all-reduce; -0.0 may arrive as 0.0."""
    mesh_axes = canonicalize_mesh_axes("broadcast", mesh_axis)
    size = axis_size(mesh_axes)
    if not 0 <= root < size:
        raise JShardError(
            f"broadcast from device {root} over mesh axis {_quoted(mesh_axes)} of size {size}",
            hint=f"use a root from 0 to {size - 1}",
        )
    if not mesh_axes:
        return jnp.asarray(x)
    x = pvary(x, mesh_axes)
    # A sum with zeros from all others: its type is invariant.
    of_root = jnp.where(lax.axis_index(mesh_axes) == root, x, jnp.zeros((), x.dtype))
    return lax.psum(of_root, mesh_axes).astype(x.dtype)  # psum of bool is int32


def axis_size(mesh_axis: MeshAxis) -> int:
    """Return the number of devices along `mesh_axis`; along several, their product."""
    return math.prod(size_along(name) for name in canonicalize_mesh_axes("axis_size", mesh_axis))


def axis_index(mesh_axis: MeshAxis) -> Array:
    """Return the index of this device along `mesh_axis`; along several, counted major first."""
    mesh_axes = canonicalize_mesh_axes("axis_index", mesh_axis)
    return lax.axis_index(mesh_axes) if mesh_axes else jnp.zeros((), jnp.int32)


def _in_mesh_order(
    pairs: Sequence[tuple[int, int]], mesh_axes: tuple[str, ...]
) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
    """Return the mesh axes in mesh order, and `pairs` renumbered accordingly. lax.ppermute counts
    devices in mesh order for any order of its axes: silently on jax 0.10.2, with an error on 0.12."""
    order = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in mesh_axes)
    if len(order) < len(mesh_axes):  # an axis of vmap is in no mesh
        return mesh_axes, list(pairs)
    numbers = np.arange(axis_size(order)).reshape([axis_size(name) for name in order])
    rank = numbers.transpose([order.index(name) for name in mesh_axes]).ravel().tolist()
    return order, [(rank[source], rank[target]) for source, target in pairs]


# -- varying values --


def check_vma_enabled() -> bool:
    """Return True if the surrounding shard_map checks the mesh axes over which values vary (`check_vma`)."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    # JAX has no public way to ask; with the check off a cast leaves no trace in the type
    return bool(manual) and bool(jax.typeof(lax.pcast(jnp.zeros(()), manual[0], to="varying")).mat.varying)


def pvary(x: Array, mesh_axes: tuple[str, ...]) -> Array:
    """Mark `x` as varying over all of `mesh_axes`, as lax's collectives demand."""
    x = jnp.asarray(x)
    missing = tuple(name for name in mesh_axes if name not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def pvary_alike(*arrays: Array, mesh_axes: tuple[str, ...] = ()) -> list[Array]:
    """Mark arrays as varying over the union of their mesh axes and `mesh_axes`. A custom
    gradient computes each cotangent from all operands: this gives it the operand's type."""
    names = tuple(sorted({*mesh_axes}.union(*(jax.typeof(x).mat.varying for x in arrays))))
    return [pvary(x, names) for x in arrays]


# -- arguments and their faults --


def canonicalize_mesh_axes(op_name: str, mesh_axis: MeshAxis) -> tuple[str, ...]:
    """Return `mesh_axis` as a tuple; raise for a mesh axis missing in the surrounding shard_map."""
    mesh_axes = (mesh_axis,) if isinstance(mesh_axis, str) else tuple(mesh_axis)
    for name in mesh_axes:
        try:
            size_along(name)
        except NameError:  # JAX has no other public test, and this covers the axis names of vmap
            raise _unbound(op_name, name) from None
        if mesh_axes.count(name) > 1:
            once = ", ".join(f'"{other}"' for other in dict.fromkeys(mesh_axes))
            raise JShardError(f'{op_name} names mesh axis "{name}" twice', hint=f"use ({once},)")
    return mesh_axes


def canonicalize_gather(
    op_name: str, x: Array, mesh_axis: MeshAxis, axis: int, result: str
) -> tuple[tuple[str, ...], Array, int]:
    """Return the mesh axes, the array and the nonnegative axis of an op that joins shards."""
    check_choice(op_name, "result", result, ("varying", "invariant"))
    mesh_axes, x = canonicalize_mesh_axes(op_name, mesh_axis), jnp.asarray(x)
    return mesh_axes, x, _axis(op_name, "joins", x, axis)


def canonicalize_scatter(op_name: str, x: Array, mesh_axis: MeshAxis, axis: int) -> tuple[tuple[str, ...], Array, int]:
    """Return the mesh axes, the array and the nonnegative axis of an op that splits an array."""
    mesh_axes, x = canonicalize_mesh_axes(op_name, mesh_axis), jnp.asarray(x)
    axis = _axis(op_name, "splits", x, axis)
    _check_divides(op_name, x, axis, mesh_axes)
    return mesh_axes, x, axis


def _unbound(op_name: str, name: str) -> JShardError:
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(mesh.manual_axes)
    if not manual:
        return JShardError(
            f'{op_name} over mesh axis "{name}" was called outside a shard_map that has that axis',
            hint="call it inside jax.shard_map(f, mesh=jshard.mesh(), in_specs=..., out_specs=...)",
        )
    if name in mesh.axis_names:
        return JShardError(
            f'{op_name} over mesh axis "{name}" inside a shard_map over {_quoted(manual)} only',
            hint=f"use jax.shard_map(..., axis_names={{{_quoted((*manual, name))}}})",
        )
    return JShardError(
        f'{op_name} over mesh axis "{name}" inside a shard_map over {_quoted(manual)}',
        hint=did_you_mean(name, manual, f"use {_quoted(manual, ' or ')}"),
    )


def _quoted(mesh_axes: Sequence[str], joint: str = ", ") -> str:
    return joint.join(f'"{name}"' for name in mesh_axes)


def check_choice(op_name: str, key: str, word: str, choices: tuple[str, ...]) -> None:
    """Raise unless `word` is among `choices`."""
    if word not in choices:
        hint = did_you_mean(word, choices, f"use {_quoted(choices, ' or ')}")
        raise JShardError(f'{op_name} has no {key} "{word}"', hint=hint)


def _axis(op_name: str, verb: str, x: Array, axis: int) -> int:
    if -x.ndim <= axis < x.ndim:
        return axis % x.ndim
    use = {0: "give it an array with axes", 1: "use 0", 2: "use 0 or 1"}.get(x.ndim, f"use 0 to {x.ndim - 1}")
    raise JShardError(f"{op_name} {verb} axis {axis} of a rank-{x.ndim} array", hint=use)


def _check_divides(op_name: str, x: Array, axis: int, mesh_axes: tuple[str, ...]) -> None:
    group, size = axis_size(mesh_axes), x.shape[axis]
    if size % group:
        raise JShardError(
            f"{op_name} splits axis {axis} of size {size} over mesh axis {_quoted(mesh_axes)} of size {group}",
            hint=f"use {multiples(size, group)}, or pad",
        )


def _check_pairs(pairs: Sequence[tuple[int, int]], mesh_axes: tuple[str, ...], size: int) -> None:
    for role, ranks in (("source", [pair[0] for pair in pairs]), ("target", [pair[1] for pair in pairs])):
        for rank in ranks:
            _check_rank("permute", role, rank, mesh_axes, size)
            if ranks.count(rank) > 1:
                raise JShardError(
                    f"permute names {role} {rank} more than once in pairs={list(pairs)}",
                    hint=f"give each {role} one pair",
                )


def _check_rank(op_name: str, role: str, rank: int, mesh_axes: tuple[str, ...], size: int) -> None:
    if not 0 <= rank < size:
        fault = f"{op_name} names {role} {rank} over mesh axis {_quoted(mesh_axes)} of size {size}"
        raise JShardError(fault, hint=f"use 0 to {size - 1}")
