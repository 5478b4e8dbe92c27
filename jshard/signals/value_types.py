"""Kinds of values for keys: each reads, checks and describes its values."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jshard.errors import Location, nearest, quoted
from jshard.printing.units import BYTES
from jshard.signals.faults import Faults, Path, dotted, listed, shown, value_words
from jshard.signals.nodes import Node
from jshard.signals.synonyms import meant, suggest


@dataclasses.dataclass
class Reading:
    """The known mesh axes for reading values, and the collected faults and places."""

    faults: Faults
    mesh_axes: Mapping[str, Location] | None = None  # None: no mesh is written
    mesh_place: Location | None = None
    devices: int | None = None  # None: not known from the file
    mesh_is_broken: bool = False  # its fault is noted: accept every axis name
    places: dict[str, Location] = dataclasses.field(default_factory=dict)  # dotted key path -> where the key stands
    broken: set[str] = dataclasses.field(default_factory=set)  # dotted key paths with a fault of their own or inside

    def wrong(self, kind: Kind, node: Node, path: Path, hint: str = "") -> None:
        """Note a fault: the value is not of its kind."""
        hint = hint or f"write {dotted(path[-1:])}: {kind.example}"
        self.faults.add(path, node.place, f"{value_words(path, node.value)}, which is not {kind.wants}", hint)


class Kind(Protocol):
    """A kind of value. `read` returns the value, or None after a fault; `wants` and `example` end its sentence."""

    @property
    def wants(self) -> str: ...
    @property
    def example(self) -> str: ...
    def read(self, node: Node, path: Path, reading: Reading) -> Any: ...
    def json(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Key:
    """A row of the key table: the kind of value, and a description for people."""

    kind: Kind
    says: str

    def json(self) -> dict[str, Any]:
        return {"description": self.says, **self.kind.json()}


@dataclasses.dataclass(frozen=True)
class Single:
    """A scalar value. `parse` returns its meaning or None; the nearest of `words` is suggested."""

    wants: str
    example: str
    parse: Callable[[Any], Any]
    schema: dict[str, Any]
    words: tuple[str, ...] = ()

    def read(self, node: Node, path: Path, reading: Reading) -> Any:
        value = self.parse(node.value)
        if value is None:
            word = node.value if isinstance(node.value, str) else ""
            return reading.wrong(self, node, path, suggest(word, self.words, ""))
        return value

    def json(self) -> dict[str, Any]:
        return self.schema


def text(wants: str, example: str, form: str = r"(?s).+") -> Single:
    """Return a kind for text, or for text in the given form."""

    def parse(value: object) -> str | None:
        return value if isinstance(value, str) and re.fullmatch(form, value) else None

    return Single(wants, example, parse, {"type": "string", "minLength": 1})


def _one_of(meanings: Mapping[str | bool, str | bool]) -> Callable[[object], str | bool | None]:
    """Return a parser of words, true and false, given their meanings."""
    return lambda value: meanings.get(value) if isinstance(value, str | bool) else None


def choice(words: tuple[str, ...]) -> Single:
    """Return a kind for a choice of words."""
    return Single(listed(words), words[0], _one_of(dict(zip(words, words, strict=True))), {"enum": list(words)}, words)


LAYERS = re.compile(r"([0-9]{1,6})(?:\.\.([0-9]{1,6}))?")
MOST_STAGES = 2**31


@dataclasses.dataclass(frozen=True)
class Stages:
    """A word, a stage number, or a mapping from layer ranges to stages, read as text: "0..5: 0, 6..11: 1"."""

    words: tuple[str, ...] = ("equal", "balance")
    wants: str = "equal, balance, a number, or ranges of layers with the stage of each"
    example: str = "equal"

    def read(self, node: Node, path: Path, reading: Reading) -> str | None:
        if isinstance(node.value, dict):
            return self._ranges(node, path, reading)
        number = self._number(node.value)
        if node.value in self.words or number is not None:
            return str(node.value if number is None else number)
        word = node.value if isinstance(node.value, str) else ""
        return reading.wrong(self, node, path, suggest(word, self.words, ""))

    def _number(self, value: object) -> int | None:
        number = whole_number(value)
        return number if number is not None and 0 <= number < MOST_STAGES else None

    def _ranges(self, node: Node, path: Path, reading: Reading) -> str | None:
        """Read layer ranges, in order from layer 0 and without gaps."""
        assert isinstance(node.value, dict)
        found, after = [], 0
        for words, inside in node.value.items():
            place, number, written = node.keys[words], self._number(inside.value), LAYERS.fullmatch(words)
            if written is None:
                hint = "write {0..5: 0, 6..11: 1}, with the first and the last layer of each range"
                return reading.faults.add(path, place, f"has stage {quoted(words)}, which is no range of layers", hint)
            first = int(written[1])
            last = int(written[2] or first)
            if first != after or last < first:
                return reading.faults.add(
                    path, place, f"has layers {words} where layer {after} is next", f"write {after}..{max(after, last)}"
                )
            if number is None:
                fault = f"has layers {words} on stage {shown(inside.value)}, which is no number"
                return reading.faults.add(path, inside.place, fault, f"write {words}: 0")
            found, after = [*found, f"{first}..{last}: {number}"], last + 1
        return ", ".join(found) or reading.wrong(self, node, path)

    def json(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": 0, "maximum": MOST_STAGES - 1}
        ranges = {"type": "object", "patternProperties": {f"^{LAYERS.pattern}$": number}, "additionalProperties": False}
        return {"anyOf": [{"enum": [*self.words]}, number, {**ranges, "minProperties": 1}]}


def flag(example: str = "true") -> Single:
    return Single("true or false", example, _one_of({True: True, False: False}), {"type": "boolean"})


def flag_or(words: tuple[str, ...]) -> Single:
    """Return a kind for a choice of words; true means the first word, false means none."""
    meanings = {**dict(zip(words, words, strict=True)), True: words[0], False: ""}
    wants, form = f"{', '.join(words)}, true or false", {"enum": [*words, True, False]}
    return Single(wants, words[0], _one_of(meanings), form, (*words, "true", "false"))


def whole_number(value: object) -> int | None:
    """Return a whole number as an int, also for 2e0; None for true or "2"."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def integer(example: str, least: int | None = 1) -> Single:
    """Return a kind for a whole number of at least `least`."""

    def parse(value: object) -> int | None:
        number = whole_number(value)
        too_small = number is not None and least is not None and number < least
        return None if number is None or too_small or abs(number) >= 2**63 else number

    more, minimum = ("", {}) if least is None else (f" of {least} or more", {"minimum": least})
    return Single(f"a whole number{more}", example, parse, {"type": "integer", **minimum})


def number(example: str) -> Single:
    """Return a kind for a number above 0."""

    def parse(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if 0 < value <= sys.float_info.max else None

    return Single("a number above 0", example, parse, {"type": "number", "exclusiveMinimum": 0})


def part_or(what: str, example: str) -> Single:
    """Return a kind for a number between 0 and 1, or text."""

    def parse(value: object) -> float | str | None:
        if isinstance(value, str):
            return value or None
        return value if isinstance(value, float) and 0 < value < 1 else None

    forms = [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "string", "minLength": 1}]
    return Single(f"a number between 0 and 1, or {what}", example, parse, {"anyOf": forms})


def size() -> Single:
    """Return a kind for a number of bytes, or text such as "64MiB"."""

    def parse(value: object) -> int | None:
        number = whole_number(value)
        if number is not None and 0 <= number < 2**63:
            return number
        written = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMG]i?B|B)", str(value))
        return None if written is None else round(float(written[1]) * BYTES[written[2]])

    forms = [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9.]+ ?([KMG]i?B|B)$"}]
    return Single("a size", "64MiB", parse, {"anyOf": forms})


@dataclasses.dataclass(frozen=True)
class Names:
    """A name or a list of names, read as a tuple."""

    wants: str
    example: str
    noun: str = ""  # before a name in a fault
    each: Single | None = None  # the kind of each name, if not any text

    def read(self, node: Node, path: Path, reading: Reading) -> tuple[str, ...]:
        found: list[str] = []
        for each in node.value if isinstance(node.value, list) else [node]:
            if not isinstance(each.value, str) or not each.value or (self.each and self.each.parse(each.value) is None):
                reading.wrong(self, each, path)
            elif each.value in found:
                fault = f"lists {self.noun}{quoted(each.value)} twice in {dotted(path[1:])}"
                reading.faults.add(path, each.place, fault, "keep one")
            elif self.is_there(each.value, each.place, path, reading):
                found.append(each.value)
        return tuple(found)

    def is_there(self, name: str, place: Location, path: Path, reading: Reading) -> bool:
        """Return whether the name is known; note a fault if not."""
        return True

    def json(self) -> dict[str, Any]:
        word = {"type": "string", "minLength": 1}
        return {"anyOf": [word, {"type": "array", "items": word, "uniqueItems": True}]}


@dataclasses.dataclass(frozen=True)
class Keys:
    """A mapping of known keys. `bare` is the kind of a short form in place of the mapping, for the
    key `stands_for`. An `open` table passes on unknown keys with their values. `instead` is the
    table for a mapping with the required key of `instead` and without this table's."""

    keys: Mapping[str, Key]
    bare: Kind | None = None
    stands_for: str | None = None
    open: bool = False
    required: str | None = None
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key written here -> where it belongs
    instead: Keys | None = None

    @property
    def known(self) -> list[str]:
        return list(self.keys)

    @property
    def wants(self) -> str:
        keys = f"keys such as {listed(self.known[:3], 'and')}" if len(self.known) > 6 else listed(self.known, "and")
        return ("" if self.bare is None else f"{self.bare.wants} or ") + f"a mapping of {keys}"

    @property
    def example(self) -> str:
        if self.bare is not None:
            return self.bare.example
        first = self.known[0]
        return f"{{{first}: {self.keys[first].kind.example}}}"

    def read(self, node: Node, path: Path, reading: Reading) -> Any:
        if not isinstance(node.value, dict):
            bare = None if node.value is None else self.bare
            return reading.wrong(self, node, path) if bare is None else bare.read(node, path, reading)
        if self.instead is not None and self.instead.required in node.value and self.required not in node.value:
            return self.instead.read(node, path, reading)
        values: dict[str, Any] = {}
        for name, inside in node.value.items():
            place, at = node.keys[name], (*path, name)
            if name in self.keys:
                reading.places[".".join(at)] = place
                before = len(reading.faults)
                value = self.keys[name].kind.read(inside, at, reading)
                if len(reading.faults) > before:
                    reading.broken.add(".".join(at))
                if value is not None:
                    values[name] = value
            elif self.open:
                self._keep(inside, place, at, reading)
                values[name] = inside.plain()
            else:
                self._unknown(name, place, path, reading)
        if self.required is not None and self.required not in node.value and ".".join(path) not in reading.broken:
            hint = f"write {self.required}: {self.keys[self.required].kind.example}"
            lacks = "has no" if path[0] == "jshard" else f"has {dotted(path[1:])} without"
            reading.faults.add(path, node.place, f"{lacks} {self.required}", hint)
        return values

    def _keep(self, node: Node, place: Location, path: Path, reading: Reading) -> None:
        """Note the places of all keys inside an unknown key of an open table."""
        reading.places[".".join(path)] = place
        if isinstance(node.value, dict):
            for name, inside in node.value.items():
                self._keep(inside, node.keys[name], (*path, name), reading)

    def _unknown(self, name: str, place: Location, path: Path, reading: Reading) -> None:
        near = next(iter(meant(name, self.known)), nearest(name, self.known))
        if near is not None:  # assumed to be meant, so that its absence is no second fault
            reading.broken.update([".".join(path), ".".join((*path, near.split(":")[0]))])
        inner = "" if path[0] == "jshard" else "".join(f"{word}." for word in path[1:])
        hint = suggest(name, self.known, f"write {listed(inner + each for each in self.known)}", inside=inner)
        if name in self.elsewhere:
            hint = f"write it under {self.elsewhere[name]}"
        reading.faults.add(path, place, f"has an unknown key {quoted(inner + name)}", hint)

    def json(self) -> dict[str, Any]:
        built = {name: key.json() for name, key in self.keys.items()}
        table: dict[str, Any] = {"type": "object", "properties": built, "additionalProperties": self.open}
        if self.required is not None:
            table["required"] = [self.required]
        forms = [each.json() for each in (self.bare, self.instead) if each is not None]
        return {"anyOf": [*forms, table]} if forms else table
