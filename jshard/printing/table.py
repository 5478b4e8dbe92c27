"""Tables and sentences as text, folded by a terminal, and as HTML for a notebook."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence

from jshard.errors import printable
from jshard.printing.markup import Markup, element

INDENT = "    "
BETWEEN = "  "  # columns


@dataclasses.dataclass(frozen=True)
class Rows:
    """A table: cells by rows, with the columns in `right` aligned to the right."""

    cells: Sequence[Sequence[str]]
    right: Collection[int] = ()


Block = Rows | str  # a table, or a sentence


class Shown:
    """A base class for results, printed as text and shown as tables in a notebook. Dataclasses set `repr=False`."""

    def blocks(self) -> Iterator[Block]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(self.blocks())

    def _repr_html_(self) -> str:
        return as_html(self.blocks())


def as_text(blocks: Iterable[Block]) -> str:
    lines: list[str] = []
    for block in blocks:
        lines += [printable(block, keep="\n")] if isinstance(block, str) else table(block.cells, right=block.right)
    return "\n".join(lines)


def as_html(blocks: Iterable[Block]) -> Markup:
    """Return blocks as HTML with inline styles: a notebook uses no style sheet, and has its own for tables."""
    parts = []
    for block in blocks:
        if isinstance(block, str):
            parts.append(element("p", block, style="margin: 0.3em 0"))
            continue
        rows = [
            element("tr", [
                element("td", cell, style=f"text-align: {'right' if column in block.right else 'left'}; white-space: nowrap")
                for column, cell in enumerate(row)
            ])
            for row in block.cells
        ]  # fmt: skip
        parts.append(element("table", element("tbody", rows), style="font-variant-numeric: tabular-nums"))
    return element("div", parts, class_="jshard", style="overflow-x: auto")


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return a line for each row with columns aligned: to the right for the columns in `right`."""
    if not rows:
        return []
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        BETWEEN.join(
            cell.rjust(size) if column in right else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def folded_row(cells: Sequence[str], width: int) -> list[str]:
    """Fold a row of a table, or a sentence, to lines of `width`, indented after the first."""
    lines: list[str] = []
    held = ""
    for cell in cells:
        longer = f"{held}{BETWEEN}{cell}" if held.strip() else held + cell
        if held.strip() and len(longer) > width:
            lines.append(held)
            longer = INDENT + cell
        held = longer
    lines.append(held)
    most = max(width, 2 * len(INDENT))
    wrapped = (textwrap.wrap(line, most, subsequent_indent=INDENT, break_on_hyphens=False) for line in lines)
    return [part for parts in wrapped for part in parts]
