"""What `jshard timeline` draws: the events of all processes of a run on one clock."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from jshard.errors import JShardError
from jshard.inspect.report.shell import framed, write
from jshard.inspect.report.words import times
from jshard.inspect.timeline.capture import Capture, captures
from jshard.inspect.timeline.event import Event
from jshard.inspect.timeline.lanes import Bar, Drawing, Window, lane, rows
from jshard.inspect.timeline.page import page
from jshard.inspect.timeline.picture import drawn

SCHEMA = "jshard.timeline/1"


@dataclasses.dataclass(frozen=True, repr=False)
class Timeline(Drawing):
    """Every event of a capture as a bar, as a page, a picture or JSON."""

    def html(self) -> str:
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page to one HTML file, which needs nothing else."""
        return write(Path(path), self.html().encode(), "the timeline", "-o timeline.html")

    def save_png(self, path: str | os.PathLike[str]) -> Path:
        """Writes the picture; needs Pillow."""
        return write(Path(path), drawn(self)[0], "the timeline", "--png timeline.png")

    def json_lines(self) -> Iterator[str]:
        """Each event as one document, the schema in the first line."""
        yield json.dumps({"schema": SCHEMA, "title": self.title, "events": len(self.bars), "notes": self.notes})
        for bar in self.bars:
            told = dataclasses.asdict(bar)
            yield json.dumps({"device": self.lanes[told.pop("lane")].name, **told})

    def __str__(self) -> str:
        steps = [window.step for window in self.steps]
        when = (
            f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}" if steps else "no marked step"
        )
        return f"{self.title}: {when}, {len(self.bars):,} operations on {times(len(self.lanes), 'device')}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return framed(self.html())


def timeline(folder: str | os.PathLike[str], step: int | None = None) -> Timeline:
    """The capture in a run's folder, or in any that JAX's profiler wrote into; of one step where one is named."""
    found = captures(Path(folder))
    by_rank = {capture.rank: _of_step(capture, step) for capture in found}
    begins, notes = _clocks(found, by_rank)
    named = {
        (capture.rank, number): (_lane_name(capture, event), capture)
        for capture in found
        for event in by_rank[capture.rank]
        for number in [_lane_key(event)]
    }
    order = sorted(named, key=lambda key: (_device_order(named[key][1], key[1]), key[0], str(key[1])))
    lanes, bars = [], []
    shifted = {key: [] for key in order}
    for capture in found:
        for event in by_rank[capture.rank]:
            shifted[capture.rank, _lane_key(event)].append(event)
    earliest = min((events[0].start - begins[rank] for rank, events in by_rank.items() if events), default=0.0)
    length = max(
        (event.end - begins[rank] - earliest for rank, events in by_rank.items() for event in events), default=0.0
    )
    for number, identity in enumerate(order):
        rank, (name, capture) = identity[0], named[identity]
        own = _bars(number, shifted[identity], begins[rank] + earliest, capture)
        bars += own
        lanes.append(lane(name, rank, own, length))
    first = found[0]
    return Timeline(
        title=first.told.get("title", str(folder)),
        about=_about(found, len(lanes)),
        lanes=tuple(lanes),
        bars=tuple(bars),
        steps=_windows(bars),
        length=length,
        notes=(*notes, *_notes(found, by_rank)),
    )


Key = int | str


def _lane_key(event: Event) -> Key:
    return event.thread if event.device is None else event.device


def _device_order(capture: Capture, key: Key) -> float:
    return capture.device(key) if isinstance(key, int) else float("inf")


def _lane_name(capture: Capture, event: Event) -> str:
    where = f" of rank {capture.rank}" if capture.processes > 1 else ""
    return f"thread {event.thread}{where}" if event.device is None else f"device {capture.device(event.device)}{where}"


def _bars(number: int, events: Sequence[Event], begin: float, capture: Capture) -> list[Bar]:
    placed, _ = rows([(event.start, event.end) for event in events])
    return [
        Bar(
            lane=number,
            row=row,
            op=event.op,
            kind=event.operation.kind,
            collective=event.operation.collective,
            signal=event.operation.signal,
            phase=event.operation.phase,
            line=capture.line(event.operation),
            program=event.program,
            step=event.step,
            start=event.start - begin,
            duration=event.duration,
        )
        for row, event in zip(placed, events, strict=True)
    ]


def _of_step(capture: Capture, step: int | None) -> list[Event]:
    events = list(capture.read.events)
    if step is None:
        return events
    chosen = [event for event in events if event.step == step]
    if not chosen:
        there = sorted({event.step for event in events if event.step is not None})
        has = (
            f"has steps {there[0]} to {there[-1]}"
            if len(there) > 1
            else f"has step {there[0]}"
            if there
            else "marks no step"
        )
        hint = f"type: --step {there[0]}" if there else "leave --step away"
        raise JShardError(f"the capture in {capture.folder} {has}, and no step {step}", hint=hint)
    return chosen


def _clocks(found: Sequence[Capture], by_rank: dict[int, list[Event]]) -> tuple[dict[int, float], list[str]]:
    """When each process's picture begins on its own clock, and how that was decided."""
    if len(found) == 1:
        return {rank: events[0].start for rank, events in by_rank.items()}, []
    steps = [{event.step for event in events if event.step is not None} for events in by_rank.values()]
    common = set.intersection(*steps)
    if not common:
        note = "The processes captured no step in common: each is drawn from its own first operation on."
        return {rank: events[0].start for rank, events in by_rank.items()}, [note]
    first = min(common)
    begins = {rank: min(event.start for event in events if event.step == first) for rank, events in by_rank.items()}
    note = (
        f"Processes have clocks of their own: they are laid beside each other where each begins step {first}, so what "
        "one waits for another before that is not seen."
    )
    return begins, [note]


def _windows(bars: Sequence[Bar]) -> tuple[Window, ...]:
    marked = sorted((bar for bar in bars if bar.step is not None), key=lambda bar: bar.step or 0)
    found = []
    for step, group in itertools.groupby(marked, key=lambda bar: bar.step):
        own = list(group)
        assert step is not None
        found.append(Window(step, min(bar.start for bar in own), max(bar.end for bar in own)))
    return tuple(found)


def _about(found: Sequence[Capture], lanes: int) -> tuple[str, ...]:
    first = found[0]
    kind = first.told.get("kind", "")
    devices = times(lanes, "device") + (f" of {kind}" if kind else "")
    processes = f"{len(found)} processes" if first.processes > 1 else "one process"
    jax = first.read.jax or first.told.get("jax", "")
    return (devices, processes, *([f"captured by JAX {jax}"] if jax else []))


def _notes(found: Sequence[Capture], by_rank: dict[int, list[Event]]) -> list[str]:
    notes = []
    missing = sorted(set(range(found[0].processes)) - set(by_rank))
    if missing:
        ranks = ", ".join(map(str, missing))
        notes.append(f"Of {found[0].processes} processes, the captures of {ranks} are not in this folder.")
    if any(event.device is None for events in by_rank.values() for event in events):
        notes.append("This capture does not tell devices apart: there is a lane for each thread that computed.")
    if not any(event.step is not None for events in by_rank.values() for event in events):
        notes.append("This capture marks no step.")
    if not any(capture.told for capture in found):
        notes.append("jshard did not make this capture, so lines of the configuration are not known.")
    return notes
