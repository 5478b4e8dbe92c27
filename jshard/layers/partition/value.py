"""An array of a program as planning sees it: how it lies, and no numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jshard.layers.gather import Gathers
from jshard.layers.partition.plan import Brought, Names, Need
from jshard.layers.roles import Use, layout_in_use
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import Eqn
from jshard.signals.claims import Claim
from jshard.signals.signal import Signal


@dataclasses.dataclass(eq=False)
class Parameter:
    """A parameter placed by its first use: the roles of its axes, and their split in use."""

    path: str
    claim: Claim
    shape: tuple[int, ...]
    sizes: Mapping[str, int]  # of the mesh
    roles: list[str | None]
    axes: Axes | None = None
    told_by: Eqn | None = None  # the equation that decided

    def decide(self, roles: Sequence[str | None], told_by: Eqn | None = None) -> None:
        """Take the roles of the axes from a use. An axis that does not divide stays whole here, and is reported with
        all others."""
        self.told_by = self.told_by or told_by
        self.roles = [before or role for before, role in zip(self.roles, roles, strict=True)]
        axes = layout_in_use(self.claim.signal, self.roles, self.path, self.claim.stage).axes
        ways = [math.prod(self.sizes[name] for name in names) for names in axes]
        self.axes = tuple(() if n % w else names for n, names, w in zip(self.shape, axes, ways, strict=True))

    def use(self) -> Use:
        return Use(self.path, self.claim, self.shape, tuple(self.roles))


@dataclasses.dataclass(eq=False)
class Uses:
    """The needs of an array's uses. What several uses need alike is made once."""

    needed: dict[tuple[Axes, Names], Any] = dataclasses.field(default_factory=dict)  # in a run: the array
    casts: dict[tuple[str, str | None], Any] = dataclasses.field(default_factory=dict)  # in other dtypes
    within: list[Uses] = dataclasses.field(default_factory=list)  # inside loops and checkpoints
    parts: dict[Hashable, Any] = dataclasses.field(default_factory=dict)  # pieces, or all of it as varying
    gathered: dict[Gathers, Array] = dataclasses.field(default_factory=dict)  # a stored parameter
    asked: set[Names] | None = None  # of a parameter that is followed: the mesh axes that each use makes it vary over
    variable: Any = None  # of the program: the array, or the one that it is cast from
    wire: DTypeLike | None = None  # the dtype that it is gathered in; its gradient is scattered in its own

    def anew(self) -> Uses:
        """Return the uses of a new array."""
        return Uses(asked=self.asked, variable=self.variable, wire=self.wire)

    def inside(self) -> Uses:
        """Return the uses of the same array in a loop or a checkpoint, which may close over what is made already."""
        copies = {name: {**made} for name, made in vars(self).items() if isinstance(made, dict)}
        casts = {key: each.inside() for key, each in self.casts.items()}
        return dataclasses.replace(self, **copies | {"casts": casts, "within": []})

    def all_within(self) -> Iterator[Uses]:
        for each in self.within:
            yield each
            yield from each.all_within()


@dataclasses.dataclass(eq=False)
class Lying:
    """An array of `shape`, planned or run, and how it lies: in use it is split by `axes`."""

    shape: tuple[int, ...]
    axes: Axes
    _: dataclasses.KW_ONLY
    signal: Signal | None = None  # which claims it: a parameter, or what is only cast or transposed from one
    uncast: Self | None = None  # of a parameter that the program casts: its gradient is summed in the dtype of this one
    uses: Uses = dataclasses.field(default_factory=Uses)
    dtype: ClassVar[Any]
    in_dtype: ClassVar[Callable[..., Any]]  # makes it in another dtype, to be gathered in yet another
    stored: ClassVar[Callable[..., Any]]  # makes the same parameter, split otherwise between uses
    made_of = 0  # of one that is put off: how many numbers, whose gradients are summed where they begin to vary
    is_put_off = is_stored = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), self

    @property
    def lies(self) -> Axes:
        """The mesh axes of each axis between uses: the `rest` of a stored parameter."""
        return getattr(self, "rest", self.axes)

    @property
    def prefetches(self) -> bool:
        """True if its gathers and scatters, or the sum of a whole parameter's gradient, run beside another layer's
        work."""
        signal = self.signal
        if signal is None or not signal.store_prefetch or not jnp.issubdtype(self.dtype, jnp.inexact):
            return False
        return self.is_stored or not signal.store

    @property
    def regathers(self) -> bool:
        """True if it is gathered for its use, and again for the backward pass."""
        signal = self.signal
        return self.is_stored and signal is not None and bool(signal.store) and not signal.store_keep

    def cast(self, dtype: DTypeLike, wire: DTypeLike | None = None) -> Self:
        """Return the same array in another dtype, where it lies: made once for all its uses."""
        dtype, key = jnp.dtype(dtype), (str(dtype), None if wire is None else str(wire))
        if key not in self.uses.casts:
            if not self.is_put_off and self.dtype == dtype and (wire is None or dtype == wire):
                return self
            self.uses.casts[key] = self.in_dtype(dtype, wire)
        return self.uses.casts[key]

    def cast_by_program(self, dtype: DTypeLike) -> Self:
        """Return the parameter after a cast. If its claim sums gradients in a wider dtype, they stay gradients of the
        source."""
        found, wide = self.cast(dtype), None if self.signal is None else self.signal.dtype.reduce
        if found is not self and wide is not None and jnp.result_type(wide, self.dtype, found.dtype) == wide:
            found.uncast = self
        return found

    def summed_in(self, wide: DTypeLike | None, compute: DTypeLike) -> Self:
        """Return the array in the dtype of its gradient's sum; it is gathered in the dtype of its use."""
        source = self if self.uncast is None or self.dtype != compute else self.uncast
        return source.cast(wide or compute, compute if self.is_stored or self.signal is None else None)

    def renewed(self, **changes: object) -> Self:
        """Return the same place for another array, or in another program, where nothing uses it yet."""
        return dataclasses.replace(self, **{"uncast": None, "uses": self.uses.anew(), **changes})  # type: ignore[arg-type]

    def inside(self, **changes: object) -> Self:
        """Return the same place in a loop or a checkpoint, which may close over what has been made of this one."""
        inside = self.renewed(uses=self.uses.inside(), **changes)
        self.uses.within.append(inside.uses)
        return inside

    def follow(self, path: Sequence[Any]) -> Self:
        """Return the same array as these casts leave it."""
        return functools.reduce(lambda each, key: each.cast(*key), path, self)

    def one_turn(self, **changes: object) -> Self:
        """Return a turn's part of a scanned array: a layer of stacked parameters is a parameter."""
        turn = self.renewed(shape=self.shape[1:], axes=self.axes[1:], **changes)
        return turn.stored(turn.axes) if turn.prefetches and not turn.is_stored else turn


L = TypeVar("L", bound=Lying)


def claim_of(operands: Iterable[Lying]) -> Signal | None:
    """Return the claim of the first claimed parameter among the operands."""
    return next((each.signal for each in operands if each.signal is not None), None)


def need_before(each: Iterable[L], need: Callable[[L, Axes, Names], object]) -> None:
    """Record before a loop the needs of its turns: else each turn has a collective, forward or in its gradient."""
    for one in each:
        inside = [*one.uses.all_within()]
        for axes, names in dict.fromkeys(key for uses in inside for key in uses.needed):
            need(one, axes, names)
        for key in dict.fromkeys(key for uses in inside for key in uses.casts):
            cast = one.cast(*key)
            cast.uses.within = [uses.casts[key].uses for uses in inside if key in uses.casts]
            need_before([cast], need)


def needs_of_turns(inside: Sequence[Uses]) -> Iterator[Need]:
    """Yield the needs of a loop's turns for an array, given the turns' own, in the order of `need_before`."""
    every = [x for one in inside for x in (one, *one.all_within())]
    yield from dict.fromkeys(((), axes, names) for uses in every for axes, names in uses.needed)
    for key in dict.fromkeys(key for uses in every for key in uses.casts):
        casts = [uses.casts[key].uses for uses in every if key in uses.casts]
        yield from (((key, *path), axes, names) for path, axes, names in needs_of_turns(casts))


@dataclasses.dataclass(eq=False)
class Value(Lying):
    """An array in memory at its use."""

    dtype: Any
    is_undecided, reader = False, ""

    def has_been(self, axes: Axes) -> bool:
        """True if another use has had this need."""
        return axes in {needed for needed, _ in self.uses.needed}

    def in_dtype(self, dtype: DTypeLike, wire: DTypeLike | None) -> Self:
        made = self.renewed(dtype=dtype)
        made.uses.wire = None if self.is_put_off else wire
        return made

    def brought(self, axes: Axes, names: Names, parts: tuple[Brought, ...]) -> Brought:
        """Describe how it is brought to where it is split by `axes` and varies over `names`."""
        rows, rest = () if self.signal is None else self.signal.row, self.lies if self.is_stored else None
        moves = self.axes, axes, names, rest, rows, parts
        return Brought(self.uses.variable, self.shape, self.dtype, self.uses.wire, *moves)

    def stored(self, rest: Axes, reader: str = "") -> Resting:
        return Resting(self.shape, self.axes, self.dtype, rest, reader, signal=self.signal, uses=self.uses.anew())


@dataclasses.dataclass(eq=False)
class Later(Value):
    """A deferred array, made at its use: `recipe` has the needs of its making."""

    recipe: Callable[[Axes, Names], None]
    made_of: int = 0
    is_put_off = True


@dataclasses.dataclass(eq=False)
class Resting(Value):
    """A stored parameter: between uses it is split as `rest` says."""

    rest: Axes
    reader: str = ""  # the only primitive that reads it: "gather", or "dot_general" where that is once
    is_stored = True

    def one_turn(self, **changes: object) -> Self:
        return super().one_turn(rest=self.rest[1:], **changes)


@dataclasses.dataclass(eq=False)
class Unplaced(Value):
    """A parameter in the first pass, where its first use decides how it lies."""

    parameter: Parameter
    of: tuple[int | None, ...]  # the axis of the parameter that each axis is

    @property
    def is_undecided(self) -> bool:
        return self.parameter.axes is None

    @property
    def prefetches(self) -> bool:
        return False

    def decide(self, roles: Sequence[str | None], told_by: Eqn | None) -> None:
        """Take the roles that a use gives these axes of the parameter."""
        role_of = dict(zip(self.of, roles, strict=True))
        self.parameter.decide([role_of.get(axis) for axis in range(len(self.parameter.shape))], told_by)
        self.settle()

    def scan(self, axis: int) -> None:
        """Record a loop, or a cut, along an axis."""
        if (at := self.of[axis]) is not None:
            self.parameter.roles[at] = "scan"

    def settle(self) -> None:
        """Take the layout decided by another use of the parameter."""
        if self.parameter.axes is not None:
            axes = tuple(() if at is None else self.parameter.axes[at] for at in self.of)
            if axes != self.axes:
                self.axes = axes
                self.uses.needed.clear()

    def shaped(self, dtype: DTypeLike, shape: tuple[int, ...], order: Sequence[int | None]) -> Self:
        """Return the parameter after an operation without effect on its storage: `order` is each axis before, or None
        for a new axis."""
        axes = tuple(() if at is None else self.axes[at] for at in order)
        of = tuple(None if at is None else self.of[at] for at in order)
        return self.renewed(dtype=dtype, shape=shape, axes=axes, of=of)

    def one_turn(self, **changes: object) -> Self:
        return super().one_turn(of=self.of[1:], **changes)


def values_of(variables: Iterable[Any], axes: Iterable[Axes]) -> list[Value]:
    """Return values of a program's variables, split by these axes."""
    return [Value(tuple(v.aval.shape), each, v.aval.dtype) for v, each in zip(variables, axes, strict=True)]
