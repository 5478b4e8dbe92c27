"""One device's part of an array, and how it comes to where an operation needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
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
from jshard.layers.partition.value import Lying
from jshard.layers.remat import activation
from jshard.layouts.redistribution import Axes, Move, move, plan_moves, take_slice
from jshard.programs.provenance import scope
from jshard.signals.signal import Signal

# In the place of an axis: what rests is to vary over a mesh axis that crosses slices before it is gathered, so that between
# slices the gradient of the part goes, and not of all.
ALL = -1
# says who asks for moves, and by which algorithms
Moving = Callable[[tuple[Move, ...]], contextlib.AbstractContextManager[Kernels]]


@dataclasses.dataclass(eq=False)
class Part(Lying):
    """One device's part of an array of `shape`, which varies over the mesh axes that split it, and over no other.

    `make` makes it where it is needed (a broadcast, an iota): it costs nothing to split, and its gradient is summed small.
    """

    shape: tuple[int, ...]
    axes: Axes  # the mesh axes that split each axis, in use
    x: Any = None  # the array, unless `make` makes it
    make: Callable[[Axes, Names, Moving], Array] | None = None
    made_of: int = 0  # of one that is put off: how many numbers, whose gradients are summed where they begin to vary
    rest: Axes | None = None  # of a stored parameter: how it rests, and `x` is
    signal: Signal | None = None  # which claims it: a parameter, or what is only cast or transposed from one
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what uses have in common
    gathered: dict[Gathers, Array] = dataclasses.field(default_factory=dict)  # of a stored parameter
    within: list[Self] = dataclasses.field(default_factory=list)  # the same array inside loops and checkpoints
    casts: dict[Any, Self] = dataclasses.field(default_factory=dict)  # the same array in other dtypes
    is_multiplied_once: bool = False  # of a stored parameter: one product reads it, and nothing else
    wire: Any = None  # the dtype that it is gathered in; its gradient is scattered in its own
    uncast: Self | None = None  # of a parameter that the program casts, and whose gradient is summed in another dtype
    asked: set[Names] | None = None  # of a parameter that is followed: the mesh axes that each use makes it vary over

    FORGOTTEN = MappingProxyType({"cache": dict, "gathered": dict, "casts": dict, "within": list})
    KEPT_INSIDE, PUT_OFF = ("cache", "gathered"), "make"

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), self

    @property
    def dtype(self) -> Any:
        return self.x.dtype

    @property
    def needs(self) -> Iterable[tuple[Axes, Names]]:
        return (key for key in self.cache if isinstance(key[0], tuple))  # else what was made of it is remembered

    @property
    def is_followed(self) -> bool:
        """Whether it takes more with it than its own array: what is asked of it, or another array of the same parameter."""
        return self.asked is not None or self.uncast is not None or self.wire is not None

    @property
    def beyond(self) -> Names:
        """The mesh axes that it varies over although it is equal on all their devices: its gradient stays unreduced."""
        if self.make is not None or self.rest is not None:
            return frozenset()
        return jax.typeof(self.x).mat.varying - names_of(self.axes)

    def varying(self, names: Names, moving: Moving) -> Part:
        """The same array, as it is for all whose part of its gradient stays unreduced over these mesh axes."""
        if names <= self.beyond:
            return self
        key = "varying", names
        if key not in self.cache:
            self.cache[key] = Part(self.shape, self.axes, self.local(self.axes, names, moving))
        return self.cache[key]

    def local(self, axes: Axes, names: Names, moving: Moving) -> Array:
        """Return this device's part when split by `axes`, varying over `names` too. What two uses need alike is made once, and
        its gradient summed once."""
        if self.uncast is not None and self.signal is not None:
            return (
                self.summed_in(self.signal.dtype.reduce, self.x.dtype).local(axes, names, moving).astype(self.x.dtype)
            )
        names = names | names_of(axes)
        if self.asked is not None:  # a use that takes its slice of it leaves it equal everywhere
            self.asked.add(names - (names_of(axes) - names_of(self.axes)))
        if (axes, names) not in self.cache and self.beyond:
            names |= self.beyond
        if (axes, names) not in self.cache:
            self.cache[axes, names] = self._local(axes, names, moving)
        return self.cache[axes, names]

    def _local(self, axes: Axes, names: Names, moving: Moving) -> Array:
        if self.make is not None:
            return self.make(axes, names, moving)
        x = self._in_use(names) if self.rest is not None else self.x
        steps = plan_moves(self.axes, axes)
        travels = any(step.kind != "slice" for step in steps)
        if travels and self.wire is not None and self.rest is None:
            x = vary(x, names)  # its gradient is summed before it is cast
        with moving(steps) if travels else contextlib.nullcontext(()) as kernels:
            for step in steps:
                x = _step(x, step, names, kernels, self.wire)
        return vary(x, names, dict(() if self.signal is None else self.signal.kernel).get("all_reduce", "auto"))

    def _in_use(self, names: Names) -> Array:
        """Gather a stored parameter. Where a use varies over the axis its gradient is scattered back, not summed everywhere.
        Over the other axes of rows, and between slices, what is then left of it is summed."""
        assert self.rest is not None
        missing = [(axis, name) for axis, rest in enumerate(self.rest) for name in rest if name not in self.axes[axis]]
        own = {name for _, name in missing}
        rows = () if self.signal is None else self.signal.row
        beside = dict.fromkeys((*slices.loaded_across(), *rows))
        between = [(ALL, name, True) for name in beside if name in names - own - names_of(self.axes)]
        return self.gather((*((axis, name, name in names) for axis, name in missing), *between))

    def gather(self, steps: Gathers) -> Array:
        if steps not in self.gathered:
            if self.rest == self.axes:
                with scope(key="row"):
                    self.gathered[steps] = self._summed_late(frozenset(name for _, name, _ in steps))
                return self.gathered[steps]
            with scope(key="store"):
                several = tuple(step for step in steps if slices.size_along(step[1]) > 1 and step[0] != ALL)
                x = self.x
                for axis, name, varies in steps:
                    x = vary(x, frozenset({name})) if axis == ALL else over_one_device(x, (name,), varies=varies)
                kernels = () if self.signal is None else self.signal.kernel
                if self.prefetches and several:
                    group = math.prod(slices.size_along(name) for _, name, _ in several)
                    of_all = group == slices.devices_of_a_slice()
                    of = {"shape": x.shape, "dtype": x.dtype, "group": group, "of_all": of_all, "beside_work": True}
                    for op in ("all_gather", "reduce_scatter"):
                        if dict(kernels).get(op, "auto") == "auto":
                            kernels = (*kernels, (op, choose(op, **of).algorithm))
                self.gathered[steps] = gather(x, several, dtype=self.wire, kernels=kernels)
        return self.gathered[steps]

    def _summed_late(self, names: Names) -> Array:
        """Mark a parameter that is whole as varying. Its gradient is summed beside the work of another layer."""
        x, kernels = self.x, dict(() if self.signal is None else self.signal.kernel)
        x, algorithm = over_one_device(x, names, varies=True), kernels.get("all_reduce", "auto")
        several = tuple(sorted(names - jax.typeof(x).mat.varying))
        if algorithm == "auto" and not slices.is_hierarchy(several):
            group = math.prod(map(slices.size_along, several))
            algorithm = choose("all_reduce", shape=x.shape, dtype=x.dtype, group=group, beside_work=True).algorithm
        if algorithm == "permute" and several:
            marked: Any = pvary_summed((x,), several, algorithm)
            x = marked[0]
        return vary(x, names, algorithm).astype(x.dtype if self.wire is None else self.wire)

    def gathers(self) -> Iterator[tuple[tuple[Any, ...], Gathers]]:
        """What was gathered of it, and of it in other dtypes: the casts that lead there, and the gathers."""
        yield from (((), steps) for steps in self.gathered)
        for key, cast in self.casts.items():
            yield from (((key, *path), steps) for path, steps in cast.gathers())

    def in_dtype(self, dtype: DTypeLike, wire: DTypeLike | None) -> Part:
        if (make := self.make) is not None:
            cast: Any = lambda axes, names, moving: make(axes, names, moving).astype(dtype)
            return Part(self.shape, self.axes, make=cast, signal=self.signal, made_of=self.made_of)
        is_shape = isinstance(self.x, jax.ShapeDtypeStruct)
        return self.renewed(x=self.x.update(dtype=dtype) if is_shape else self.x.astype(dtype), wire=wire)


@contextlib.contextmanager
def moving_as(kernels: Kernels = (), **fields: str) -> Iterator[Kernels]:
    """Say who asks for the moves of a rule that is written by hand; by whatever algorithm, where it names none."""
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
