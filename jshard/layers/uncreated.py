"""Arrays that are not made yet: each device makes its shards when a call first needs them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import trace_state_clean

from jshard.errors import JShardError
from jshard.layouts.creation import create_by
from jshard.layouts.layout import Layout
from jshard.layouts.redistribution import replicated
from jshard.programs.jaxprs import ClosedJaxpr, bound
from jshard.signals.active_config import mesh

SMALL = 1024  # numbers of an array that is computed by itself, as the keys of draws are


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """A traced function that makes arrays, and its operands: arrays, and shapes that other recipes make."""

    name: str  # with the line of the call
    jaxpr: Any
    operands: Sequence[Any]
    # the variables of the operands that are arrays, and of all small arrays computed from them
    known: Mapping[Any, Any]

    @classmethod
    def of(cls, name: str, closed: ClosedJaxpr, operands: Sequence[Any]) -> Recipe:
        """Make a recipe, and compute its small arrays."""
        jaxpr = closed.jaxpr
        values = [*zip(jaxpr.constvars, closed.consts, strict=True), *zip(jaxpr.invars, operands, strict=True)]
        known = {variable: x for variable, x in values if not isinstance(x, jax.ShapeDtypeStruct)}
        for eqn in jaxpr.eqns:
            is_known = all(hasattr(atom, "val") or atom in known for atom in eqn.invars)
            if is_known and sum(variable.aval.size for variable in eqn.outvars) <= SMALL:
                known |= zip(eqn.outvars, bound(eqn, [_read(atom, known) for atom in eqn.invars]), strict=True)
        return cls(name, jaxpr, operands, known)

    @functools.cached_property
    def source(self) -> dict[Any, int]:
        """The number of the equation that computes each variable."""
        return {variable: at for at, eqn in enumerate(self.jaxpr.eqns) for variable in eqn.outvars}

    def result(self, number: int) -> Any:
        """Compute one result from the arrays that are known, in a trace."""
        jaxpr, asked = self.jaxpr, self.jaxpr.outvars[number]
        unmade = dict(zip(jaxpr.invars, self.operands, strict=True))
        needed, waiting, values = set[int](), [asked], dict[Any, Any]()
        while waiting:
            variable = waiting.pop()
            if hasattr(variable, "val") or variable in values:
                continue
            if variable in self.known or variable in unmade:
                values[variable] = self.known[variable] if variable in self.known else unmade[variable].drawn()
            elif (at := self.source[variable]) not in needed:
                needed.add(at)
                waiting += jaxpr.eqns[at].invars
        for eqn in (jaxpr.eqns[at] for at in sorted(needed)):
            values |= zip(eqn.outvars, bound(eqn, [_read(atom, values) for atom in eqn.invars]), strict=True)
        return _read(asked, values)


def _read(atom: Any, values: Mapping[Any, Any]) -> Any:
    return atom.val if hasattr(atom, "val") else values[atom]


class Uncreated(jax.ShapeDtypeStruct):
    """The shape of an array that a recipe makes, each device its own shard, when `jshard.jit` first needs the array."""

    __slots__ = ("number", "recipe")

    def __init__(self, like: Any, recipe: Recipe, number: int, dtype: jnp.dtype | None = None, sharding: Any = None):
        super().__init__(like.shape, dtype or like.dtype, sharding=sharding, weak_type=like.weak_type)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "number", number)

    def at(self, sharding: Any, dtype: Any = None) -> Uncreated:
        """Return the shape with another sharding and dtype."""
        return Uncreated(self, self.recipe, self.number, dtype or self.dtype, sharding)

    def drawn(self) -> Any:
        """Compute the array, in a trace."""
        x = self.recipe.result(self.number)
        return x if x.dtype == self.dtype else jnp.asarray(x, self.dtype)

    def refuse(self, *_: object, **__: object) -> Any:
        raise JShardError(
            f"{self.recipe.name} makes {self.dtype}{list(self.shape)} when a function under jshard.jit is called with it",
            hint="call such a function before, outside of jax.jit",
        )

    __array__ = __jax_array__ = __getitem__ = __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = refuse


def created(arrays: Sequence[Any]) -> list[Any]:
    """Make the arrays that are not made yet, one after the other, each device its own shard."""
    missing = [x for x in arrays if isinstance(x, Uncreated)]
    if missing and not trace_state_clean():
        missing[0].refuse()
    make = lambda x: create_by(x.drawn, Layout.of(x) or replicated(mesh(), x.ndim))
    return [make(x) if isinstance(x, Uncreated) else x for x in arrays]
