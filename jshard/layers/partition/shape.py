"""Rules of operations that make arrays, or shape them anew."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal

from jshard.layers.partition.engine import Partition, Rule, known, shape_of
from jshard.layers.partition.local_sizes import local_shape
from jshard.layers.partition.part import Names, Part, vary, whole
from jshard.layouts.redistribution import Axes


def _broadcast(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """Put off: where it is needed is how its operand is split."""
    return run.later(eqn, parts, known(eqn))


def _iota(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    shape, dtype, along = shape_of(eqn), eqn.params["dtype"], eqn.params["dimension"]

    def make(axes: Axes, names: Names) -> Array:
        local = local_shape(shape, axes, run.sizes)
        return vary(
            lax.broadcasted_iota(dtype, local, along) + first(axes[along], local[along], run.sizes, dtype), names
        )

    return [Part(shape, whole(len(shape)), make=make)]


def first(names: tuple[str, ...], size: int, sizes: dict[str, int], dtype: Any) -> Any:
    """The place of this device's first element along an axis that `names` split."""
    index: Any = 0
    for name in names:
        index = index * sizes[name] + lax.axis_index(name)
    return jnp.asarray(index * size, dtype)


def _drawn(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """Random bits are cut from those of the whole array: the same numbers on every mesh."""
    shape = shape_of(eqn)

    def make(axes: Axes, names: Names) -> Array:
        key = run.local(parts[0], whole(len(parts[0].shape)), frozenset())
        bits = vary(run.bind(eqn, [key])[0], names)
        for axis, each in enumerate(axes):
            if each:
                size = local_shape(shape, axes, run.sizes)[axis]
                bits = lax.dynamic_slice_in_dim(bits, first(each, size, run.sizes, jnp.int32), size, axis)
        return bits

    return [Part(shape, whole(len(shape)), make=make)]


def _ordered(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """A barrier leaves each array split as it is: by the table they are operands of one operation, in which a mesh axis splits
    one of them only. An array that is equal on all devices can't wait for one that is not, so only those that vary over the
    same mesh axes wait for each other."""
    parts = [run.force(part) for part in parts]
    alike: dict[Names, list[Part]] = {}
    for part in parts:
        alike.setdefault(jax.typeof(part.x).mat.varying, []).append(part)
    done = {id(p): x for some in alike.values() for p, x in zip(some, run.bind(eqn, [p.x for p in some]), strict=True)}
    return [Part(part.shape, part.axes, done[id(part)]) for part in parts]


def _inside(run: Partition, eqn: Any, parts: list[Part]) -> list[Part]:
    """Clamp the places of a dynamic slice first, as it does itself. Of a device's slice of the result, or of its gradient, XLA
    adds both places before it clamps them."""
    count = len(parts) - len(parts[0].shape)
    sizes = eqn.params["slice_sizes"] if count == 1 else parts[1].shape
    for at, (n, size) in enumerate(zip(parts[0].shape, sizes, strict=True), count):
        atom, part = eqn.invars[at], run.force(parts[at])
        if not isinstance(atom, Literal) or not 0 <= atom.val <= n - size:
            zero, last = (np.asarray(min(end, np.iinfo(part.x.dtype).max), part.x.dtype) for end in (0, n - size))
            parts = [*parts[:at], Part((), (), lax.clamp(zero, part.x, last)), *parts[at + 1 :]]
    return run.by_table(eqn, parts)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), _inside),
    "broadcast_in_dim": _broadcast, "iota": _iota, "optimization_barrier": _ordered, "random_bits": _drawn,
}  # fmt: skip
