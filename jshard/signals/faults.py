"""Faults of a configuration, collected before any is raised, and their common words."""

from __future__ import annotations

from collections.abc import Iterable

from jshard.errors import JShardError, Location, quoted

Path = tuple[str, ...]  # the keys that lead to a value, the outermost first
COMMAND_LINE = "the command line"
MOST = 20  # faults shown per configuration


class Faults:
    """The faults found so far, raised together in the order of files and lines."""

    def __init__(self) -> None:
        self._found: dict[tuple[Location, str, str], tuple[Location, str, str]] = {}
        self._times = 0
        self._sources: dict[str, int] = {}

    def opens(self, source: str) -> None:
        """Order faults of this source after the sources opened before."""
        self._sources.setdefault(source, len(self._sources))

    def add(self, about: Path | str, place: Location, says: str, hint: str) -> None:
        """Note a fault. `about` is its subject, in words or as the path of keys to the value.
        Several signals can share a fault by an alias or template; it is reported once."""
        self._times += 1
        fault = f"{about if isinstance(about, str) else subject(about, place)} {says}"
        self._found.setdefault((place, says if place.line else fault, hint), (place, fault, hint))
        if len(self._found) > MOST:
            self.stop()

    def __len__(self) -> int:
        """Return the number of faults noted, repeats included."""
        return self._times

    def stop(self) -> None:
        """Raise the noted faults as a single error, if there are any."""
        if self._found:
            found = sorted(self._found.values(), key=lambda fault: self._order(fault[0]))
            told = [JShardError(fault, hint=hint) for _, fault, hint in found[:MOST]]
            if len(found) > MOST:
                told.append(JShardError(f"there are more than these {MOST} mistakes", hint="mend them first"))
            raise JShardError.of(told)

    def _order(self, place: Location) -> tuple[int, int, int]:
        return self._sources.get(place.source, len(self._sources)), place.line or 0, place.column or 0


def shown(value: object) -> str:
    """Return a value as written in YAML, or a description of a long value."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
    if isinstance(value, float):
        return repr(value)
    return "a mapping" if isinstance(value, dict) else "a list"


def subject(path: Path, place: Location) -> str:
    """Return the subject of a fault: `signal "layer1" (mlp.yaml:4)`, or `jshard.mesh (mlp.yaml:2)`."""
    if not path:
        return str(place)
    if path[0] == "jshard":
        return f"{dotted(path)} ({place})"
    return f"signal {quoted(path[0])} ({place})"


def dotted(path: Iterable[str]) -> str:
    """Join the keys of a path by dots, on a single line."""
    return ".".join(quoted(word)[1:-1] for word in path)


def value_words(path: Path, value: object) -> str:
    """Return the words after a subject: `has shard.axis: true` for a signal, `is 3` for jshard.strict."""
    inside_signal = path[1:] and path[0] != "jshard"
    return f"{f'has {dotted(path[1:])}:' if inside_signal else 'is'} {shown(value)}"


def listed(words: Iterable[str], joint: str = "or") -> str:
    """Join words as `a, b or c`, cut after 14 of more than 16."""
    names = [quoted(word)[1:-1] for word in words]
    if len(names) > 16:
        return ", ".join(names[:14]) + f" {joint} one of {len(names) - 14} more"
    *others, last = names
    return f"{', '.join(others)} {joint} {last}" if others else last
