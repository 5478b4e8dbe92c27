"""An array of a program as planning sees it: how it lies, and no numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from jshard.layers.partition.plan import Brought, Names, Need
from jshard.layers.roles import Use, layout_in_use
from jshard.layouts.redistribution import Axes
from jshard.signals.claims import Claim
from jshard.signals.signal import Signal


@dataclasses.dataclass(eq=False)
class Parameter:
    """A parameter whose place its first use decides: the roles of its axes, and how it is split by them in use."""

    path: str
    claim: Claim
    shape: tuple[int, ...]
    sizes: Mapping[str, int]  # of the mesh
    roles: list[str | None]
    axes: Axes | None = None
    told_by: Any = None  # the equation that decided

    def decide(self, roles: Sequence[str | None], told_by: Any = None) -> None:
        """Take the roles that a use gives the axes. What does not divide stays whole here: it is told with all others."""
        self.told_by = self.told_by or told_by
        self.roles = [before or role for before, role in zip(self.roles, roles, strict=True)]
        axes = layout_in_use(self.claim.signal, self.roles, self.path, self.claim.stage).axes
        ways = [math.prod(self.sizes[name] for name in names) for names in axes]
        self.axes = tuple(() if n % w else names for n, names, w in zip(self.shape, axes, ways, strict=True))

    def use(self) -> Use:
        return Use(self.path, self.claim, self.shape, tuple(self.roles))


class Lying:
    """What an array has by how it lies, planned or run: casts of it, and the same array in other programs."""

    FORGOTTEN: ClassVar[Mapping[str, type]]  # what nothing of stays in another array at its place
    KEPT_INSIDE: ClassVar[tuple[str, ...]]  # what loops and checkpoints may close over
    PUT_OFF: ClassVar[str]
    shape: tuple[int, ...]
    axes: Axes
    dtype: Any
    signal: Signal | None
    rest: Axes | None
    made_of: int
    uncast: Any  # these three hold arrays of the same class
    casts: dict[Any, Any]
    within: list[Any]

    @property
    def is_put_off(self) -> bool:
        return getattr(self, self.PUT_OFF) is not None

    @property
    def prefetches(self) -> bool:
        """Whether it is gathered while another layer computes, and its gradient scattered, or that of a whole one summed."""
        signal = self.signal
        if signal is None or not signal.store_prefetch or not jnp.issubdtype(self.dtype, jnp.inexact):
            return False
        return self.rest is not None or not signal.store

    @property
    def regathers(self) -> bool:
        """Whether it is gathered for its use, and again for the backward pass."""
        signal = self.signal
        return self.rest is not None and signal is not None and bool(signal.store) and not signal.store_keep

    @property
    def needs(self) -> Iterable[tuple[Axes, Names]]:
        """How its uses need it."""
        raise NotImplementedError

    def in_dtype(self, dtype: DTypeLike, wire: DTypeLike | None) -> Self:
        """The same array, made in another dtype, which is gathered in `wire`."""
        raise NotImplementedError

    def cast(self, dtype: DTypeLike, wire: DTypeLike | None = None) -> Self:
        """The same array in another dtype, where it lies: made once for all its uses."""
        dtype, key = jnp.dtype(dtype), (str(dtype), None if wire is None else str(wire))
        if key not in self.casts:
            if not self.is_put_off and self.dtype == dtype and (wire is None or dtype == wire):
                return self
            self.casts[key] = self.in_dtype(dtype, wire)
        return self.casts[key]

    def cast_by_program(self, dtype: DTypeLike) -> Self:
        """The same parameter after a cast. Where its claim sums gradients in a wider dtype, they are of what was cast."""
        found, wide = self.cast(dtype), None if self.signal is None else self.signal.dtype.reduce
        if found is not self and wide is not None and jnp.result_type(wide, self.dtype, found.dtype) == wide:
            found.uncast = self
        return found

    def summed_in(self, wide: DTypeLike | None, compute: DTypeLike) -> Self:
        """The same array in the dtype that its gradient is summed in; it is gathered in the dtype that it is used in."""
        source = self if self.uncast is None or self.dtype != compute else self.uncast
        return source.cast(wide or compute, compute if self.rest is not None or self.signal is None else None)

    def renewed(self, **changes: Any) -> Self:
        """The same place for another array, of which nothing is remembered."""
        forgotten = {"uncast": None, **{name: kind() for name, kind in self.FORGOTTEN.items()}}
        return dataclasses.replace(self, **forgotten | changes)  # type: ignore[type-var]  # both are dataclasses

    def outside(self, **changes: Any) -> Self:
        """The same place in another program."""
        return self.renewed(**{self.PUT_OFF: None}, **changes)

    def inside(self, **changes: Any) -> Self:
        """The same place in a loop or a checkpoint, which may close over what has been made of this one."""
        inside = self.outside(**{name: getattr(self, name).copy() for name in self.KEPT_INSIDE}, **changes)
        inside.casts = {key: each.inside() for key, each in self.casts.items() if not each.is_put_off}
        self.within.append(inside)
        return inside

    def follow(self, path: Sequence[Any]) -> Self:
        """The same array as these casts leave it."""
        return functools.reduce(lambda each, key: each.cast(*key), path, self)

    def all_within(self) -> Iterator[Self]:
        for each in self.within:
            yield each
            yield from each.all_within()

    def one_turn(self, **changes: Any) -> Self:
        """One of those that a loop goes along: a layer of stacked parameters is a parameter."""
        rest = self.axes if self.rest is None and self.prefetches else self.rest
        rest = None if rest is None else rest[1:]
        return self.renewed(shape=self.shape[1:], axes=self.axes[1:], rest=rest, **changes)


L = TypeVar("L", bound=Lying)


def claim_of(operands: Iterable[Lying]) -> Signal | None:
    """Return the claim of the first operand that is a claimed parameter."""
    return next((each.signal for each in operands if each.signal is not None), None)


def need_before(each: Iterable[L], need: Callable[[L, Axes, Names], object]) -> None:
    """Need before a loop what each turn would: else each turn has a collective, or one in its gradient."""
    for one in each:
        inside = list(one.all_within())
        for axes, names in dict.fromkeys(key for some in inside for key in some.needs):
            need(one, axes, names)
        for key in dict.fromkeys(key for some in inside for key in some.casts):
            cast = one.cast(*key)
            cast.within = [some.casts[key] for some in inside if key in some.casts]
            need_before([cast], need)


def needs_of_turns(inside: Sequence[Lying]) -> Iterator[Need]:
    """Yield what the turns of a loop need of an array, given as they have it, in the order of `need_before`."""
    every = [x for one in inside for x in (one, *one.all_within())]
    yield from dict.fromkeys(((), axes, names) for some in every for axes, names in some.needs)
    for key in dict.fromkeys(key for some in every for key in some.casts):
        casts = [some.casts[key] for some in every if key in some.casts]
        yield from (((key, *path), axes, names) for path, axes, names in needs_of_turns(casts))


@dataclasses.dataclass(eq=False)
class Value(Lying):
    """An array of `shape`, split by `axes`. One that is put off is made where it is needed: `recipe` says what that needs."""

    shape: tuple[int, ...]
    axes: Axes
    dtype: Any
    signal: Signal | None = None  # which claims it: a parameter, or what is only cast or transposed from one
    rest: Axes | None = None  # of a stored parameter: how it rests
    recipe: Callable[[Axes, Names], None] | None = None
    made_of: int = 0  # of one that is put off: how many numbers, whose gradients are summed where they begin to vary
    parameter: Parameter | None = None
    of: tuple[int | None, ...] = ()  # the axis of the parameter that each axis is
    is_only_looked_up: bool = False  # of a stored parameter: nothing else reads it, so that it need not be whole
    uncast: Self | None = None  # of a parameter that the program casts, and whose gradient is summed in another dtype
    wire: Any = None  # the dtype that it is gathered in
    needed: dict[Any, Brought] = dataclasses.field(default_factory=dict)  # by axes and names: how its uses need it
    variable: Any = None  # of the program: the array, or the one that it is cast from
    casts: dict[Any, Self] = dataclasses.field(default_factory=dict)  # the same array in other dtypes
    within: list[Self] = dataclasses.field(default_factory=list)  # the same array inside loops and checkpoints
    pieces: dict[Any, list[Value]] = dataclasses.field(default_factory=dict)  # that it is cut into

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), self

    FORGOTTEN = MappingProxyType({"needed": dict, "pieces": dict, "casts": dict, "within": list})
    KEPT_INSIDE, PUT_OFF = ("needed",), "recipe"

    @property
    def is_undecided(self) -> bool:
        return self.parameter is not None and self.parameter.axes is None

    @property
    def prefetches(self) -> bool:
        return self.parameter is None and super().prefetches

    @property
    def needs(self) -> Iterable[tuple[Axes, Names]]:
        return self.needed

    def has_been(self, axes: Axes) -> bool:
        """Whether another use has needed it so."""
        return axes in {needed for needed, _ in self.needed}

    def settle(self) -> None:
        """Take the place that another use of the parameter has decided meanwhile."""
        parameter = self.parameter
        if parameter is not None and parameter.axes is not None and not self.is_put_off:
            axes = tuple(() if at is None else parameter.axes[at] for at in self.of)
            if axes != self.axes:
                self.axes = axes
                self.needed.clear()

    def in_dtype(self, dtype: DTypeLike, wire: DTypeLike | None) -> Value:
        if not self.is_put_off:
            return self.renewed(dtype=dtype, wire=wire)
        made = Value(self.shape, self.axes, dtype, self.signal, recipe=self.recipe, made_of=self.made_of)
        made.variable = self.variable
        return made

    def brought(self, axes: Axes, names: Names, parts: tuple[Brought, ...]) -> Brought:
        """Describe how it is brought to where it is split by `axes` and varies over `names`."""
        rows = () if self.signal is None else self.signal.row
        moves = self.axes, axes, names, self.rest, rows, parts
        return Brought(self.variable, self.shape, self.dtype, self.wire, *moves)

    def one_turn(self, **changes: Any) -> Value:
        return super().one_turn(of=self.of[1:], **changes)

    def at_rest(self, dtype: DTypeLike, shape: tuple[int, ...], order: Sequence[int | None]) -> Value:
        """The same parameter after an operation that leaves it where it rests: `order` is the axis that each was, or None for
        one that is new."""
        ordered = lambda axes: tuple(() if at is None else axes[at] for at in order)
        rest = None if self.rest is None else ordered(self.rest)
        of = tuple(None if at is None else self.of[at] for at in order) if self.of else ()
        return self.renewed(dtype=dtype, shape=shape, axes=ordered(self.axes), rest=rest, of=of)
