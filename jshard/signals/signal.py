"""A resolved and checked signal, and its lookup by nested names. Equality ignores names and lines:
layers with equal layouts share caches keyed by their signals."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
from collections.abc import Hashable, Iterable, Mapping

from jshard.errors import Location
from jshard.signals.faults import Path

NOWHERE = Location("no configuration")
# The keys with mesh axes, in the order of blame for a collective. `row` and `sequence` come first:
# where another key has the same mesh axis, sums run because devices have different rows.
AXIS_KEYS = "row", "sequence", "ring", "column", "reduction", "store", "store.optimizer", "expert"

# The key that splits each axis of a product x[M,K] @ w[K,N] + b[N] -> y[M,N]. x and y may have
# further axes in between; `sequence` splits one of them.
PRODUCT = {"x": ("row", "reduction"), "w": ("reduction", "column"), "b": ("column",), "y": ("row", "column")}


@dataclasses.dataclass(frozen=True)
class Shard:
    """A split in GT's form: array axis `axis` over devices `workers` (None: all), or over `mesh` axes."""

    axis: int | None = None
    workers: tuple[int, ...] | None = None
    mesh: tuple[str, ...] = ()
    replicated: bool = False


@dataclasses.dataclass(frozen=True)
class DTypes:
    """Names of dtypes; None leaves the dtype to the layer's arguments."""

    param: str | None = None
    compute: str | None = None
    reduce: str | None = None


@dataclasses.dataclass(frozen=True)
class Signal:
    """A resolved signal, with `extends` applied. Mesh axes are tuples, empty without the key."""

    name: str = dataclasses.field(compare=False)
    place: Location = dataclasses.field(default=NOWHERE, compare=False)
    places: Mapping[str, Location] = dataclasses.field(default_factory=dict, compare=False)  # key path -> where written
    row: tuple[str, ...] = ()
    column: tuple[str, ...] = ()
    reduction: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    ring: tuple[str, ...] = ()  # sequence positions, inside attention too
    expert: tuple[str, ...] = ()  # stacked kernels
    attention: str | None = None  # ring or ulysses, for attention under `ring`; None is ring
    store: tuple[str, ...] = ()  # parameters and optimizer state
    store_keep: bool = False  # keep gathered parameters for the backward pass
    store_prefetch: bool = False  # gather a loop's parameters one layer ahead
    store_optimizer: tuple[str, ...] = ()  # optimizer state only
    output: str | None = None  # keep, gather, sum, scatter; None: the strategy's default
    shard: Shard | None = None
    backward: str | None = None
    compile: bool = False
    dtype: DTypes = DTypes()
    remat: str | tuple[str, ...] = ""  # full, products, chunk, or the names to save
    kernel: tuple[tuple[str, str], ...] = ()  # op -> algorithm, jshard.kernel included
    expect: tuple[tuple[str, int], ...] = dataclasses.field(default=(), compare=False)
    match: tuple[str, ...] = ()  # globs of the claimed parameters
    stage: str = ""  # equal, balance, "0..5: 0, 6..11: 1", or a stage number
    allow: tuple[str, ...] = ()  # primitives without a rule, allowed to gather

    def at(self, key: str) -> Location:
        """Return the place of `key`, or of the signal if it has no such key."""
        return self.places.get(key, self.place)

    def axes(self, key: str) -> tuple[str, ...]:
        """Return the mesh axes of a key in AXIS_KEYS."""
        axes: tuple[str, ...] = getattr(self, key.replace(".", "_"))
        return axes

    @functools.cached_property
    def is_stage_alone(self) -> bool:
        """True for a signal with a stage and without a layout, left to another signal."""
        return bool(self.stage) and self == Signal(self.name, stage=self.stage, match=self.match, kernel=self.kernel)

    def label(self, key: str) -> str:
        """Return the signal's name for an error, with the line of a key."""
        return f'signal "{self.name}" ({self.at(key)})'

    def __str__(self) -> str:
        return f'signal "{self.name}" ({self.place})'


# -- lookup by nested names: the longest match wins, and exact names precede globs --


def is_glob(name: str) -> bool:
    return any(character in name for character in "*?[")


def _fits(path: Path, pattern: Path) -> bool:
    """Match a path against a glob, component by component: `*` does not match a slash."""
    return len(path) == len(pattern) and all(map(fnmatch.fnmatchcase, path, pattern))


class Matcher:
    """An index of signals by name, for matching scopes."""

    def __init__(self, signals: Iterable[Signal]):
        self.exact: dict[Path, Signal] = {}
        self.globs: list[tuple[Path, Signal]] = []
        for signal in signals:
            parts = tuple(signal.name.split("/"))
            if is_glob(signal.name):
                self.globs.append((parts, signal))
            else:
                self.exact[parts] = signal

    def find(self, path: Path) -> tuple[Path, list[Signal]]:
        """Return the longest matching suffix of `path`, and its signals: several if globs contend."""
        for start in range(len(path)):
            end = path[start:]
            if end in self.exact:
                return end, [self.exact[end]]
            found = [signal for pattern, signal in self.globs if _fits(end, pattern)]
            if found:
                return end, found
        return (), []

    def below(self, path: Path) -> frozenset[Hashable]:
        """Return the rests of the names matched in part by `path`, each with its signal. The first components
        of such a name match the last components of `path`, and its rest may match names inside."""
        everything = [*self.exact.items(), *self.globs]
        rests = collections.Counter(  # counted: two globs that say the same still contend
            (taken, pattern[taken:], is_glob("/".join(pattern)), signal)
            for pattern, signal in everything
            for taken in range(1, len(pattern))
            if taken <= len(path) and _fits(path[-taken:], pattern[:taken])
        )
        return frozenset(rests.items())
