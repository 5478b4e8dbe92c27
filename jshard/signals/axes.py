"""The kinds of values that name mesh axes and devices."""

from __future__ import annotations

import dataclasses
from typing import Any

from jshard.errors import Place
from jshard.signals.faults import choose, dotted, listed, quoted, shown, subject, told
from jshard.signals.nodes import Node
from jshard.signals.value_types import Names, Path, Reading, whole_number


@dataclasses.dataclass(frozen=True)
class Axes(Names):
    """A mesh axis or a list of them; always a tuple once read."""

    wants: str = "a mesh axis or a list of them"
    example: str = "data"
    noun: str = "mesh axis "

    def is_there(self, name: str, place: Place, path: Path, reading: Reading) -> bool:
        if reading.mesh_is_broken or name in (reading.mesh_axes or ()):
            return True
        fault = f"{subject(path, place)} names {self.noun}{quoted(name)}"
        if reading.mesh_axes is None:
            hint = f"write jshard: {{mesh: {{{dotted([name])}: -1}}}}"
            reading.faults.add(place, f"{fault}, but there is no jshard.mesh", hint)
        else:
            there = f"({reading.mesh_place}: {listed(reading.mesh_axes, 'and')})".replace(" and ", ", ")
            fault = f"{fault}, which is not in jshard.mesh {there}"
            reading.faults.add(place, fault, choose(name, reading.mesh_axes))
        return False


@dataclasses.dataclass(frozen=True)
class Workers:
    """Device numbers, or null for all of them. `()` once read means all: no other list is empty."""

    wants: str = "a list of device numbers"
    example: str = "[0, 1]"

    def read(self, node: Node, path: Path, reading: Reading) -> tuple[int, ...] | None:
        if node.value is None:
            return ()
        if not isinstance(node.value, list):
            return reading.wrong(self, node, path)
        if not node.value:
            reading.faults.add(
                node.place, f"{subject(path, node.place)} names no worker", "write workers: null for all of them"
            )
            return None
        found: list[int] = []
        for each in node.value:
            number, said = whole_number(each.value), subject(path, each.place)
            if number is None:
                return reading.wrong(self, each, path)
            if number < 0:
                reading.faults.add(each.place, f"{said} names worker {shown(number)}", "count workers from 0")
            elif number in found:
                reading.faults.add(each.place, f"{said} names worker {shown(number)} twice", "keep one")
            elif reading.devices is not None and number >= reading.devices:
                has = f"jshard.mesh ({reading.mesh_place}) has {shown(reading.devices)} devices"
                hint = f"use numbers from 0 to {shown(reading.devices - 1)}"
                reading.faults.add(each.place, f"{said} names worker {shown(number)}, but {has}", hint)
            elif number >= 2**31:
                reading.faults.add(each.place, f"{said} names worker {shown(number)}", "use the number of a device")
            else:
                found.append(number)
        return tuple(found) or None

    def json(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": 0}
        return {"anyOf": [{"type": "null"}, {"type": "array", "items": number, "uniqueItems": True, "minItems": 1}]}


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Mesh axes with their sizes, in device order."""

    wants: str = "a mapping of mesh axes to sizes"
    example: str = "{data: 2, tensor: 4}"

    def read(self, node: Node, path: Path, reading: Reading) -> dict[str, int] | None:
        if not isinstance(node.value, dict):
            return reading.wrong(self, node, path)
        if not node.value:
            hint = "write mesh: {data: -1} for all devices"
            reading.faults.add(node.place, f"{subject(path, node.place)} names no mesh axis", hint)
        sizes: dict[str, int] = {}
        rest: str | None = None
        for name, size in node.value.items():
            number = whole_number(size.value)
            at = (*path, name)
            reading.places[".".join(at)] = node.keys[name]
            if not name:
                reading.faults.add(
                    node.keys[name], f"{subject(path, node.keys[name])} has an empty name", "write data: 2"
                )
            elif number is None or number == 0 or number < -1 or number >= 2**31:
                wants = "which is not a size of a mesh axis"
                hint = f"write {dotted([name])}: 2, or -1 for all devices that are left"
                reading.faults.add(size.place, f"{told(at, size.place, size.value)}, {wants}", hint)
            elif number == -1 and rest is not None:
                fault = f"{subject(at, size.place)} is -1, as {dotted((*path, rest))} ({node.value[rest].place}) is"
                reading.faults.add(size.place, fault, "leave one size open and give the other a number")
            else:
                sizes[name] = number
                rest = name if number == -1 else rest
        return sizes if sizes and len(sizes) == len(node.value) else None

    def json(self) -> dict[str, Any]:
        size = {"type": "integer", "anyOf": [{"minimum": 1}, {"const": -1}]}
        return {"type": "object", "minProperties": 1, "additionalProperties": size}
