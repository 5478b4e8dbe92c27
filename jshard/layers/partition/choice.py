"""The mesh axes of each factor of an equation: first as claimed parameters are split, then as the larger operands
are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from jshard.layers.partition.local_sizes import Choice, axes_of, local_shape
from jshard.layers.partition.value import Value
from jshard.layouts.axes import Factors, factors, spread
from jshard.layouts.primitives import FIXED, KEPT
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import OpenJaxpr, bare, called, level

Sizes = Mapping[str, int]  # of the mesh


def ways(names: Iterable[str], sizes: Sizes) -> int:
    """Return over how many devices these mesh axes split."""
    return math.prod(sizes[name] for name in names)


def local_size(value: Value, sizes: Sizes) -> int:
    """Return the number of elements of a shard."""
    return math.prod(local_shape(value.shape, value.axes, sizes))


def choose(found: Factors, values: Sequence[Value], sizes: Sizes) -> Choice:
    """Choose the mesh axes of each factor: as claimed parameters are split, then as the larger operands are, and of those the
    ones that the others have been moved to before."""
    order = sorted(
        (
            value.signal is None or not any(value.axes),
            value.is_put_off,
            -local_size(value, sizes),
            any(value.has_been(other.axes) for other in values if other is not value),
            number,
        )
        for number, value in enumerate(values)
        if not value.is_undecided
    )
    choice: Choice = {}
    left = {factor for result in found.results for of in result for factor in of}
    # An axis of one element, over one device, may be squeezed.
    fixed = {f for f, n in enumerate(found.sizes) if found.kinds[f] == FIXED or (n == 1 and f not in left)}
    for *_, number in order:
        used = {name for names in choice.values() for name in names}
        for of, names in zip(found.operands[number], values[number].axes, strict=True):
            free = tuple(itertools.takewhile(lambda name, used=used: name not in used, names))
            for factor, some in spread(of, free, found.sizes, sizes):
                if factor not in fixed and factor not in choice:
                    choice[factor] = some
    return moved_over(found, values, contiguous(found, choice, sizes), sizes)


def moved_over(found: Factors, values: Sequence[Value], choice: Choice, sizes: Sizes) -> Choice:
    """Move mesh axes away from an axis without room for them: to its end, or to an axis before it. A gather would
    leave the result whole; this costs an all-to-all, and the result stays split."""
    for value, of in zip(values, found.operands, strict=True):
        if value.is_put_off or value.signal is not None:
            continue
        for axis, names in enumerate(value.axes):
            for at, name in enumerate(names):
                own = [factor for factor in of[axis] if at and choice.get(factor) == names[:at]]
                for factor in (*own, *(factor for each in of[:axis] for factor in each)):
                    more = {**choice, factor: (*choice.get(factor, ()), name)}
                    if (
                        not any(name in names for names in choice.values())
                        and found.kinds[factor] == KEPT
                        and not found.sizes[factor] % ways(more[factor], sizes)
                        and contiguous(found, more, sizes) == more
                    ):
                        choice = more
    return choice


def foreseen(
    wanted: Axes, shape: tuple[int, ...], values: Sequence[Value], found: Factors, choice: Choice, sizes: Sizes
) -> Choice:
    """Split a result larger than its operands as its readers need it: the operands are cut instead."""
    choice = dict(choice)
    size = math.prod(local_shape(shape, axes_of(found.results[0], choice), sizes))
    for of, names in zip(found.results[0], wanted, strict=False):
        for factor, some in spread(of, names, found.sizes, sizes):
            have = [v for v, each in zip(values, found.operands, strict=True) if any(factor in count for count in each)]
            used = {name for names in choice.values() for name in names}
            if factor in choice or used.intersection(some):
                continue
            if sum(local_size(each, sizes) for each in have) < size:
                choice[factor] = some
    return contiguous(found, choice, sizes)


def contiguous(found: Factors, choice: Choice, sizes: Sizes) -> Choice:
    """Leave out factors without a contiguous piece of an axis: a minor factor is split only below major ones split to
    the end. A factor left out for one array may be a major one of another."""
    choice = dict(choice)
    before = len(choice) + 1
    while len(choice) < before:
        before = len(choice)
        for of in (of for each in (*found.operands, *found.results) for of in each):
            open_ = False
            for factor in of:
                if open_:
                    choice.pop(factor, None)
                open_ |= ways(choice.get(factor, ()), sizes) != found.sizes[factor]
    return choice


def asked_of(found: Factors, number: int, axes: Axes, sizes: Sizes) -> Choice:
    """Return the choice for a deferred operation with its result needed split by `axes`."""
    asked = {
        factor: some
        for at, names in zip(found.results[number], axes, strict=True)
        for factor, some in spread(at, names, found.sizes, sizes)
    }
    return contiguous(found, {f: some for f, some in asked.items() if found.kinds[f] != FIXED}, sizes)


# -- how a broadcast of parameters will be needed: read backward, from where it meets rows to where it is made --


def wanted(
    jaxpr: OpenJaxpr, found: Mapping[Any, Axes], sizes: Mapping[str, int], want: dict[Any, Axes] | None = None
) -> dict[Any, Axes]:
    """Return the splits needed by readers of variables left whole by a first run (`found`), to spare a cut. `want`
    has the needs of readers outside this program."""
    want = {} if want is None else want
    for eqn in reversed(level(jaxpr)):
        body, of = bare(called(eqn)), factors(eqn)
        if body is not None:
            _hand_on(eqn.outvars, body.outvars, want)
            wanted(body, found, sizes, want)
            _hand_on(body.invars, eqn.invars, want)
        if of is None:
            continue
        choice: Choice = {}
        counted = [*zip(eqn.outvars, of.results, strict=True), *zip(eqn.invars, of.operands, strict=True)]
        counted = [(atom, counts) for atom, counts in counted if not isinstance(atom, Literal)]
        for split in [
            split for known in (found, want) for split in ((known.get(atom, ()), of) for atom, of in counted)
        ]:
            for names, count in zip(*split, strict=False):
                for factor, some in spread(count, names, of.sizes, sizes):
                    used = {name for names in choice.values() for name in names}
                    if of.kinds[factor] != FIXED and factor not in choice and not used.intersection(some):
                        choice[factor] = some
        # What is made of parameters does not cut rows that it meets: their gradient would be gathered.
        stays = {
            factor for atom, counts in counted if any(found.get(atom, ())) and atom in eqn.invars
            for names, count in zip(found[atom], counts, strict=True) if not names for factor in count
        }  # fmt: skip
        for atom, counts in counted:
            kept = stays if atom in eqn.invars and not any(found.get(atom, ())) else ()
            if any(axes := axes_of(counts, {f: some for f, some in choice.items() if f not in kept})):
                want.setdefault(atom, axes)
    return want


def _hand_on(atoms: Sequence[Any], to: Sequence[Any], want: dict[Any, Axes]) -> None:
    for one, other in zip(atoms, to, strict=True):
        if not isinstance(one, Literal) and not isinstance(other, Literal) and one in want:
            want.setdefault(other, want[one])
