"""How all ranks stand, by their last notes: which one differs, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def odd_one(notes: Mapping[int, Mapping[str, Any]], alive: Mapping[int, bool]) -> int | None:
    """The rank that differs from the others: the first that does not answer, that has ended, or that is behind."""
    for rank in sorted(notes):
        if not alive[rank]:
            return rank
    for rank in sorted(notes):
        if notes[rank]["phase"] == "ended":
            return rank
    steps = {rank: note["step"] for rank, note in notes.items()}
    behind = [rank for rank in sorted(notes) if steps[rank] == min(steps.values())]
    if len(behind) < len(notes):
        return behind[0]
    phases = [note["phase"] for note in notes.values()]
    rare = min(set(phases), key=lambda phase: (phases.count(phase), phase == "step"))
    return next(rank for rank in sorted(notes) if notes[rank]["phase"] == rare) if len(set(phases)) > 1 else None


def table(notes: Mapping[int, Mapping[str, Any]], alive: Mapping[int, bool], odd: int | None) -> list[str]:
    """A line for each rank; an arrow points at the one that differs."""
    rows: list[tuple[str, ...]] = [
        ("rank", "host", "process", "alive", "phase", "step", "done", "late", "stands in (inferred)")
    ]
    for rank, note in sorted(notes.items()):
        has = "yes" if alive[rank] else "no"
        late = f"{1000 * note['late']:.0f} ms" if "late" in note else "-"
        waits = note["phase"] == "step" and note["done"] < note["step"]
        place = (note.get("stands_in") or "-") if waits else "-"
        each = (rank, note["host"], note["pid"], has, note["phase"], note["step"], note["done"], late, place)
        rows.append(tuple(map(str, each)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [line + ("  <--" if at and sorted(notes)[at - 1] == odd else "") for at, line in enumerate(lines)]
