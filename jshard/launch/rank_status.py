"""How all ranks stand, by their last notes: which one differs, which one is slow, and a table of them.

A rank that is slow, but not stuck, ends nothing: the run says once whom all the others wait for.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jshard.launch import kv_store
from jshard.launch.cluster_env import Membership
from jshard.printing import table as text
from jshard.runs.stragglers import is_slow

JUDGE = 5.0  # seconds between two looks; the second that finds the same rank tells


class Slow:
    """Tells once of each rank that the others wait for in every step. In rank 0."""

    def __init__(self, crowd: int) -> None:
        self.crowd = crowd
        self.last = time.monotonic()
        self.suspect: int | None = None
        self.reported: set[int] = set()

    def look(self, membership: Membership) -> None:
        wait = JUDGE * max(1.0, membership.processes / self.crowd)
        if membership.processes == 1 or time.monotonic() - self.last < wait:
            return
        self.last = time.monotonic()
        notes = kv_store.read_ranks("pulse")
        before, self.suspect = self.suspect, slow_one(notes)
        if before is not None and before == self.suspect and before not in self.reported:
            self.reported.add(before)
            print(slow_in_words(before, notes), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print the table of all ranks, if one was slow."""
        if self.reported:
            notes = kv_store.read_ranks("pulse")
            lines = table(notes, dict.fromkeys(notes, True), slow_one(notes))
            print("\n".join(lines), file=sys.stderr, flush=True)


def slow_one(notes: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Find the rank that the others wait for in every step, by how late each begins its steps; None where none stands out."""
    late = {rank: note["late"] for rank, note in notes.items() if "late" in note}
    if len(late) < 2 or len(late) < len(notes):
        return None
    rank = max(sorted(late), key=lambda each: late[each])
    others = [value for each, value in late.items() if each != rank]
    return rank if is_slow(late[rank], others, notes[rank]["took"]) else None


def slow_in_words(rank: int, notes: Mapping[int, Mapping[str, Any]]) -> str:
    middle = statistics.median(note["late"] for each, note in notes.items() if each != rank)
    late, took = notes[rank]["late"], notes[rank]["took"]
    median = (
        f"{late / middle:.1f} times the median of {1000 * middle:.0f} ms" if middle >= 0.001 else "most ranks at once"
    )
    waited = f" in {place}" if (place := notes[rank].get("stands_in")) else ""
    return (
        f"rank {rank} holds the others up: it begins a step {1000 * late:.0f} ms after the one before is done, {median}, "
        f"and of the {1000 * took:.0f} ms of a step the others wait for it "
        f"{1000 * (late - middle):.0f} ms{waited}; look at its data, and at what else runs on {notes[rank]['host']}"
    )


def odd_one(notes: Mapping[int, Mapping[str, Any]], silent: Sequence[int]) -> int | None:
    """Find the rank that differs from the others: the first of those silent, or that has ended, or that is behind."""
    ranks = sorted(notes)
    gone = [*silent] or [rank for rank in ranks if notes[rank]["phase"] == "ended"]
    first = min(note["step"] for note in notes.values())
    behind = gone or [rank for rank in ranks if notes[rank]["step"] == first]
    if gone or len(behind) < len(notes):
        return behind[0]
    phases = [note["phase"] for note in notes.values()]
    rare = min(set(phases), key=lambda phase: (phases.count(phase), phase == "step"))
    return next(rank for rank in ranks if notes[rank]["phase"] == rare) if len(set(phases)) > 1 else None


def table(notes: Mapping[int, Mapping[str, Any]], alive: Mapping[int, bool], odd: int | None) -> list[str]:
    """Make a line for each rank; an arrow points at the one that differs."""
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
    arrows = ["", *("  <--" if rank == odd else "" for rank in sorted(notes))]
    return [line + arrow for line, arrow in zip(text.table(rows), arrows, strict=True)]
