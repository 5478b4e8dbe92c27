"""The data of `jshard timeline`: the events of all processes of a run on a common clock."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jshard.inspect.timeline.capture import Capture, captures
from jshard.inspect.timeline.event import Event
from jshard.inspect.timeline.lanes import Window, lane, rows
from jshard.inspect.timeline.page import Timeline
from jshard.printing.pages.words import times


def timeline(folder: str | os.PathLike[str]) -> Timeline:
    """Read the capture in a run's folder, or in any folder of JAX's profiler."""
    found = captures(Path(folder))
    by_rank = {capture.rank: capture.read.events for capture in found}
    begins, notes = _clocks(by_rank)
    earliest = min(events[0].start - begins[rank] for rank, events in by_rank.items())
    length = max(event.end - begins[rank] for rank, events in by_rank.items() for event in events) - earliest
    # A lane is a device, by its number among all processes, or after them a thread that names no device.
    by_lane: dict[tuple[float, int, str], tuple[Capture, list[Event]]] = {}
    for capture in found:
        for event in by_rank[capture.rank]:
            device, thread = (math.inf, event.thread) if event.device is None else (capture.device(event.device), "")
            by_lane.setdefault((device, capture.rank, thread), (capture, []))[1].append(event)
    lanes, bars = [], []
    for number, (device, rank, thread) in enumerate(sorted(by_lane)):
        capture, events = by_lane[device, rank, thread]
        own = _bars(number, events, begins[rank] + earliest, capture)
        where = f" of rank {rank}" if capture.processes > 1 else ""
        stage = capture.metadata.get("stages", {}).get(str(device))
        where += "" if stage is None else f", stage {stage}"
        lanes.append(lane((f"thread {thread}" if thread else f"device {device}") + where, rank, own, length))
        bars += own
    return Timeline(
        title=found[0].metadata.get("title", str(folder)),
        about=_about(found, len(lanes)),
        lanes=tuple(lanes),
        bars=tuple(bars),
        steps=_windows(bars),
        length=length,
        notes=(*notes, *_notes(found, by_rank)),
    )


def _bars(number: int, events: Sequence[Event], begin: float, capture: Capture) -> list[Event]:
    """Return the events of a device with their rows and their lines of the configuration."""
    placed = rows([(event.start, event.end) for event in events])
    return [
        dataclasses.replace(event, lane=number, row=row, line=capture.line(event.operation), start=event.start - begin)
        for row, event in zip(placed, events, strict=True)
    ]


def _clocks(by_rank: Mapping[int, Sequence[Event]]) -> tuple[dict[int, float], list[str]]:
    """Return the start of each process's picture on its own clock, and a note on how it was chosen."""
    steps = [{event.step for event in events if event.step is not None} for events in by_rank.values()]
    first = min(set.intersection(*steps), default=None) if len(by_rank) > 1 else None
    begins = {
        rank: next(event.start for event in events if first in (None, event.step)) for rank, events in by_rank.items()
    }
    if len(by_rank) == 1:
        return begins, []
    if first is None:
        return begins, ["The processes captured no step in common: each is drawn from its own first operation on."]
    note = (
        f"Processes have separate clocks: they are aligned where each begins step {first}, so waits between processes "
        "before that are not seen."
    )
    return begins, [note]


def _windows(bars: Sequence[Event]) -> tuple[Window, ...]:
    by_step: dict[int, list[Event]] = {}
    for bar in bars:
        if bar.step is not None:
            by_step.setdefault(bar.step, []).append(bar)
    return tuple(
        Window(step, min(bar.start for bar in by_step[step]), max(bar.end for bar in by_step[step]))
        for step in sorted(by_step)
    )


def _about(found: Sequence[Capture], lanes: int) -> tuple[str, ...]:
    first = found[0]
    kind = first.metadata.get("kind", "")
    devices = times(lanes, "device") + (f" of {kind}" if kind else "")
    processes = f"{len(found)} processes" if first.processes > 1 else "one process"
    jax = first.read.jax or first.metadata.get("jax", "")
    return (devices, processes, *([f"captured by JAX {jax}"] if jax else []))


def _notes(found: Sequence[Capture], by_rank: Mapping[int, Sequence[Event]]) -> list[str]:
    notes = []
    missing = sorted(set(range(found[0].processes)) - set(by_rank))
    if missing:
        ranks = ", ".join(map(str, missing))
        notes.append(f"Of {found[0].processes} processes, the captures of {ranks} are not in this folder.")
    if any(event.device is None for events in by_rank.values() for event in events):
        notes.append("This capture does not tell devices apart: there is a lane for each thread that computed.")
    if not any(event.step is not None for events in by_rank.values() for event in events):
        notes.append("This capture marks no step.")
    if not any(capture.metadata for capture in found):
        notes.append("jshard did not make this capture, so lines of the configuration are not known.")
    return notes
