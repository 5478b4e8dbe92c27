"""The mesh as a picture: a cell for each device, in which the script draws its shard of the chosen array."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping

import numpy as np

from jshard.inspect.report.facts import Facts, Laid
from jshard.printing.markup import Markup, element, joined
from jshard.printing.pages.words import Colours, linked, measured

ACROSS = 16  # devices side by side
MOST_DEVICES = 1024  # of a larger mesh only the first are drawn, and a sentence says so


@dataclasses.dataclass(frozen=True)
class Strip:
    """Devices side by side along a mesh axis. `at` has the first and last index along each axis that tells rows apart."""

    devices: tuple[int, ...]
    at: tuple[tuple[str, int, int], ...]


def across(sizes: Mapping[str, int]) -> str:
    """Return the longest mesh axis, drawn to the right; of equal axes the last."""
    return max(reversed([*sizes]), key=lambda name: sizes[name], default="")


def strips(sizes: Mapping[str, int]) -> Iterator[Strip]:
    """Yield every device once, in the order of the mesh. `at` leaves out mesh axes of size 1."""
    name = across(sizes)
    others = [other for other in sizes if other != name]
    numbers = np.arange(np.prod([*sizes.values()], dtype=int)).reshape(tuple(sizes.values()) or 1)
    numbers = np.moveaxis(numbers, list(sizes).index(name), -1) if sizes else numbers
    length = numbers.shape[-1]
    for at in np.ndindex(numbers.shape[:-1]):
        fixed = [(other, n, n) for other, n in zip(others, at, strict=True) if sizes[other] > 1]
        for first in range(0, length, ACROSS):
            last = min(first + ACROSS, length) - 1
            part = [(name, first, last)] if length > ACROSS else []
            yield Strip(tuple(numbers[at][first : last + 1].tolist()), (*fixed, *part))


def mesh_picture(facts: Facts, colours: Colours) -> Markup:
    """Draw a cell for each device. The script fills them, and folds equal rows of a large mesh."""
    sizes = {} if facts.mesh is None else dict(facts.mesh.shape)
    name = across(sizes)
    drawn, rows = 0, []
    for row in strips(sizes):
        if drawn >= MOST_DEVICES:
            break
        drawn += len(row.devices)
        rows.append(_row(row, colours))
    says = element("li", element("span"), element("span", name, class_=f"along ink {colours.of(name)}"), class_="head")
    left_out = f"The first {drawn:,} of {facts.devices:,} devices are drawn." if drawn < facts.devices else ""
    return joined(
        [
            element("svg", _gradients(facts, colours), width=0, height=0, class_="fills", aria_hidden="true"),
            element("ol", says if name else None, rows, class_="mesh"),
            element("p", id="folded", class_="quiet"),
            element("p", left_out, class_="quiet") if left_out else None,
        ]
    )


def _row(row: Strip, colours: Colours) -> Markup:
    count = len(row.devices)
    cell = max(22.0, min(88.0, 390.0 / count))
    gap = max(2.0, cell * 0.1)
    where = [
        element("span", f"{name} {first}" + (f"–{last}" if last > first else ""), class_=f"ink {colours.of(name)}")
        for name, first, last in row.at
    ]
    cells = [_device(number, 1 + place * (cell + gap), cell) for place, number in enumerate(row.devices)]
    wide, high = count * (cell + gap) + 2 - gap, cell + 2
    svg = element("svg", cells, viewBox=f"0 0 {wide:.5g} {high:.5g}", width=wide, aria_hidden="true")
    return element("li", element("span", where, class_="where"), svg, class_="strip", data_at=json.dumps(row.at))


def _device(number: int, x: float, cell: float) -> Markup:
    head = 15.0 if cell >= 38 else 0.0
    pad = max(2.0, cell * 0.1)
    box = (x + pad, 1 + head + pad * (0.4 if head else 1), cell - 2 * pad, cell - head - pad * (1.4 if head else 2))
    return element(
        "g",
        element("rect", x=x, y=1, width=cell, height=cell, rx=max(2.0, cell * 0.08), class_="cell"),
        element("text", str(number), x=x + 6, y=14, class_="number") if head else None,
        element("rect", class_="outline"),
        element("rect", class_="tile"),
        class_="device",
        data_device=number,
        data_room=" ".join(f"{value:.5g}" for value in box),
    )


# -- an array on the mesh --


@dataclasses.dataclass(frozen=True)
class Picture:
    """An array as a rectangle of shards: its last axis runs right, the second to last and earlier split axes down."""

    down_axes: tuple[int, ...]
    rows: int
    columns: int
    aspect: float  # height over width

    @classmethod
    def of(cls, array: Laid) -> Picture:
        if not array.shape:
            return cls((), 1, 1, 1.0)
        last = len(array.shape) - 1
        down = tuple(axis for axis in range(last) if axis == last - 1 or array.axes[axis])
        aspect = 0.18
        if last:
            ratio = array.shape[last - 1] / max(1, array.shape[last])
            aspect = round(min(1.3, max(0.34, ratio**0.5)), 3)
        return cls(down, math.prod(array.ways[axis] for axis in down), array.ways[last], aspect)

    def part(self, tile: tuple[int, ...] | None, array: Laid) -> int:
        """Return the number of a device's shard, row by row in the picture; -1 without a shard."""
        if tile is None:
            return -1
        row = 0
        for axis in self.down_axes:
            row = row * array.ways[axis] + tile[axis]
        return row * self.columns + tile[-1] if tile else 0


class Pictures:
    """The arrays a reader can choose: the numbers of each for the script, and its axes in words.
    Equal pictures are stored once, so that a page does not grow with the depth of a model."""

    def __init__(self, facts: Facts, colours: Colours):
        self.facts, self.colours = facts, colours
        self.fills = fills(facts)
        self.arrays: list[dict[str, object]] = []
        self.captions: dict[Markup, int] = {}
        self.layouts: dict[tuple[int, ...], int] = {}

    def number(self, array: Laid) -> int:
        """Return the number of an array, for its button."""
        drawn, split = Picture.of(array), split_by(array, self.facts)
        parts = tuple(drawn.part(tile, array) for tile in array.tiles(self.facts.mesh))
        caption = _caption(array, drawn, self.facts, self.colours)
        self.arrays.append(
            {
                **dataclasses.asdict(drawn),
                "name": ".".join(array.path),
                "shape": array.shape,
                "ways": array.ways,
                "fill": self.fills.index(split),
                "split": bool(split),
                "bytes": array.bytes_each,
                "caption": self.captions.setdefault(caption, len(self.captions)),
                "layout": self.layouts.setdefault(parts, len(self.layouts)),
            }
        )
        return len(self.arrays) - 1

    @property
    def fields(self) -> dict[str, object]:
        return {"arrays": self.arrays, "layouts": list(self.layouts)}

    def templates(self) -> list[Markup]:
        return [element("template", words, id=f"caption{number}") for words, number in self.captions.items()]


def _caption(array: Laid, drawn: Picture, facts: Facts, colours: Colours) -> Markup:
    """Draw the axes of an array, each with its direction in the picture, and the bytes of the array."""
    rows = []
    for axis, (length, local, names) in enumerate(zip(array.shape, array.local, array.axes, strict=True)):
        arrow = "→" if axis == len(array.shape) - 1 else "↓" if axis in drawn.down_axes else "·"
        over = [colours.chip(name, array.mesh.shape[name]) for name in names]
        parts = f"{length // local:,} parts of {local:,}" if local != length else "whole"
        rows.append(
            element(
                "li",
                element("span", arrow, class_="arrow", aria_hidden="true"),
                element("span", f"axis {axis} of {length:,}", class_="what"),
                element("span", over or None, f" {parts}"),
            )
        )
    axes = element("ul", rows or element("li", "a single number, whole everywhere"), class_="axes")
    whole = measured(math.prod(array.shape) * array.itemsize)
    weight = measured(array.bytes_each), " on each of its devices, ", whole, " in all"
    place = [" · ", linked(array.place, facts.sources)] if array.place else None
    return joined([axes, element("p", array.dtype, ", ", *weight, place, class_="quiet")])


def _gradients(facts: Facts, colours: Colours) -> Markup:
    """Make a fill for every set of mesh axes that splits an array: their colours, side by side."""
    found = []
    for number, names in enumerate(fills(facts)):
        stops = []
        for place, name in enumerate(names):
            for edge in (place, place + 1):
                offset = f"{100 * edge / len(names):.0f}%"
                stops.append(element("stop", offset=offset, class_=f"stop {colours.of(name)}"))
        found.append(element("linearGradient", stops, id=f"fill{number}", x1=0, y1=0, x2=1, y2=1))
    return element("defs", found)


def fills(facts: Facts) -> list[tuple[str, ...]]:
    """Return every set of mesh axes that splits an array, in the order of the mesh; the empty set first."""
    sets = dict.fromkeys(split_by(array, facts) for array in facts.arrays)
    return sorted(sets, key=lambda names: (len(names), names))


def split_by(array: Laid, facts: Facts) -> tuple[str, ...]:
    used = {name for names in array.axes for name in names}
    return tuple(name for name in facts.mesh_axes if name in used) + tuple(sorted(used - set(facts.mesh_axes)))
