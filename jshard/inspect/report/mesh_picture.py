"""The mesh as a picture: rows of cells, a cell for each device, in which the script shows what it holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

import numpy as np

from jshard.inspect.report.drawing import gradients
from jshard.inspect.report.facts import Facts
from jshard.printing.markup import Markup, element, joined
from jshard.printing.pages.words import Colours

ACROSS = 16  # devices side by side
MOST_DEVICES = 1024  # drawn; of a larger mesh the first ones, which is said


@dataclasses.dataclass(frozen=True)
class Strip:
    """Devices side by side along one mesh axis; `at` is where they stand: the first and last index along each axis that
    tells rows apart."""

    devices: tuple[int, ...]
    at: tuple[tuple[str, int, int], ...]


def across(sizes: Mapping[str, int]) -> str:
    """The longest mesh axis, which runs right; of equal ones the last."""
    return max(reversed([*sizes]), key=lambda name: sizes[name], default="")


def strips(sizes: Mapping[str, int]) -> Iterator[Strip]:
    """Every device once, numbered in the order of the mesh. Mesh axes of size one are left out of `at`."""
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
    """Draw a cell for each device; the script puts in place what it holds, and folds rows of a large mesh that hold alike."""
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
            element("svg", gradients(facts, colours), width=0, height=0, class_="fills", aria_hidden="true"),
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
