"""Which signal a nesting of names means: the longest name that fits, exact names before globs."""

from __future__ import annotations

import collections
import fnmatch
from collections.abc import Hashable, Iterable

from jshard.signals.faults import Path
from jshard.signals.signal import Signal


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
