"""Parsed values with the place of each, from YAML or from Python mappings."""

from __future__ import annotations

import dataclasses
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jshard.errors import Location
from jshard.signals.faults import Faults, Path, shown

MOST_VALUES = 50_000
DEEPEST = 50

Scalar: TypeAlias = str | int | float | bool | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A value and its place. `keys` has the place of each key; an alias has its value at another place."""

    value: Scalar | list[Node] | dict[str, Node]
    place: Location
    keys: Mapping[str, Location] = dataclasses.field(default_factory=dict)
    size: int = 1  # the number of values after alias expansion
    depth: int = 1

    def plain(self) -> Any:
        """Return the value without places, as new lists and dicts."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def collection(value: list[Node] | dict[str, Node], place: Location, keys: Mapping[str, Location]) -> Node:
    """Return the node of a list, or of a mapping with the places of its keys."""
    inside = value.values() if isinstance(value, dict) else value
    return Node(value, place, keys, 1 + sum(n.size for n in inside), 1 + max((n.depth for n in inside), default=0))


_WORDS: dict[str, Scalar] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WORDS |= {sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")}
_WORDS |= dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan"))
_WHOLE = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_COUNTED = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_REAL = re.compile(r"[-+]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


def scalar(text: str) -> Scalar:
    """Return the meaning of an unquoted word by YAML 1.2; `1_000` is 1000. Over 40 characters stay a word."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > 40:
        return text
    if _WHOLE.fullmatch(text):
        return int(text)
    if _COUNTED.fullmatch(text):
        return int(text, 0)
    if _REAL.fullmatch(text):
        return float(text)
    return text


class Stop(Exception):
    """An end of reading after a fault, already noted."""


def document(root: Node | None, source: str, faults: Faults) -> Node | None:
    """Return the document if it is a mapping with content; else note a fault and return None."""
    if root is None or root.value is None or root.value == {}:
        if not faults:
            example = "write jshard: {mesh: {data: -1}} and a signal, as in layer1: {row: data}"
            faults.add(source, Location(source), "is empty", example)
    elif not isinstance(root.value, dict):
        hint = "write signals by name, as in layer1: {row: data}"
        faults.add((), root.place, f"is {shown(root.value)}, not a mapping of signals", hint)
    else:
        return root
    return None


def read_mapping(source: Mapping[Any, Any], name: str, faults: Faults) -> Node | None:
    """Read a Python mapping by the rules of a file. Its values have no lines."""
    return document(node_of(source, Location(name), faults), name, faults)


def node_of(value: object, place: Location, faults: Faults) -> Node | None:
    """Convert a Python value to a node. Note a fault for a value without a YAML form."""
    count = 0

    def made(value: object, path: Path) -> Node:
        nonlocal count
        count += 1
        many = count > MOST_VALUES
        if many or len(path) >= DEEPEST:
            fault = f"holds more than {MOST_VALUES:,} values" if many else f"nests deeper than {DEEPEST} levels"
            faults.add((), place, fault, f"make it {'smaller' if many else 'flatter'}")
            raise Stop()
        if value is None or isinstance(value, (bool, str)):
            return Node(value, place)
        if isinstance(value, numbers.Integral):
            return Node(int(value), place)
        if isinstance(value, numbers.Real):
            return Node(float(value), place)
        if isinstance(value, Mapping):
            inside: dict[str, Node] = {}
            for key, each in value.items():
                if isinstance(key, str):
                    inside[key] = made(each, (*path, key))
                else:
                    is_shown = key is None or isinstance(key, (int, float))
                    word = shown(key) if is_shown else f"something of type {type(key).__name__}"
                    faults.add(path, place, f"has {word} for a key, which is not a name", "use a str")
            return collection(inside, place, dict.fromkeys(inside, place))
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
            return collection([made(each, (*path, f"[{i}]")) for i, each in enumerate(value)], place, {})
        fault = f"has a value of type {type(value).__name__}, which YAML can't express"
        faults.add(path, place, fault, "write text, a number, true, false, a list or a mapping")
        return Node(None, place)

    try:
        return made(value, ())
    except Stop:
        return None
