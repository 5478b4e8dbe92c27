"""The text of a compiled program, reduced to its meaning: the texts of equal programs are equal."""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import Any

TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
NAME = re.compile(r"%[\w.\-]+")
METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*\}')
HEAD = re.compile(r"^HloModule [^,\s]+")
ARGUMENT = re.compile(r"(?:(?<=\()|(?<=, ))[\w.\-]+: ")  # of a computation, in its first line


def normalised(compiled: Any) -> str:
    """Return the compiled text without names of instructions and computations, source places and scopes."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    lines: list[str] = []
    inside_table = False
    for line in text.splitlines():
        inside_table = line in TABLES or (inside_table and bool(line.strip()))
        if not inside_table and line.strip():
            line = METADATA.sub("", HEAD.sub("HloModule", line))
            lines.append(ARGUMENT.sub("", line) if line.endswith("{") else line)
    numbers: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        return numbers.setdefault(found[0], f"%{len(numbers)}")

    return "\n".join(NAME.sub(numbered, line) for line in lines)


def first_difference(old: str, new: str) -> tuple[int, str, str]:
    """Return the number of different lines of two programs, and the first of them on both sides."""
    pairs = itertools.zip_longest(old.splitlines(), new.splitlines(), fillvalue="")
    differing = [(one.strip(), other.strip()) for one, other in pairs if one != other]
    one, other = differing[0] if differing else ("", "")
    return len(differing), one, other


def digest(text: str) -> dict[str, Any] | None:
    """Return the number of lines and a hash of a compiled text, independent of names; None without a text."""
    if not text:
        return None
    bare = normalised(text)
    return {"lines": len(bare.splitlines()), "sha256": hashlib.sha256(bare.encode()).hexdigest()}
