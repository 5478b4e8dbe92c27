"""Names of topologies such as `v5e:4x4`, read without JAX; `jshard.hardware.chips` has the chips."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from jshard.errors import JShardError, Location, nearest
from jshard.hardware.chips import CHIPS
from jshard.signals.faults import Path, listed, value_words
from jshard.signals.nodes import Node
from jshard.signals.value_types import Reading

SIZE = "[1-9][0-9]{0,5}"
SHAPES = {name: chip for name, chip in CHIPS.items() if chip.examples}  # chips with topologies to plan for


def read_name(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the chip and the shape of a topology; raise an error with near names for an unknown name."""
    if wrong := fault_of(name):
        raise JShardError(f'"{name}" is no topology: {wrong[0]}', hint=wrong[1])
    chip, _, shape = written(name).partition(":")
    return chip, tuple(map(int, shape.split("x")))


def fault_of(name: str) -> tuple[str, str] | None:
    """Return the fault of a topology's name and a hint, or None."""
    chip, _, size = written(name).partition(":")
    shapes = SHAPES.get(chip)
    if shapes is None:
        meant = nearest(chip, SHAPES)
        close = [known for known in SHAPES if known == meant or known[:1] == chip[:1]] or [*SHAPES]
        close.sort(key=lambda known: (size not in SHAPES[known].examples, known != meant))
        sizes = [f"{known}:{_nearest_size(size, known)}" for known in close[:3]]
        return f'there is no chip "{chip}"', f"use {listed(sizes)}"
    if not re.fullmatch("x".join([SIZE] * max(shapes.axes, 1)), size):
        counts = f"{shapes.axes} sizes" if shapes.axes else "one count"
        sizes = [f"{chip}:{each}" for each in shapes.examples[:4]]
        return f"{chip} takes {counts} after the colon", f"use {listed(sizes)}"
    below = int(size) // shapes.host * shapes.host if shapes.host else 0
    if below and int(size) % shapes.host:
        fault = f"its hosts have {shapes.host} GPUs each, and the last would not be full"
        return fault, f"use {chip}:{below} or {chip}:{below + shapes.host}"
    return None


def devices_of(name: str) -> int:
    """Return the number of JAX devices of a topology."""
    chip, shape = read_name(name)
    return math.prod(shape) * SHAPES[chip].devices


def fitted(
    sizes: Mapping[str, int], mesh_place: Location, name: str, place: Location | None, slices: int = 1
) -> dict[str, int]:
    """Return the mesh sizes with -1 resolved; raise an error if they don't use all devices of
    `slices` topologies. `place` is the line of the topology, or None for `--topology`."""
    devices = slices * devices_of(name)
    fixed = abs(math.prod(sizes.values()))
    is_open = -1 in sizes.values()
    if (devices // fixed * fixed if is_open else fixed) != devices:
        has = f"{'fixes' if is_open else 'has'} {fixed:,} devices"
        there = f"{slices} x {name}" if slices >= 2 else name
        there = there if place is None else f"jshard.topology ({place}), {there},"
        raise JShardError(
            f"jshard.mesh ({mesh_place}) {has}, and {there} has {devices:,}",
            hint=hint_of(fixed, name, "use --topology " if place is None else "write topology: ", slices=slices),
        )
    return {axis: size if size >= 1 else devices // fixed for axis, size in sizes.items()}


def hint_of(devices: int, name: str, words: str, whose: str = "its sizes", slices: int = 1) -> str:
    """Return a hint: a topology of this chip with `devices` devices, or a mesh for this topology."""
    chip, _ = read_name(name)
    fits = [f"{chip}:{size}" for size in SHAPES[chip].examples if slices * devices_of(f"{chip}:{size}") == devices]
    change = f"make {whose} multiply to {slices * devices_of(name):,}"
    return f"{words}{fits[0]}, or {change}" if fits else change


@dataclasses.dataclass(frozen=True)
class TopologyName:
    """The name of a topology, as the value of a key."""

    wants: str = "a topology"
    example: str = "v5e:4x4"

    def read(self, node: Node, path: Path, reading: Reading) -> str | None:
        if not isinstance(node.value, str) or not node.value:
            return reading.wrong(self, node, path)
        name, wrong = written(node.value), fault_of(node.value)
        if wrong is None and name == node.value:  # as in the JSON Schema
            return name
        why, hint = wrong or ("", f"write topology: {name}")
        which = f"which is no topology{': ' if why else ''}{why}"
        reading.faults.add(path, node.place, f"{value_words(path, node.value)}, {which}", hint)
        return None

    def json(self) -> dict[str, Any]:
        sizes = {chip: "x".join([SIZE] * max(shapes.axes, 1)) for chip, shapes in SHAPES.items()}
        forms = "|".join(f"{chip}:{size}" for chip, size in sizes.items())
        return {"type": "string", "pattern": f"^({forms})$", "examples": ["v5e:4x4", "v5p:8x8x16", "h100:8", "cpu:8"]}


def written(name: str) -> str:
    return name.strip().lower()


def _nearest_size(size: str, chip: str) -> str:
    examples = SHAPES[chip].examples
    return size if size in examples else nearest(size, examples) or examples[3]
