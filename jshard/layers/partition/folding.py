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
import numpy as np
from jax._src import source_info_util
from jax.extend.core import Literal, Primitive

from jshard.layers.partition.planner import PUT_OFF_WITH
from jshard.programs.jaxprs import Eqn, OpenJaxpr, bare, part_of, variables
from jshard.programs.provenance import source_of

folded_p = Primitive("folded")  # only the partition meets it: nothing binds it
folded_p.multiple_results = True

LEAST = 8  # equations of a stretch: a call costs some of these
FEWEST = 3  # stretches: the first, whose input has no gradient, is linearized by itself
DISTANCES = 8  # of equal equations that are tried as the length of a stretch

MAY_PUT_OFF = PUT_OFF_WITH | {"broadcast_in_dim", "gather"}

Stretch = range  # of places of equations


def folded(program: Any, parameters: Sequence[bool]) -> Any:
    """Return a program whose equal stretches, one behind the other, are calls. They stay as they are where a parameter or an
    activation that a stretch reads has other readers, which share what is gathered, and the sum of its gradient; and where what
    is made where it is needed, as a broadcast of parameters, would cross a border."""
    jaxpr = bare(program)
    named, eqns, depends = EquationNames(), list(jaxpr.eqns), _depending(jaxpr)
    while stretches := _equal_stretches(jaxpr, eqns, named, depends):
        eqns = _replaced(jaxpr, eqns, stretches)
    if len(eqns) == len(jaxpr.eqns) or _crosses(jaxpr, eqns, parameters, depends):
        return program
    cut = jaxpr.replace(eqns=eqns)
    return cut if program is jaxpr else program.replace(jaxpr=cut)


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
        operands = tuple(_literal(v) if isinstance(v, Literal) else v.aval for v in eqn.invars)
        params = tuple((key, self._value(value)) for key, value in sorted(eqn.params.items()))
        results = tuple(v.aval for v in eqn.outvars)
        traceback = eqn.source_info.traceback
        if traceback not in self.lines:
            self.lines[traceback] = source_of(eqn)
        return eqn.primitive, operands, params, results, self.lines[traceback]

    def _value(self, value: Any) -> Hashable:
        if hasattr(bare(value), "eqns"):
            return self._program(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._value, value))
        try:
            hash(value)
        except TypeError:
            return "unlike all others", id(value)
        return value

    def _program(self, program: Any) -> Hashable:
        if id(program) not in self.programs:
            jaxpr, consts = bare(program), tuple(map(id, getattr(program, "consts", ())))
            places = {v: at for at, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
            of = lambda atom: _literal(atom) if isinstance(atom, Literal) else places[atom]
            lines: list[Hashable] = [tuple(v.aval for v in places)]
            for eqn in jaxpr.eqns:
                lines.append((self.of(eqn), tuple(map(of, eqn.invars))))
                places.update((v, len(places) + at) for at, v in enumerate(eqn.outvars))
            key = "program", consts, tuple(lines), tuple(map(of, jaxpr.outvars))
            self.programs[id(program)] = program, self.numbers.setdefault(key, len(self.numbers))
        return "program", self.programs[id(program)][1]


def _literal(atom: Any) -> Hashable:
    value = np.asarray(atom.val)
    return atom.aval, value.dtype, value.tobytes()


def _depending(jaxpr: OpenJaxpr) -> set[Any]:
    """The variables that depend on an input, and may so have a gradient if they are of floating point."""
    found = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _is_smooth(v: Any, depends: set[Any]) -> bool:
    return v in depends and jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _crosses(jaxpr: OpenJaxpr, eqns: Sequence[Eqn], parameters: Sequence[bool], depends: set[Any]) -> bool:
    """Whether what may be put off, being made of parameters or numbers alone, is read behind or in a call."""
    put_off: dict[Any, int] = {}  # and how many calls stand before
    inputs, calls = set(itertools.compress(jaxpr.invars, parameters)), 0
    for eqn in eqns:
        read = variables(eqn.invars)
        is_call = eqn.primitive is folded_p
        if any(_is_smooth(v, depends) and (is_call or put_off[v] != calls) for v in read if v in put_off):
            return True
        calls += is_call
        of = [v for v in read if v in depends and v.aval.shape]
        if eqn.primitive.name in MAY_PUT_OFF and all(v in put_off or v in inputs for v in of):
            put_off |= dict.fromkeys(eqn.outvars, calls)
    return False


def _equal_stretches(jaxpr: OpenJaxpr, eqns: Sequence[Eqn], named: EquationNames, depends: set[Any]) -> list[Stretch]:
    """Return the stretches, one behind the other, that save most equations; none where there are not enough."""
    names, last, distances = [named.of(eqn) for eqn in eqns], dict[int, int](), collections.Counter[int]()
    for at, name in enumerate(names):
        distances[at - last.setdefault(name, at)] += 1
        last[name] = at
    readers, best, saved = _readers(jaxpr, eqns), list[Stretch](), 0
    for length, _ in distances.most_common(DISTANCES):
        for begin, end in _runs(names, length) if length >= LEAST else ():
            stretches = [range(at, at + length) for at in range(begin - length, end - length + 1, length)]
            shape_of = functools.partial(_shape, eqns, readers=readers, depends=depends)
            for shape, alike in itertools.groupby(stretches, shape_of):
                chain = list(alike)
                if shape is not None and len(chain) >= FEWEST and (len(chain) - 1) * length > saved:
                    best, saved = chain, (len(chain) - 1) * length
    return best


def _runs(names: Sequence[int], distance: int) -> Iterator[tuple[int, int]]:
    """Yield where equations are equal to those at this distance before them, from a place to another."""
    begin = None
    for at in range(distance, len(names) + 1):
        is_equal = at < len(names) and names[at] == names[at - distance]
        if is_equal and begin is None:
            begin = at
        elif not is_equal and begin is not None:
            yield begin, at
            begin = None


def _readers(jaxpr: OpenJaxpr, eqns: Sequence[Eqn]) -> Mapping[Any, list[int]]:
    """The places of the equations that read each variable; the end of the program reads its results."""
    found: dict[Any, list[int]] = collections.defaultdict(list)
    for at, eqn in enumerate(eqns):
        for v in variables(eqn.invars):
            found[v].append(at)
    for v in variables(jaxpr.outvars):
        found[v].append(len(eqns))
    return found


def _shape(
    eqns: Sequence[Eqn], stretch: Stretch, readers: Mapping[Any, list[int]], depends: set[Any]
) -> Hashable | None:
    """How the equations of a stretch are joined. None where it reads what others read and may have a gradient."""
    places: dict[Any, Hashable] = {}
    lines: list[Hashable] = []
    prefix = _common_stack([eqns[at] for at in stretch])
    for at in stretch:
        operands = variables(eqns[at].invars)
        for v in operands:
            if v not in places:
                places[v] = "given", len(places)
                if _is_smooth(v, depends) and any(reader not in stretch for reader in readers[v]):
                    return None
        places.update((v, ("made", len(places), number)) for number, v in enumerate(eqns[at].outvars))
        lines.append((tuple(places[v] for v in operands), eqns[at].source_info.name_stack.stack[prefix:]))
    return tuple(lines)


def _common_stack(eqns: Sequence[Eqn]) -> int:
    """How many scopes all equations of a stretch stand in, as that of a layer of Linen."""
    first, *others = (eqn.source_info.name_stack.stack for eqn in eqns)
    alike = 0
    while alike < len(first) and all(other[: alike + 1] == first[: alike + 1] for other in others):
        alike += 1
    return alike


def _replaced(jaxpr: OpenJaxpr, eqns: Sequence[Eqn], stretches: Sequence[Stretch]) -> list[Eqn]:
    """Return the equations with a call for each stretch."""
    readers = _readers(jaxpr, eqns)
    given, made = zip(*(_given_and_made(eqns, stretch) for stretch in stretches), strict=True)
    # what any of the stretches leaves for others, all return
    left = [at for at in range(len(made[0])) if any(
        reader not in stretch for of, stretch in zip(made, stretches, strict=True) for reader in readers[of[at]])]  # fmt: skip
    first = [eqns[at] for at in stretches[0]]
    prefix = _common_stack(first)
    inside = [_below(eqn, prefix) for eqn in first]
    body = part_of(jaxpr, inside, given[0], [made[0][at] for at in left])
    calls = {
        stretch.start: eqns[stretch[-1]].replace(
            primitive=folded_p, invars=list(of), outvars=[results[at] for at in left], params={"jaxpr": body},
            source_info=_at(eqns[stretch[-1]], eqns[stretch[0]].source_info.name_stack.stack[:prefix]),
        )
        for stretch, of, results in zip(stretches, given, made, strict=True)
    }  # fmt: skip
    inner = {at for stretch in stretches for at in stretch}
    return [calls.get(at, eqn) for at, eqn in enumerate(eqns) if at in calls or at not in inner]


def _given_and_made(eqns: Sequence[Eqn], stretch: Stretch) -> tuple[list[Any], list[Any]]:
    """What a stretch reads of others, in the order of its readers, and all that it makes."""
    made = [v for at in stretch for v in eqns[at].outvars]
    own = set(made)
    return list(dict.fromkeys(v for at in stretch for v in variables(eqns[at].invars) if v not in own)), made


def _at(eqn: Eqn, scopes: Sequence[Any]) -> Any:
    return eqn.source_info.replace(name_stack=source_info_util.NameStack(tuple(scopes)))


def _below(eqn: Eqn, prefix: int) -> Eqn:
    return eqn.replace(source_info=_at(eqn, eqn.source_info.name_stack.stack[prefix:]))
