"""Kinds of values for mesh axes, meshes and devices."""

from __future__ import annotations

import dataclasses
from typing import Any

from jshard.errors import Location, quoted
from jshard.signals.faults import Path, dotted, listed, shown, subject, value_words
from jshard.signals.nodes import Node
from jshard.signals.synonyms import MESH_AXES, suggest
from jshard.signals.value_types import Key, Keys, Names, Reading, choice, integer, whole_number


@dataclasses.dataclass(frozen=True)
class Axes(Names):
    """A mesh axis or a list of mesh axes, read as a tuple."""

    wants: str = "a mesh axis or a list of them"
    example: str = "data"
    noun: str = "mesh axis "

    def is_there(self, name: str, place: Location, path: Path, reading: Reading) -> bool:
        if reading.mesh_is_broken or name in (reading.mesh_axes or ()):
            return True
        if reading.mesh_axes is None:
            where, hint = "but there is no jshard.mesh", f"write jshard: {{mesh: {{{dotted([name])}: -1}}}}"
        else:
            there = f"({reading.mesh_place}: {listed(reading.mesh_axes, 'and')})".replace(" and ", ", ")
            where = f"which is not in jshard.mesh {there}"
            hint = suggest(name, reading.mesh_axes, f"write {listed(reading.mesh_axes)}", words=MESH_AXES)
        reading.faults.add(path, place, f"names {self.noun}{quoted(name)}, {where}", hint)
        return False


@dataclasses.dataclass(frozen=True)
class Axis:
    """A single mesh axis."""

    wants: str = "a mesh axis"
    example: str = "stage"

    def read(self, node: Node, path: Path, reading: Reading) -> str | None:
        if not isinstance(node.value, str):
            return reading.wrong(self, node, path)
        if reading.mesh_axes is None and node.value == self.example:  # in GT's form, lists of workers are stages
            return node.value
        return next(iter(Axes(self.wants, self.example).read(node, path, reading)), None)

    def json(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclasses.dataclass(frozen=True)
class Workers:
    """A list of device numbers, or null for all devices, read as `()`."""

    wants: str = "a list of device numbers"
    example: str = "[0, 1]"

    def read(self, node: Node, path: Path, reading: Reading) -> tuple[int, ...] | None:
        if node.value is None:
            return ()
        if not isinstance(node.value, list):
            return reading.wrong(self, node, path)
        if not node.value:
            return reading.faults.add(path, node.place, "names no worker", "write workers: null for all of them")
        found: list[int] = []
        for each in node.value:
            number, which, hint = whole_number(each.value), "", ""
            if number is None:
                return reading.wrong(self, each, path)
            if number < 0:
                hint = "count workers from 0"
            elif number in found:
                which, hint = " twice", "keep one"
            elif reading.devices is not None and number >= reading.devices:
                which = f", but jshard.mesh ({reading.mesh_place}) has {shown(reading.devices)} devices"
                hint = f"use numbers from 0 to {shown(reading.devices - 1)}"
            elif number >= 2**31:
                hint = "use the number of a device"
            if hint:
                reading.faults.add(path, each.place, f"names worker {shown(number)}{which}", hint)
            else:
                found.append(number)
        return tuple(found) or None

    def json(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": 0}
        return {"anyOf": [{"type": "null"}, {"type": "array", "items": number, "uniqueItems": True, "minItems": 1}]}


class Across(int):
    """The size of a mesh axis across slices, over the slower network between slices."""


BETWEEN_SLICES = Keys(
    {
        "size": Key(integer("2"), "The number of slices, or of groups of slices."),
        "over": Key(choice(("dcn",)), "The data-center network, which joins slices."),
    },
    required="over",
)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Mesh axes with their sizes, in device order; axes across slices come first."""

    wants: str = "a mapping of mesh axes to sizes"
    example: str = "{data: 2, tensor: 4}"

    def read(self, node: Node, path: Path, reading: Reading) -> dict[str, int] | None:
        if not isinstance(node.value, dict):
            return reading.wrong(self, node, path)
        if not node.value:
            reading.faults.add(path, node.place, "names no mesh axis", "write mesh: {data: -1} for all devices")
        sizes: dict[str, int] = {}
        rest: str | None = None
        for name, size in node.value.items():
            number, at, place = whole_number(size.value), (*path, name), node.keys[name]
            reading.places[".".join(at)] = place
            if not name:
                reading.faults.add(path, place, "has an empty name", "write data: 2")
            elif isinstance(size.value, dict):
                found = BETWEEN_SLICES.read(size, at, reading) or {}
                if "size" not in size.value:
                    reading.faults.add(at, size.place, "has no size", f"write {dotted([name])}: {{size: 2, over: dcn}}")
                elif found.keys() == {"size", "over"}:
                    sizes[name] = Across(found["size"])
            elif number is None or number == 0 or number < -1 or number >= 2**31:
                hint = f"write {dotted([name])}: 2, or -1 for all devices that are left"
                reading.faults.add(
                    at, size.place, f"{value_words(at, size.value)}, which is not a size of a mesh axis", hint
                )
            elif number == -1 and rest is not None:
                fault = f"is -1, as {subject((*path, rest), node.value[rest].place)} is"
                reading.faults.add(at, size.place, fault, "leave one size open and give the other a number")
            else:
                sizes[name] = number
                rest = name if number == -1 else rest
        first = sorted(sizes, key=lambda name: not isinstance(sizes[name], Across))
        return {name: sizes[name] for name in first} if len(sizes) == len(node.value) else None

    def json(self) -> dict[str, Any]:
        size = {"type": "integer", "anyOf": [{"minimum": 1}, {"const": -1}]}
        inner = BETWEEN_SLICES.json()
        across = {**inner, "required": [*inner["properties"]]}
        return {"type": "object", "minProperties": 1, "additionalProperties": {"anyOf": [size, across]}}
