"""Numbers, layouts and places in the words of a page."""

from __future__ import annotations

import re

from jshard.errors import Location
from jshard.printing.markup import Child, Markup, element
from jshard.printing.units import size

PALETTE = 8  # colours of mesh axes in style.css
NO_SIGNAL = "no signal"


def amount(count: int) -> str:
    """Return `19,240`, `16.6 million`, `7.24 billion`."""
    if count < 1_000_000:
        return f"{count:,}"
    names = ("million", "billion", "trillion")
    power = min(len(names) - 1, (len(str(count)) - 7) // 3)
    return f"{count / 1000 ** (power + 2):.3g} {names[power]}"


def measured(count: int, *, name: str | None = None) -> Markup:
    """Return a number of bytes in words, with the exact number as title."""
    return element("data", size(count), value=count, title=f"{count:,} bytes", data_total=name)


def svg(width: float, height: float, *children: Child, **attributes: object) -> Markup:
    """Return a picture hidden from screen readers, since words beside it say the same."""
    box = {"viewBox": f"0 0 {width:.5g} {height:.5g}", "width": width, "height": height}
    return element("svg", children, **box, aria_hidden="true", **attributes)


def times(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def breakable(text: str, class_: str = "name") -> Markup:
    """Return a name with line breaks allowed after a / . : or _, and not inside words."""
    return element(
        "span", [[part, element("wbr")] for part in re.findall(r"[^/.:_]*[/.:_]|[^/.:_]+$", text)], class_=class_
    )


def signal_name(signal: str) -> Markup:
    return breakable(signal) if signal != "-" else element("span", NO_SIGNAL, class_="quiet")


class Colours:
    """The colour of each mesh axis, the same all over a page."""

    def __init__(self, mesh_axes: tuple[str, ...]):
        self.mesh_axes = mesh_axes

    def of(self, mesh_axis: str) -> str:
        """Return the class of the colour: `ax0`, or `ax-none` for an axis outside this mesh."""
        return f"ax{self.mesh_axes.index(mesh_axis) % PALETTE}" if mesh_axis in self.mesh_axes else "ax-none"

    def chip(self, mesh_axis: str, group: int | None = None) -> Markup:
        """Return the name of a mesh axis in its colour, with the number of devices along it."""
        count = None if group is None else element("span", f"{group:,}", class_="ways")
        return element("span", mesh_axis, count, class_=f"chip {self.of(mesh_axis)}")


def anchor(place: Location | None, sources: tuple[str, ...]) -> str | None:
    """Return the anchor on the page of a line of the configuration."""
    if place is None or place.line is None or place.source not in sources:
        return None
    return f"y{sources.index(place.source)}-{place.line}"


def linked(place: Location | None, sources: tuple[str, ...]) -> Markup:
    """Return a place of the configuration as a link: the last part of its path, and the line."""
    if place is None:
        return element("span", "–", class_="place", title="no line of the configuration")
    target = anchor(place, sources)
    short = place.source.rsplit("/", 1)[-1] + ("" if place.line is None else f":{place.line}")
    if target is None:
        return element("span", short, class_="place", title=place)
    return element("a", short, class_="place", href=f"#{target}", title=place)
