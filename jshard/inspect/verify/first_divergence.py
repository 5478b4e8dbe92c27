"""The place where two runs of a program begin to differ, and the likely mistake: a sum missing, extra or too coarse."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jshard.inspect.verify.interpreter import Note
from jshard.inspect.verify.residues import centered
from jshard.programs.provenance import Cause
from jshard.signals.keys import blamed

LOW_BITS = 2.0**-6
LOW_RESIDUES = 2.0**-4  # of half the modulus: the error of a sum of numbers rounded to multiples of eight


@dataclasses.dataclass(frozen=True)
class FirstDivergence:
    """The first place with a different output. `off` is relative to the largest magnitude there."""

    mesh: Mapping[str, int]
    cause: Cause
    off: float
    looks: str  # the likely mistake

    def __str__(self) -> str:
        who = f'signal "{self.cause.signal}"' if self.cause.path else "the part outside every signal"
        where = ", ".join(str(each) for each in (self.cause.place, self.cause.source) if each)
        where = f" ({where})" if where else ""
        return f"{who}{where}, {self.cause.phase}: off by {self.off:.2g} of the largest; {self.looks}"


@dataclasses.dataclass(frozen=True)
class Likeness:
    """The result of a comparison: equal, differs, partial or unknown. partial: devices hold terms of
    a sum over `mesh_axes`. unknown: shapes can't be compared, as for the residuals of a shard_map."""

    kind: str
    off: float = 0.0
    cause: str = ""
    mesh_axes: tuple[str, ...] = ()


def beginning(
    reference: Sequence[Note], other: Sequence[Note], mesh: Mapping[str, int], tolerance: float, modulus: int | None = None
) -> FirstDivergence | None:  # fmt: skip
    """Return the first signal, in program order, with an output unlike the reference's; None
    if there is none. With a `modulus`, numbers are compared modulo it. Inside a shard_map a
    device may rightly hold a value unlike any in the reference: a term of a sum, a maximum
    of its shard. It counts only if no equal value lies between it and a surely wrong one."""
    suspects: list[tuple[Note, Likeness]] = []
    for one, two in _pairs(reference, other):
        likeness = likeness_of(one, two, mesh, tolerance, modulus)
        if likeness.kind == "equal":
            suspects = [] if two.where.of_sum else suspects
        elif likeness.kind != "unknown":
            suspects.append((two, likeness))
            if not any(two.where.lead):
                break
    return _first_of(suspects, mesh) if suspects else None


def _first_of(suspects: Sequence[tuple[Note, Likeness]], mesh: Mapping[str, int]) -> FirstDivergence:
    """Return the divergence under the signal of the first suspect. Its likely mistake is the first
    conclusive one of that signal, else that of the last unsummed terms, which were used without a sum."""
    cause = suspects[0][0].where.cause
    there = [likeness for note, likeness in suspects if note.where.cause.is_like(cause)]
    telling = [
        likeness for likeness in there if likeness.kind == "differs" and likeness.cause not in (DIFFER, DISAGREE)
    ]
    partial = [likeness for likeness in there if likeness.kind == "partial"]
    chosen = [*telling[:1], *partial[-1:], there[-1]][0]
    off = chosen.off if telling else max(likeness.off for likeness in there)
    return FirstDivergence(mesh, blamed(cause, chosen.mesh_axes), off, chosen.cause)


def _pairs(reference: Sequence[Note], other: Sequence[Note]) -> Iterator[tuple[Note, Note]]:
    """Yield pairs of notes from the same place, in the order of `other`; of a place with more notes, the last."""
    waiting: dict[Any, collections.deque[Note]] = {}
    for note in reference:
        waiting.setdefault(_at(note), collections.deque()).append(note)
    left = collections.Counter(map(_at, other))
    for note in other:
        at = _at(note)
        found = waiting.get(at, collections.deque())
        while len(found) > left[at]:
            found.popleft()
        if len(found) == left[at]:
            yield found.popleft(), note
        left[at] -= 1


def _at(note: Note) -> Any:
    """Return the place of a note, as a key."""
    where = note.where
    cause = where.cause
    primitive = "psum_invariant" if where.primitive == "one_device_sum" else where.primitive
    return cause.path, cause.phase, cause.source, primitive, where.lead


def likeness_of(one: Note, two: Note, mesh: Mapping[str, int], tolerance: float, modulus: int | None) -> Likeness:
    """Compare a noted value with its reference, under every way to assemble the devices' parts."""
    full = np.asarray(one.value).astype(np.float64)
    lead = two.where.lead
    stacked = [place for place, names in enumerate(lead) if names]
    full = np.squeeze(full, tuple(stacked))
    parts = np.moveaxis(np.asarray(two.value).astype(np.float64), stacked, range(len(stacked)))
    names = [name for place in stacked for name in lead[place]]
    parts = parts.reshape((*(mesh[name] for name in names), *parts.shape[len(stacked) :]))
    best = Likeness("unknown")
    for guess, summed in _assembled(parts, names, full.shape):
        if guess is None:
            best = Likeness("differs", 1.0, DISAGREE) if best.kind == "unknown" else best
            continue
        found = compared(full, guess, mesh, tolerance, modulus)
        if found.kind == "equal":
            if not summed:
                return found
            axes = " and ".join(f'"{name}"' for name in summed)
            off = compared(full, parts.reshape((-1, *full.shape))[0], mesh, tolerance, modulus).off
            return Likeness("partial", off, f"a sum over mesh axis {axes} is missing", summed)
        if not summed and (best.kind == "unknown" or best.cause in (DIFFER, DISAGREE)):
            best = found
    return best


def _assembled(
    parts: np.ndarray, names: list[str], shape: tuple[int, ...]
) -> Iterator[tuple[np.ndarray | None, tuple[str, ...]]]:  # fmt: skip
    """Yield the possible whole arrays of the devices' parts, candidates without a sum first. Along a
    mesh axis parts are equal (None if they are not), tiles of an array axis, or terms of a sum."""
    rank = len(shape)
    sizes = dict(zip(names, parts.shape, strict=False))
    live = [name for name in names if sizes[name] > 1]
    found: list[tuple[np.ndarray | None, tuple[str, ...]]] = []
    for roles in itertools.product(("same", *range(rank), "sum"), repeat=len(live)):
        role = dict(zip(live, roles, strict=True))
        grown = [
            size * math.prod(sizes[name] for name in live if role[name] == axis)
            for axis, size in enumerate(parts.shape[len(names) :])
        ]
        if tuple(grown) != shape:
            continue
        tiled = [name for name in live if isinstance(role[name], int)]
        for order in itertools.permutations(tiled):
            if list(order) != sorted(order, key=lambda name: role[name]):  # only the order on one axis matters
                continue
            summed = tuple(name for name in live if role[name] == "sum")
            found.append((_built(parts, role, order, names, shape), summed))
    return iter(sorted(found, key=lambda each: len(each[1])))


def _built(
    parts: np.ndarray, role: Mapping[str, Any], order: Sequence[str], names: Sequence[str], shape: tuple[int, ...]
) -> np.ndarray | None:
    """Sum over mesh axes, keep a single copy of equal parts, and tile the others, the last of `order` innermost."""
    for at, name in enumerate(names):
        if role.get(name, "same") == "same":
            first = np.take(parts, [0], at)
            if not np.array_equal(parts, np.broadcast_to(first, parts.shape), equal_nan=True):
                return None
            parts = first
        elif role[name] == "sum":
            parts = parts.sum(at, keepdims=True)
    gone = [at for at, name in enumerate(names) if name not in order]
    tiled = [[*(names.index(n) for n in order if role[n] == axis), len(names) + axis] for axis in range(len(shape))]
    return parts.transpose(*gone, *itertools.chain(*tiled)).reshape(shape)


DIFFER = "values differ"
DISAGREE = "devices disagree where all should have the same"


def compared(
    one: np.ndarray, two: np.ndarray, mesh: Mapping[str, int], tolerance: float, modulus: int | None = None
) -> Likeness:
    """Compare `two` with the reference `one`: equal within `tolerance` of the largest, or the likely mistake."""
    if one.shape != two.shape:
        return Likeness("unknown")
    if modulus is not None:
        one, two = centered(one, modulus), centered(two, modulus)
    if np.array_equal(one, two, equal_nan=True):
        return Likeness("equal")
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        return Likeness("differs", math.inf, "some numbers are not finite")
    off = relative(one, two, modulus)
    if off <= tolerance:
        return Likeness("equal", off)
    return Likeness("differs", off, *_cause(one, two, mesh, off, modulus))


def relative(one: np.ndarray, two: np.ndarray, modulus: int | None = None, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest magnitude or to `least`, whichever is larger."""
    far = two - one if modulus is None else centered(two - one, modulus)
    largest, off = (float(np.max(np.abs(each), initial=0.0)) for each in (one, far))
    largest = max(largest, least)
    return off / largest if largest else math.inf if off else 0.0


def _cause(
    one: np.ndarray, two: np.ndarray, mesh: Mapping[str, int], off: float, modulus: int | None
) -> tuple[str, tuple[str, ...]]:
    if found := _factor(one, two, mesh, modulus):
        return found
    if off <= (LOW_BITS if modulus is None else LOW_RESIDUES):
        return "only low bits differ: a sum in bfloat16, or in another dtype with few bits", ()
    if _moved(one, two, mesh):
        return "the right numbers in other places: a swapped axis, parts in another order, or another device's part", ()
    return DIFFER, ()


def _factor(
    one: np.ndarray, two: np.ndarray, mesh: Mapping[str, int], modulus: int | None
) -> tuple[str, tuple[str, ...]] | None:
    """Return the mistake if all numbers are off by a factor equal to the size of mesh axes."""
    if not one.any():
        return None
    live = [name for name, size in mesh.items() if size > 1]
    for count, is_large in itertools.product(range(1, len(live) + 1), (True, False)):
        small, large = (one, two) if is_large else (two, one)
        every = itertools.combinations(live, count)
        ways = lambda names: math.prod(mesh[name] for name in names)
        fits = [names for names in every if relative(large, ways(names) * small, modulus) < 1e-6]
        if fits:
            axes, size = " or ".join(" x ".join(f'"{name}"' for name in names) for names in fits), ways(fits[0])
            word, why = "small", "a sum over it is missing, or it is divided by the count twice"
            if is_large:
                word, why = "large", "an extra sum over it, or a mean by one device's count"
            return f"{size} times too {word}, the size of mesh axis {axes}: {why}", fits[0]
    return None


def _moved(one: np.ndarray, two: np.ndarray, mesh: Mapping[str, int]) -> bool:
    """Return True if the numbers are equal in another order, or each part of `two` is a part of `one`."""
    if np.array_equal(np.sort(one, axis=None), np.sort(two, axis=None)):
        return True
    sizes = sorted({math.prod(ways) for count in (1, 2) for ways in itertools.combinations(mesh.values(), count)} - {1})
    for axis, parts in itertools.product(range(one.ndim), sizes):
        if one.shape[axis] % parts == 0:
            have, got = np.split(one, parts, axis), np.split(two, parts, axis)
            if all(any(np.array_equal(part, each) for each in have) for part in got):
                return True
    return False
