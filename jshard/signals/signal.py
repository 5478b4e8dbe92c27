"""What one signal says, whole and checked, and which signal a nesting of names means. Names and lines do not take part in
equality: two signals that place alike are equal, so that a cache keyed by a signal is shared by all layers that lie alike."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
from collections.abc import Hashable, Iterable, Mapping

from jshard.errors import Location
from jshard.signals.faults import Path

NOWHERE = Location("no configuration")
# The keys that name mesh axes. Of two that may name the same one, `row` and `sequence` are the ones that sums are over.
# In the order in which they answer for a mesh axis: devices that hold other rows are what a sum is for.
AXIS_KEYS = "row", "sequence", "ring", "column", "reduction", "store", "store.optimizer", "expert"

# The word that splits each axis of the arrays of a product x[M,K] @ w[K,N] + b[N] -> y[M,N]. x and y may have more axes between
# the two, one of which `sequence` splits.
PRODUCT = {"x": ("row", "reduction"), "w": ("reduction", "column"), "b": ("column",), "y": ("row", "column")}


@dataclasses.dataclass(frozen=True)
class Shard:
    """GT's form: array axis `axis` split over device numbers `workers` (None: all), or over `mesh` axes."""

    axis: int | None = None
    workers: tuple[int, ...] | None = None
    mesh: tuple[str, ...] = ()
    replicated: bool = False


@dataclasses.dataclass(frozen=True)
class DTypes:
    """Names of dtypes, or None for what the layer's own arguments say."""

    param: str | None = None
    compute: str | None = None
    reduce: str | None = None


@dataclasses.dataclass(frozen=True)
class Signal:
    """One resolved signal (`extends` applied). Mesh axes are always tuples, empty when the key is absent."""

    name: str = dataclasses.field(compare=False)
    place: Location = dataclasses.field(default=NOWHERE, compare=False)
    places: Mapping[str, Location] = dataclasses.field(default_factory=dict, compare=False)  # key path -> where written
    row: tuple[str, ...] = ()
    column: tuple[str, ...] = ()
    reduction: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    ring: tuple[str, ...] = ()  # places of activations, while devices attend too
    expert: tuple[str, ...] = ()  # stacked kernels
    attention: str | None = None  # ring, ulysses: how devices that hold other places attend; None is ring
    store: tuple[str, ...] = ()  # parameters and optimizer state
    store_keep: bool = False  # what was gathered of them, for the backward pass
    store_prefetch: bool = False  # the layers of a loop are gathered one ahead
    store_optimizer: tuple[str, ...] = ()  # optimizer state only
    output: str | None = None  # keep, gather, sum, scatter; None: what the strategy hands on by itself
    shard: Shard | None = None
    backward: str | None = None
    compile: bool = False
    dtype: DTypes = DTypes()
    remat: str | tuple[str, ...] = ""  # full, products, or the names that are kept
    kernel: tuple[tuple[str, str], ...] = ()  # op -> algorithm, jshard.kernel included
    expect: tuple[tuple[str, int], ...] = dataclasses.field(default=(), compare=False)
    match: tuple[str, ...] = ()  # globs of the parameters that it claims
    stage: str = ""  # layers of a stack on stages: equal, balance, "0..5: 0, 6..11: 1"; "1": all is on that one
    allow: tuple[str, ...] = ()  # primitives without a rule that may gather

    def at(self, key: str) -> Location:
        """Where `key` was written; the signal's own place when it was not."""
        return self.places.get(key, self.place)

    def axes(self, key: str) -> tuple[str, ...]:
        """The mesh axes that one of AXIS_KEYS names."""
        axes: tuple[str, ...] = getattr(self, key.replace(".", "_"))
        return axes

    @functools.cached_property
    def is_stage_alone(self) -> bool:
        """Whether it says a stage and no layout, which it leaves to another signal."""
        return bool(self.stage) and self == Signal(self.name, stage=self.stage, match=self.match, kernel=self.kernel)

    def label(self, key: str) -> str:
        """Name the signal in an error, with the line of one of its keys."""
        return f'signal "{self.name}" ({self.at(key)})'

    def __str__(self) -> str:
        return f'signal "{self.name}" ({self.place})'


# -- which signal a nesting of names means: the longest name that fits, exact names before globs --


def is_glob(name: str) -> bool:
    return any(character in name for character in "*?[")


def _fits(path: Path, pattern: Path) -> bool:
    """Whether a glob covers a path, component by component: `*` does not reach over a slash."""
    return len(path) == len(pattern) and all(map(fnmatch.fnmatchcase, path, pattern))


class Matcher:
    """The names of a configuration's signals, ready to be matched."""

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
        """The longest end of `path` that fits, and the signals it means: one, none, or the globs that contend for it."""
        for start in range(len(path)):
            end = path[start:]
            if end in self.exact:
                return end, [self.exact[end]]
            found = [signal for pattern, signal in self.globs if _fits(end, pattern)]
            if found:
                return end, found
        return (), []

    def below(self, path: Path) -> frozenset[Hashable]:
        """What names inside `path` may still be matched by: the rest of each name whose first components are the last
        of `path`, and the signal it means."""
        everything = [*self.exact.items(), *self.globs]
        rests = collections.Counter(  # counted: two globs that say the same still contend
            (taken, pattern[taken:], is_glob("/".join(pattern)), signal)
            for pattern, signal in everything
            for taken in range(1, len(pattern))
            if taken <= len(path) and _fits(path[-taken:], pattern[:taken])
        )
        return frozenset(rests.items())
