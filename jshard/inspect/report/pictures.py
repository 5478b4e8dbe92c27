"""What the script needs to show an array on the mesh: numbers for it, and the array drawn whole. What looks alike is there
once, so that a page does not grow with the depth of a model."""

from __future__ import annotations

from jshard.inspect.report.drawing import Picture, caption, fills, picture, sheet, split_by
from jshard.inspect.report.facts import Facts, Laid
from jshard.printing.markup import Markup, element, joined
from jshard.printing.pages.words import Colours, linked, measured


class Pictures:
    """Collects the arrays that a page lets one choose."""

    def __init__(self, facts: Facts, colours: Colours):
        self.facts, self.colours = facts, colours
        self.fills = fills(facts)
        self.arrays: list[dict[str, object]] = []
        self.sheets: dict[Markup, int] = {}
        self.layouts: dict[tuple[int, ...], int] = {}

    def number(self, array: Laid) -> int:
        """The number by which a button names this array."""
        pic = picture(array)
        split = split_by(array, self.facts)
        parts = tuple(_drawn(tile, array, pic) for tile in array.tiles(self.facts.mesh))
        self.arrays.append(
            {
                "name": ".".join(array.path),
                "shape": array.shape,
                "ways": array.ways,
                "down": pic.down_axes,
                "rows": pic.rows,
                "columns": pic.columns,
                "aspect": round(pic.aspect, 3),
                "fill": self.fills.index(split),
                "split": bool(split),
                "bytes": array.bytes_each,
                "sheet": self.sheets.setdefault(self._sheet(array), len(self.sheets)),
                "layout": self.layouts.setdefault(parts, len(self.layouts)),
            }
        )
        return len(self.arrays) - 1

    @property
    def fields(self) -> dict[str, object]:
        return {"arrays": self.arrays, "layouts": list(self.layouts)}

    def templates(self) -> list[Markup]:
        return [element("template", drawn, id=f"sheet{number}") for number, drawn in enumerate(self.sheets)]

    def _sheet(self, array: Laid) -> Markup:
        says = element(
            "p",
            array.dtype,
            ", ",
            measured(array.bytes_each),
            " on each of its devices, ",
            measured(array.bytes_whole),
            " in all",
            [" · ", linked(array.place, self.facts.sources)] if array.place else None,
            class_="quiet",
        )
        return joined([sheet(array, self.colours), caption(array, self.colours), says])


def _drawn(tile: tuple[int, ...] | None, array: Laid, pic: Picture) -> int:
    """A device's part as one number, row by row as the array is drawn; -1 when it holds none."""
    if tile is None:
        return -1
    row = 0
    for axis in pic.down_axes:
        row = row * array.ways[axis] + tile[axis]
    return row * pic.columns + tile[-1] if tile else 0
