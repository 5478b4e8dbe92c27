"""The arrays of a program as a tree: each with its layout, its bytes, and the line of its signal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jshard.inspect.report.facts import ACTIVATION, BATCH, OPTIMIZER, OTHER, PARAMETER, Facts, Laid
from jshard.inspect.report.mesh_picture import Pictures
from jshard.printing.markup import Markup, element
from jshard.printing.pages.words import Colours, breakable, linked, measured, times

MOST_OPEN = 40  # the most arrays to show unfolded
BRANCHES = (
    (PARAMETER, "Parameters"),
    (ACTIVATION, "Between layers"),
    (BATCH, "Arguments"),
    (OTHER, "Other state"),
    (OPTIMIZER, "Optimizer state"),
)
FOLDED = (OPTIMIZER, OTHER)


@dataclasses.dataclass
class Branch:
    """A module, or a level of another path: arrays and branches in their original order."""

    name: str
    inside: list[Branch | tuple[str, Laid]] = dataclasses.field(default_factory=list)

    def add(self, path: tuple[str, ...], array: Laid) -> None:
        name, *rest = path
        if not rest:
            self.inside.append((name, array))
            return
        branch = next((each for each in self.branches if each.name == name), None)
        if branch is None:
            branch = Branch(name)
            self.inside.append(branch)
        branch.add(tuple(rest), array)

    @property
    def branches(self) -> list[Branch]:
        return [each for each in self.inside if isinstance(each, Branch)]

    @property
    def looks(self) -> tuple[Any, ...]:
        """A key, equal for modules with equal arrays at equal paths."""
        return tuple(
            (each.name, each.looks)
            if isinstance(each, Branch)
            else (each[0], each[1].shape, each[1].dtype, each[1].axes, each[1].signal)
            for each in self.inside
        )

    def runs(self) -> Iterator[list[Any]]:
        """Yield the contents; equal neighbours with numbers as names come together."""

        def kind(numbered: tuple[int, Branch | tuple[str, Laid]]) -> Any:
            number, each = numbered
            return each.looks if isinstance(each, Branch) and each.name.isdecimal() else number

        for _, run in itertools.groupby(enumerate(self.inside), kind):
            yield [each for _, each in run]

    def everything(self) -> Iterator[Laid]:
        for each in self.inside:
            if isinstance(each, Branch):
                yield from each.everything()
            else:
                yield each[1]


def model_tree(facts: Facts, pictures: Pictures) -> Markup:
    """Draw the tree: every array can be chosen, and of equal modules (the layers of a stack) only the first is unfolded."""
    found = []
    for kind, title in BRANCHES:
        arrays = facts.of(kind)
        if not arrays:
            continue
        root = Branch(title)
        for array in arrays:
            root.add(array.path or ("value",), array)
        found.append(_branch(pictures, root, is_open=kind not in FOLDED, top=True))
    return element("div", found or element("p", "The program has no arrays.", class_="quiet"), class_="tree")


def _branch(
    pictures: Pictures, branch: Branch, alike: Sequence[Branch] = (), *, is_open: bool, top: bool = False
) -> Markup:
    name, inner = (branch.name, branch) if top else _joined(branch)
    only = inner.inside[0] if len(inner.inside) == 1 and not alike and not top else None
    if isinstance(only, tuple):
        own, array = only
        return _row(pictures, f"{name}.{own}", array)
    arrays = sum(1 for _ in branch.everything())
    held = sum(array.bytes_each for each in (branch, *alike) for array in each.everything())
    count = times(arrays, "array")
    if alike:
        name = f"{branch.name} … {alike[-1].name}" + name.removeprefix(branch.name)
        count = f"{len(alike) + 1} alike, {count} each"
    summary = element(
        "summary",
        element("span", name, class_="title") if top else breakable(name),
        element("span", count, class_="count"),
        element("span", measured(held), class_="bytes"),
    )
    runs = list(inner.runs())
    is_inner_open = is_open and (arrays <= MOST_OPEN or len(runs) == 1)
    inside = [
        _branch(pictures, first, rest, is_open=is_inner_open) if isinstance(first, Branch) else _row(pictures, *first)
        for first, *rest in runs
    ]
    return element(
        "details", summary, element("div", inside, class_="inside"), open=is_open, class_="top" if top else None
    )


def _row(pictures: Pictures, name: str, array: Laid) -> Markup:
    button = element(
        "button",
        breakable(name),
        layout(array, pictures.colours),
        type="button",
        class_="pick",
        data_array=pictures.number(array),
        aria_pressed="false",
    )
    signal = element("span", breakable(array.signal), class_="signal") if array.signal != "-" else None
    origin = element(
        "span",
        element("span", array.note, array.dtype, class_="dtype"),
        signal,
        linked(array.place, pictures.facts.sources),
        class_="origin",
    )
    return element("div", button, origin, element("span", measured(array.bytes_each), class_="bytes"), class_="row")


def _joined(branch: Branch) -> tuple[str, Branch]:
    """Join a level that holds only another level with it."""
    name = branch.name
    while len(branch.inside) == 1 and isinstance(branch.inside[0], Branch):
        (branch,) = branch.branches
        name = f"{name}.{branch.name}"
    return name, branch


def layout(array: Laid, colours: Colours) -> Markup:
    """Draw `64 × 256 / tensor`: every length, with the mesh axes that split it."""
    if not array.shape:
        return element("span", "a number", class_="layout quiet")
    parts: list[Markup | str] = []
    for axis, (length, names) in enumerate(zip(array.shape, array.axes, strict=True)):
        parts.append(" × " if axis else "")
        parts.append(element("span", f"{length:,}", class_="length"))
        parts += [element("span", "/", name, class_=f"over {colours.of(name)}") for name in names]
    return element("span", parts, class_="layout")
