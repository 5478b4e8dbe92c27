"""Shards of arrays in a run, and their way to an operation."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jshard.kernels import slices
from jshard.kernels.all_reduction import pvary_summed
from jshard.kernels.invariant_cast import over_one_device
from jshard.kernels.select_algorithm import choose, is_psum
from jshard.layers.gather import Gathers, Kernels, gather
from jshard.layers.partition.plan import Names, names_of
from jshard.layers.partition.value import Lying, Uses
from jshard.layers.remat import activation
from jshard.layouts.redistribution import Axes, Move, move, plan_moves, take_slice
from jshard.programs.provenance import scope

# In the place of an axis: what rests is to vary over a mesh axis that crosses slices before it is gathered, so that between
# slices the gradient of the part goes, and not of all.
ALL = -1
# says who asks for moves, and by which algorithms
Moving = Callable[[tuple[Move, ...]], contextlib.AbstractContextManager[Kernels]]


class _Shard(Lying):
    """A device's shard of an array, varying over the mesh axes of its split and over no other."""

    make: Callable[[Axes, Names, Moving], Array]  # how a use needs it

    @property
    def beyond(self) -> Names:
        """The mesh axes it varies over although equal on all their devices: its gradient stays unreduced."""
        return frozenset()

    def varying(self, names: Names, moving: Moving) -> Here | Self:
        """Return the array as varying over `names`, for uses with an unreduced share of its gradient."""
        if names <= self.beyond:
            return self
        if names not in self.uses.parts:
            self.uses.parts[names] = Here(self.shape, self.axes, self.local(self.axes, names, moving))
        return self.uses.parts[names]

    def local(self, axes: Axes, names: Names, moving: Moving) -> Array:
        """Return this device's part when split by `axes`, varying over `names` too. What two uses need alike is made once, and
        its gradient summed once."""
        names = names | names_of(axes)
        if self.uses.asked is not None:  # a use that takes its slice of it leaves it equal everywhere
            self.uses.asked.add(names - (names_of(axes) - names_of(self.axes)))
        made = self.uses.needed
        if (axes, names) not in made and self.beyond:
            names |= self.beyond
        if (axes, names) not in made:
            made[axes, names] = self.make(axes, names, moving)
        return made[axes, names]


@dataclasses.dataclass(eq=False)
class Deferred(_Shard):
    """An array made by `make` at its use (a broadcast, an iota): splitting it is free, and its gradient is summed
    small."""

    make: Callable[[Axes, Names, Moving], Array]
    made_of: int = 0
    is_put_off = True

    def in_dtype(self, dtype: DTypeLike, wire: DTypeLike | None) -> Self:
        cast = lambda axes, names, moving: self.make(axes, names, moving).astype(dtype)
        return dataclasses.replace(self, make=cast, uses=Uses())


@dataclasses.dataclass(eq=False)
class Here(_Shard):
    """An array in memory. With a `signal` it is a parameter, whole or split alike between uses."""

    x: Any  # an array, or the shape of one

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        return self.x.dtype

    @property
    def is_followed(self) -> bool:
        """True if its uses, or another array of the same parameter, have to be followed."""
        return self.uses.asked is not None or self.uncast is not None or self.uses.wire is not None

    @property
    def beyond(self) -> Names:
        return frozenset() if self.is_stored else jax.typeof(self.x).mat.varying - names_of(self.axes)

    @property
    def kernels(self) -> Kernels:
        return () if self.signal is None else self.signal.kernel

    def local(self, axes: Axes, names: Names, moving: Moving) -> Array:
        if self.uncast is None or self.signal is None:
            return super().local(axes, names, moving)
        source = self.summed_in(self.signal.dtype.reduce, self.dtype)
        return source.local(axes, names, moving).astype(self.dtype)

    def make(self, axes: Axes, names: Names, moving: Moving) -> Array:
        x, steps = self._in_use(names), plan_moves(self.axes, axes)
        travels = any(step.kind != "slice" for step in steps)
        if travels and self.uses.wire is not None and not self.is_stored:
            x = vary(x, names)  # its gradient is summed before it is cast
        with moving(steps) if travels else contextlib.nullcontext(()) as kernels:
            for step in steps:
                x = _step(x, step, names, kernels, self.uses.wire)
        return vary(x, names, dict(self.kernels).get("all_reduce", "auto"))

    def _in_use(self, names: Names) -> Array:
        return self.x

    def in_dtype(self, dtype: DTypeLike, wire: DTypeLike | None) -> Self:
        is_shape = isinstance(self.x, jax.ShapeDtypeStruct)
        made = self.renewed(x=self.x.update(dtype=dtype) if is_shape else self.x.astype(dtype))
        made.uses.wire = wire
        return made

    def stored(self, rest: Axes) -> Stored:
        return Stored(self.shape, self.axes, self.x, rest, signal=self.signal, uses=self.uses.anew())


@dataclasses.dataclass(eq=False)
class Stored(Here):
    """A stored parameter: `x` is split as `rest` says, and gathered for a use. One whose `rest` is its `axes` is whole, and its
    gradient is summed beside the work of another layer."""

    rest: Axes
    is_stored = True

    def one_turn(self, **changes: object) -> Self:
        return super().one_turn(rest=self.rest[1:], **changes)

    def _in_use(self, names: Names) -> Array:
        """Gather the parameter. Where a use varies over the axis its gradient is scattered back, not summed everywhere. Over
        the other axes of rows, and between slices, what is then left of it is summed."""
        missing = [(axis, name) for axis, rest in enumerate(self.rest) for name in rest if name not in self.axes[axis]]
        own = {name for _, name in missing}
        rows = () if self.signal is None else self.signal.row
        beside = dict.fromkeys((*slices.loaded_across(), *rows))
        between = [(ALL, name, True) for name in beside if name in names - own - names_of(self.axes)]
        return self.gather((*((axis, name, name in names) for axis, name in missing), *between))

    def gather(self, steps: Gathers) -> Array:
        made = self.uses.gathered
        if steps not in made:
            is_whole = self.rest == self.axes
            with scope(key="row" if is_whole else "store"):
                made[steps] = self._summed_late(steps) if is_whole else self._gathered(steps)
        return made[steps]

    def _gathered(self, steps: Gathers) -> Array:
        several = tuple(step for step in steps if slices.size_along(step[1]) > 1 and step[0] != ALL)
        x, kernels = self.x, self.kernels
        for axis, name, varies in steps:
            x = vary(x, frozenset({name})) if axis == ALL else over_one_device(x, (name,), varies=varies)
        if self.prefetches and several:
            group = math.prod(slices.size_along(name) for _, name, _ in several)
            of_all = group == slices.devices_of_a_slice()
            of = {"shape": x.shape, "dtype": x.dtype, "group": group, "of_all": of_all, "beside_work": True}
            for op in ("all_gather", "reduce_scatter"):
                if dict(kernels).get(op, "auto") == "auto":
                    kernels = (*kernels, (op, choose(op, **of).algorithm))
        return gather(x, several, dtype=self.uses.wire, kernels=kernels)

    def _summed_late(self, steps: Gathers) -> Array:
        """Mark a whole parameter as varying."""
        names, algorithm = frozenset(name for _, name, _ in steps), dict(self.kernels).get("all_reduce", "auto")
        x = over_one_device(self.x, names, varies=True)
        several = tuple(sorted(names - jax.typeof(x).mat.varying))
        if algorithm == "auto" and not slices.is_hierarchy(several):
            group = math.prod(map(slices.size_along, several))
            algorithm = choose("all_reduce", shape=x.shape, dtype=x.dtype, group=group, beside_work=True).algorithm
        if algorithm == "permute" and several:
            marked: Any = pvary_summed((x,), several, algorithm)
            x = marked[0]
        return vary(x, names, algorithm).astype(x.dtype if self.uses.wire is None else self.uses.wire)

    def gathers(self) -> Iterator[tuple[tuple[Any, ...], Gathers]]:
        """Yield its gathers, in every dtype: the casts on the way, and the gathers."""
        yield from (((), steps) for steps in self.uses.gathered)
        for key, cast in self.uses.casts.items():
            yield from (((key, *path), steps) for path, steps in cast.gathers())


Part = Here | Deferred  # a stored parameter is here too


def filled(places: Iterable[Here], xs: Iterable[Array | None]) -> list[Here]:
    """Return other arrays in the same places, where nothing uses them yet."""
    return [place.renewed(x=x) for place, x in zip(places, xs, strict=True)]


def here_of(variables: Iterable[Any], axes: Iterable[Axes], xs: Iterable[Array]) -> list[Here]:
    """Return the shards of a program's variables, split by these axes."""
    return [Here(tuple(v.aval.shape), a, x) for v, a, x in zip(variables, axes, xs, strict=True)]


@contextlib.contextmanager
def moving_as(kernels: Kernels = (), **fields: str) -> Iterator[Kernels]:
    """Set the cause of moves by a hand-written rule, with any algorithm it names."""
    with scope(**fields):
        yield kernels


def _step(x: Any, step: Move, names: Names, kernels: Kernels, wire: DTypeLike | None) -> Array:
    if step.kind == "slice" and step.mesh_axis in jax.typeof(x).mat.varying:
        size = x.shape[step.axis] // slices.size_along(step.mesh_axis)  # it was made to vary, or gathered at its use
        return lax.dynamic_slice_in_dim(x, lax.axis_index(step.mesh_axis) * size, size, step.axis)
    if step.kind == "slice":
        return take_slice(x, step.mesh_axis, step.axis)
    varies = step.mesh_axis in names or step.kind == "all_to_all"
    if slices.size_along(step.mesh_axis) == 1:
        return over_one_device(x, (step.mesh_axis,), varies=varies)
    if step.kind == "all_gather":
        return activation(gather(x, ((step.axis, step.mesh_axis, varies),), dtype=wire, kernels=kernels))
    return move(x, [step])


def vary(x: Any, names: Names, algorithm: str = "auto") -> Array:
    """Let `x` vary over mesh axes: where it is equal on all their devices, its gradient is summed over them. In device order
    where `algorithm` says so and between processes; where some cross slices, in each slice, then between these; else as JAX
    does."""
    if names <= jax.typeof(x).mat.varying:  # nearly every operand of nearly every operation
        return x
    x = over_one_device(x, names, varies=True)
    missing = tuple(sorted(names - jax.typeof(x).mat.varying))
    if not is_psum(algorithm, missing) and jnp.issubdtype(x.dtype, jnp.inexact):
        marked: Any = pvary_summed((x,), missing, algorithm)
        return marked[0]
    return lax.pcast(x, missing, to="varying") if missing else x
