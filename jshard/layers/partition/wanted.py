"""How a broadcast of parameters will be needed: read backward, from where it meets rows to where it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from jshard.layers.partition.local_sizes import Choice, axes_of
from jshard.layouts.axes import factors, spread
from jshard.layouts.primitives import FIXED
from jshard.layouts.redistribution import Axes
from jshard.programs.jaxprs import OpenJaxpr, bare, called


def wanted(jaxpr: OpenJaxpr, found: Mapping[Any, Axes], sizes: Mapping[str, int]) -> dict[Any, Axes]:
    """Return how to split the variables that a first run has `found` whole, so that what is made of them need not be cut."""
    want: dict[Any, Axes] = {}
    _read(bare(jaxpr), found, sizes, want)
    return want


def _read(jaxpr: OpenJaxpr, found: Mapping[Any, Axes], sizes: Mapping[str, int], want: dict[Any, Axes]) -> None:
    for eqn in reversed(jaxpr.eqns):
        body, of = bare(called(eqn)), factors(eqn)
        if body is not None:
            _hand_on(eqn.outvars, body.outvars, want)
            _read(body, found, sizes, want)
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


def _hand_on(atoms: Sequence[Any], to: Sequence[Any], want: dict[Any, Axes]) -> None:
    for one, other in zip(atoms, to, strict=True):
        if not isinstance(one, Literal) and not isinstance(other, Literal) and one in want:
            want.setdefault(other, want[one])
