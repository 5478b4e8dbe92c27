"""Pictures of meshes and of tiled arrays: SVG laid out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jshard.inspect.report.facts import Facts, Laid
from jshard.printing.markup import Markup, element
from jshard.printing.pages.words import Colours, svg

MOST_LINES = 64  # within one direction of an array
GLYPH = (34, 22)
Split = list[tuple[str, int]]  # mesh axes and their sizes, major first


@dataclasses.dataclass(frozen=True)
class Picture:
    """An array as a rectangle: its last axis runs right; above it, its second to last, and every earlier axis that is
    split, nested."""

    down: Split
    right: Split
    down_axes: tuple[int, ...]
    right_axis: int | None
    aspect: float  # height over width

    @property
    def rows(self) -> int:
        return math.prod(ways for _, ways in self.down)

    @property
    def columns(self) -> int:
        return math.prod(ways for _, ways in self.right)


def picture(array: Laid) -> Picture:
    rank = len(array.shape)

    def split(axis: int) -> Split:
        return [(name, array.mesh.shape[name]) for name in array.axes[axis]] if array.mesh is not None else []

    if rank == 0:
        return Picture([], [], (), None, 1.0)
    last = rank - 1
    above = tuple(axis for axis in range(last) if axis == rank - 2 or array.axes[axis])
    down = [part for axis in above for part in split(axis)]
    height = array.shape[rank - 2] if rank > 1 else 1
    ratio = height / max(1, array.shape[last])
    aspect = min(1.3, max(0.34, ratio**0.5)) if rank > 1 else 0.18
    return Picture(down, split(last), above, last, aspect)


def lines(split: Split, colours: Colours, most: int = MOST_LINES) -> Iterator[tuple[float, str, bool]]:
    """The borders between parts, as fractions of the length: where, the colour of the mesh axis that changes there, and
    whether it is the outermost. Of more than `most`, every second, third, ... is drawn."""
    total = math.prod(ways for _, ways in split)
    every = -(-total // most)
    for number in range(every, total, every):
        inner = total
        for depth, (name, ways) in enumerate(split):
            inner //= ways
            if number % inner == 0:
                yield number / total, colours.of(name), depth == 0
                break


def _borders(
    pic: Picture, colours: Colours, box: tuple[float, float, float, float], thick: float, most: int = MOST_LINES
) -> list[Markup]:
    x, y, w, h = box
    found = []
    for split, length, across in ((pic.down, h, False), (pic.right, w, True)):
        gap = length / min(most, max(1, math.prod(ways for _, ways in split)))
        for at, colour, outer in lines(split, colours, most):
            x1, y1 = (x + at * w, y) if across else (x, y + at * h)
            x2, y2 = (x1, y + h) if across else (x + w, y1)
            width = min(thick if outer else thick * 0.7, gap * 0.45)
            found.append(element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=f"border {colour}", stroke_width=width))
    return found


def glyph(array: Laid, colours: Colours) -> Markup:
    """A layout at a glance, for a row of a table."""
    pic = picture(array)
    width, height = GLYPH
    w, h = (width - 2, (width - 2) * pic.aspect) if pic.aspect < 0.6 else ((height - 2) / pic.aspect, height - 2)
    h = min(h, height - 2)
    w = min(w, width - 2)
    x, y = (width - w) / 2, (height - h) / 2
    class_ = "sheet" if pic.down or pic.right else "sheet whole"
    paper = element("rect", x=x, y=y, width=w, height=h, rx=2, class_=class_)
    return svg(width, height, paper, _borders(pic, colours, (x, y, w, h), 1.6, most=8), class_="glyph")


def sheet(array: Laid, colours: Colours) -> Markup:
    """The whole array with its borders; `hit` is the part that one device holds, put in place by the script."""
    pic = picture(array)
    left, top, w = 6.0, 6.0, 300.0
    h = max(30.0, min(210.0, w * pic.aspect))
    if pic.right_axis is None:
        w = h = 44.0
    frame = {"x": left, "y": top, "width": w, "height": h}
    return svg(
        w + 12,
        h + 12,
        element("rect", **frame, rx=3, class_="sheet"),
        element("rect", **frame, class_="hit", data_rows=pic.rows, data_columns=pic.columns),
        _borders(pic, colours, (left, top, w, h), 2.0),
        element("rect", **frame, rx=3, class_="edge"),
        class_="whole-array",
    )


def caption(array: Laid, colours: Colours) -> Markup:
    """The axes of an array in words, each in the direction that it is drawn."""
    pic = picture(array)
    rows = []
    for axis, (length, local, names) in enumerate(zip(array.shape, array.local, array.axes, strict=True)):
        arrow = "→" if axis == pic.right_axis else "↓" if axis in pic.down_axes else "·"
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
    return element("ul", rows or element("li", "a single number, whole everywhere"), class_="axes")


def gradients(facts: Facts, colours: Colours) -> Markup:
    """A fill for every set of mesh axes that splits an array: their colours, side by side."""
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
    """Every set of mesh axes that splits some array, in the order of the mesh; the empty one first."""
    sets = dict.fromkeys(split_by(array, facts) for array in facts.arrays)
    return sorted(sets, key=lambda names: (len(names), names))


def split_by(array: Laid, facts: Facts) -> tuple[str, ...]:
    used = {name for names in array.axes for name in names}
    return tuple(name for name in facts.mesh_axes if name in used) + tuple(sorted(used - set(facts.mesh_axes)))
