"""Every fault of a configuration, gathered before any is raised, and the words they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jshard.errors import JShardError, Place, nearest

COMMAND_LINE = "the command line"


class Faults:
    """The faults found so far; raised together, in the order of the files and their lines."""

    def __init__(self) -> None:
        self._said: dict[tuple[Place, str, str], tuple[Place, str, str]] = {}
        self._times = 0
        self._sources: dict[str, int] = {}

    def opens(self, source: str) -> None:
        """Faults of this source come after those of the sources opened before."""
        self._sources.setdefault(source, len(self._sources))

    def add(self, place: Place, fault: str, hint: str) -> None:
        """Note a fault. What stands at one place of a file and is wrong in the same way for several signals, by a merge
        or a template, is told once."""
        self._times += 1
        without_subject = fault.partition(") ")[2] or fault
        self._said.setdefault((place, without_subject if place.line else fault, hint), (place, fault, hint))

    def __len__(self) -> int:
        """How many times a fault was noted."""
        return self._times

    def __iter__(self) -> Iterator[tuple[Place, str, str]]:
        """Place, fault and hint of each, in order."""
        return iter(sorted(self._said.values(), key=lambda found: self._order(found[0])))

    def stop(self) -> None:
        """Raise what was found, if anything was."""
        if self._said:
            raise JShardError.of(JShardError(fault, hint=hint) for _, fault, hint in self)

    def _order(self, place: Place) -> tuple[int, int, int]:
        return self._sources.get(place.source, len(self._sources)), place.line or 0, place.column or 0


def quoted(text: str) -> str:
    """A user's word on one line, in double quotes, cut when it is long."""
    shown = "".join(c if c.isprintable() and c not in '"\\' else c.encode("unicode_escape").decode() for c in text[:60])
    return f'"{shown}..."' if len(text) > 60 else f'"{shown}"'


def shown(value: object) -> str:
    """A value as the user would write it, or what it is when it is long."""
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


def subject(path: tuple[str, ...], place: Place) -> str:
    """What a fault is about: `signal "layer1" (configs/mlp.yaml:4)`, or `jshard.mesh (configs/mlp.yaml:2)`."""
    if not path:
        return str(place)
    if path[0] == "jshard":
        return f"{dotted(path)} ({place})"
    return f"signal {quoted(path[0])} ({place})"


def dotted(path: Iterable[str]) -> str:
    """The keys of a path with dots between, each on one line."""
    return ".".join(quoted(word)[1:-1] for word in path)


def told(path: tuple[str, ...], place: Place, value: object) -> str:
    """The subject and what it says: `signal "layer1" (f:4) has shard.axis: true`, `jshard.strict (f:2) is 3`."""
    if path and path[0] != "jshard" and len(path) > 1:
        return f"{subject(path, place)} has {dotted(path[1:])}: {shown(value)}"
    return f"{subject(path, place)} is {shown(value)}"


def choose(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The hint for a word that isn't there: the nearest known one, else all that are known."""
    names = [str(name) for name in known]
    near = nearest(word, names)
    if near is not None:
        return f"did you mean {quoted(near)}?"
    return otherwise or f"write {listed(names)}"


def listed(words: Iterable[str], joint: str = "or") -> str:
    """`a, b or c`, cut when it is long."""
    names = [quoted(word)[1:-1] for word in words]
    if len(names) > 14:
        return ", ".join(names[:14]) + f" {joint} one of {len(names) - 14} more"
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" {joint} {names[-1]}"
