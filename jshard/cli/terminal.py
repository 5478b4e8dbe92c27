"""Output fitted to a terminal: its width, and colours."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from jshard.errors import printable
from jshard.printing.table import folded_row

COLOURS = {"+": "32", "-": "31", "~": "33"}  # green, red, yellow
STANDARD = 80  # columns of a terminal of unknown width


def width(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal `stream` (stdout); None for a pipe or a file, without folding."""
    there: TextIO = sys.stdout if stream is None else stream
    if not there.isatty():
        return None
    if os.environ.get("COLUMNS", "").isdigit():
        return int(os.environ["COLUMNS"])
    return os.get_terminal_size(there.fileno()).columns or STANDARD


def show(text: str) -> None:
    """Print text, folded and coloured on a terminal."""
    print(coloured(fitted(text, width())))


def tell(text: str) -> None:
    """Print sentences on stderr, folded on a terminal."""
    print(fitted(text, width(sys.stderr)), file=sys.stderr)


def fitted(text: str, columns: int | None) -> str:
    """Fold text to the window, and escape control characters. Rows of a table fold between cells."""
    text = printable(text, keep="\n")
    if columns is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _fold(line, columns))


def _fold(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    begin = line[: len(line) - len(line.lstrip())]
    cells = re.split(r" {2,}", line.strip())
    return [begin + part for part in folded_row(cells, columns - len(begin))]


def coloured(text: str) -> str:
    """Colour lines marked + - ~ and remarks, such as on unrequested collectives, on a terminal."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return "\n".join(map(_painted, text.split("\n")))


def _painted(line: str) -> str:
    marked = line[:1] if line[1:2] == " " != line[2:3] else ""
    remark = any(words in line for words in ("no signal asked", "decided by the compiler", "unused:", "unsplit:"))
    colour = "33" if remark else COLOURS.get(marked, "")
    return f"\x1b[{colour}m{line}\x1b[0m" if colour else line
