"""Equal stretches of a program, as the layers of a Python loop: each is one call of a program that all of them share.

eqns     embed  a b c d e  a b c d e  a b c d e  head         5 equations a layer, equal but for their variables
folded   embed  [layer]    [layer]    [layer]    head         JAX traces, linearizes and transposes `layer` once
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal, Primitive

from jshard.layers.partition.planner import PUT_OFF_WITH
from jshard.layouts.creation import is_hashable
from jshard.programs import jaxprs
from jshard.programs.jaxprs import FOLDED, Eqn, OpenJaxpr, bare, call_of, level, outline, uses, with_equations
from jshard.programs.provenance import source_of

folded_p = Primitive(FOLDED)  # only the partition meets it: nothing binds it
folded_p.multiple_results = True

LEAST = 8  # equations of a stretch: a call costs some of these
FEWEST = 3  # stretches: the first, whose input has no gradient, is linearized by itself
DISTANCES = 8  # of equal equations that are tried as the length of a stretch

MAY_PUT_OFF = PUT_OFF_WITH | {"broadcast_in_dim", "gather"}

Stretch = Sequence[Eqn]  # that stand one behind the other


def folded(program: Any, parameters: Sequence[bool]) -> Any:
    """Return a program with equal neighbouring stretches as calls.

    A stretch stays written out in two cases. It reads a parameter or an activation with other readers: these share
    the gather and the sum of its gradient. Or a deferred value, such as a broadcast of parameters, would cross its
    border.
    """
    jaxpr = bare(program)
    depends = jaxprs.dependent(jaxpr, [True] * len(jaxpr.invars), inside=False)
    named, shorter = EquationNames(), jaxpr
    while stretches := _equal_stretches(shorter, named, depends):
        shorter = _with_calls(shorter, stretches)
    if shorter is jaxpr or _crosses(shorter, parameters, depends):
        return program
    return with_equations(program, level(shorter))


class EquationNames:
    """Names equations: two have one name if they do the same at the same line of the user's code, whatever their variables."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.programs: dict[int, tuple[Any, Hashable]] = {}  # by `id`; what is named is kept alive
        self.lines: dict[Any, str] = {}  # by traceback

    def of(self, eqn: Eqn) -> int:
        key = self._unless_effects(eqn)
        return self.numbers.setdefault(key, len(self.numbers))

    def _unless_effects(self, eqn: Eqn) -> Hashable:
        if eqn.effects:
            return ("effects", id(eqn))
        operands = tuple(jaxprs.literal(v) if isinstance(v, Literal) else v.aval for v in eqn.invars)
        params = tuple((key, self._value(value)) for key, value in sorted(eqn.params.items()))
        results = tuple(v.aval for v in eqn.outvars)
        traceback = eqn.source_info.traceback
        if traceback not in self.lines:
            self.lines[traceback] = source_of(eqn)
        return eqn.primitive, operands, params, results, self.lines[traceback]

    def _value(self, value: Any) -> Hashable:
        if jaxprs.is_jaxpr(value):
            return self._program(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._value, value))
        return value if is_hashable(value) else ("unlike all others", id(value))

    def _program(self, program: Any) -> Hashable:
        if id(program) not in self.programs:
            key = "program", *map(id, getattr(program, "consts", ())), outline(program, self.of)
            self.programs[id(program)] = program, self.numbers.setdefault(key, len(self.numbers))
        return "program", self.programs[id(program)][1]


def _is_smooth(v: Any, depends: set[Any]) -> bool:
    return v in depends and jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _crosses(jaxpr: OpenJaxpr, parameters: Sequence[bool], depends: set[Any]) -> bool:
    """Return whether a call reads, or a later equation reads from a call, a value possibly deferred."""
    put_off: dict[Any, int] = {}  # and how many calls stand before
    inputs, calls = set(itertools.compress(jaxpr.invars, parameters)), 0
    for eqn in level(jaxpr):
        read = jaxprs.variables(eqn.invars)
        is_call = eqn.primitive is folded_p
        if any(_is_smooth(v, depends) and (is_call or put_off[v] != calls) for v in read if v in put_off):
            return True
        calls += is_call
        of = [v for v in read if v in depends and v.aval.shape]
        if eqn.primitive.name in MAY_PUT_OFF and all(v in put_off or v in inputs for v in of):
            put_off |= dict.fromkeys(eqn.outvars, calls)
    return False


def _equal_stretches(jaxpr: OpenJaxpr, named: EquationNames, depends: set[Any]) -> Sequence[Stretch]:
    """Return the neighbouring stretches with the most saved equations; none if there are too few."""
    eqns = level(jaxpr)
    names, last, distances = [named.of(eqn) for eqn in eqns], dict[int, int](), collections.Counter[int]()
    for at, name in enumerate(names):
        distances[at - last.setdefault(name, at)] += 1
        last[name] = at
    readers, best, saved = uses(jaxpr), list[Any](), 0
    for length, _ in distances.most_common(DISTANCES):
        for begin, end in _runs(names, length) if length >= LEAST else ():
            stretches = [eqns[at : at + length] for at in range(begin - length, end - length + 1, length)]
            shape_of = functools.partial(_shape, jaxpr, readers=readers, depends=depends)
            for shape, alike in itertools.groupby(stretches, shape_of):
                chain = list(alike)
                if shape is not None and len(chain) >= FEWEST and (len(chain) - 1) * length > saved:
                    best, saved = chain, (len(chain) - 1) * length
    return best


def _runs(names: Sequence[int], distance: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of equations equal to the equations at this distance before them."""
    begin = None
    for at in range(distance, len(names) + 1):
        is_equal = at < len(names) and names[at] == names[at - distance]
        if is_equal and begin is None:
            begin = at
        elif not is_equal and begin is not None:
            yield begin, at
            begin = None


def _shape(jaxpr: OpenJaxpr, stretch: Stretch, readers: Mapping[Any, list[Any]], depends: set[Any]) -> Hashable | None:
    """Return the connections between the equations of a stretch; None if it shares a read value with a gradient."""
    own, prefix = set(map(id, stretch)), _common_stack(stretch)
    call = call_of(folded_p, jaxpr, stretch, [])
    if any(_is_smooth(v, depends) and any(id(reader) not in own for reader in readers[v]) for v in call.invars):
        return None
    return outline(call.params["jaxpr"], lambda eqn: eqn.source_info.name_stack.stack[prefix:])


def _common_stack(eqns: Sequence[Eqn]) -> int:
    """Return the number of scopes around all equations of a stretch, such as the scope of a Linen layer."""
    first, *others = (eqn.source_info.name_stack.stack for eqn in eqns)
    alike = 0
    while alike < len(first) and all(other[: alike + 1] == first[: alike + 1] for other in others):
        alike += 1
    return alike


def _with_calls(jaxpr: OpenJaxpr, stretches: Sequence[Stretch]) -> OpenJaxpr:
    """Return the program with a call for each stretch."""
    readers, first = uses(jaxpr), stretches[0]
    made = [[v for eqn in stretch for v in eqn.outvars] for stretch in stretches]
    own = [set(map(id, stretch)) for stretch in stretches]
    is_left = lambda at: any(
        id(reader) not in of for of, some in zip(own, made, strict=True) for reader in readers[some[at]]
    )
    left = [at for at in range(len(made[0])) if is_left(at)]  # all return what one leaves for others
    prefix, results = _common_stack(first), [[some[at] for at in left] for some in made]
    body = call_of(folded_p, jaxpr, [_below(eqn, prefix) for eqn in first], results[0]).params["jaxpr"]
    calls = {
        id(stretch[0]): call_of(folded_p, jaxpr, stretch, some, stretch[0].source_info.name_stack[:prefix], body)
        for stretch, some in zip(stretches, results, strict=True)
    }
    inner = set[int]().union(*own)
    eqns = [calls.get(id(eqn), eqn) for eqn in level(jaxpr) if id(eqn) in calls or id(eqn) not in inner]
    return with_equations(jaxpr, eqns)


def _below(eqn: Eqn, prefix: int) -> Eqn:
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=eqn.source_info.name_stack[prefix:]))
