"""The events of a capture: the operation, its device, its time, its step and its signal."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jshard.inspect.timeline.programs import PICO, Mark, Operation, Plane, Programs, planes
from jshard.programs.provenance import causes

NOT_NAMED = Operation()
DEVICE = re.compile(r"/device:(?:TPU|GPU|\w+):(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A run of an operation on a device. Times are nanoseconds of the capture's own clock, or from the start of a page."""

    device: int | None  # the device's number in its process; None where the capture does not tell
    thread: str
    op: str
    program: str
    operation: Operation
    step: int | None
    start: float
    duration: float
    lane: int = 0  # on a page; and the row in that lane
    row: int = 0
    line: str = ""  # configs/mlp.yaml:4

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclasses.dataclass(frozen=True)
class FileEvents:
    """All events of a file; `jax` is the version that wrote it."""

    events: tuple[Event, ...]
    jax: str


def read(file: Path) -> FileEvents:
    """Read the operations of compiled programs in an `xplane.pb`, by time. It leaves out the host's work to start them."""
    found = planes(file)
    programs, steps = Programs(found), _Steps(found)
    marks = [(plane, line, mark, device) for plane in found for line, mark, device in _operations(plane)]
    marks.sort(key=lambda each: (each[2].start, -each[2].duration))
    begin = min((mark.start for _, _, mark, _ in marks), default=0)
    told = [(_ProgramRun.of(mark), _instruction(mark)) for _, _, mark, _ in marks]
    seen: dict[_ProgramRun, set[str]] = collections.defaultdict(set)
    for run, instruction in told:
        seen[run].add(instruction)
    ran = {run: programs.that_ran(run.number, run.program, instructions) for run, instructions in seen.items()}
    events = []
    for (plane, line, mark, device), (run, instruction) in zip(marks, told, strict=True):
        op, operation = ran[run].operation(instruction, mark.name)
        if operation is None:
            stack = _text(mark, "tf_op").rstrip(":")
            operation = Operation(_text(mark, "hlo_category"), causes(stack)) if stack else NOT_NAMED
        start, duration = (mark.start - begin) / PICO, mark.duration / PICO
        events.append(Event(device, line, op, run.program, operation, steps.of(plane, mark), start, duration))
    jax = next((str(plane.stats["jax_version"]) for plane in found if "jax_version" in plane.stats), "")
    return FileEvents(tuple(events), jax)


def _operations(plane: Plane) -> Iterator[tuple[str, Mark, int | None]]:
    """Yield the line, the event and the device of each operation. Accelerators have their own planes, with
    lines for operations or streams. CPU devices share the host's threads, and each event names its device."""
    device = DEVICE.search(plane.name)
    for line, marks in plane.lines():
        if device is None:
            for mark in marks:
                if "hlo_op" in mark.stats:
                    ordinal = mark.stats.get("device_ordinal")
                    yield line, mark, ordinal if isinstance(ordinal, int) else None
        elif line.endswith("XLA Ops") or line.startswith("Stream"):
            for mark in marks:
                yield line, mark, int(device[1])


def _text(mark: Mark, key: str) -> str:
    value = mark.stats.get(key, "")
    return value if isinstance(value, str) else ""


def _instruction(mark: Mark) -> str:
    """Return the name of an instruction; a TPU may give its full text."""
    if named := _text(mark, "hlo_op"):
        return named
    found = re.match(r"%?([\w.\-]+) = ", mark.name)
    return found[1] if found else mark.name


class _ProgramRun(NamedTuple):
    """A run of a program, as its operations describe it."""

    number: object  # of the program
    program: str
    run: object

    @classmethod
    def of(cls, mark: Mark) -> _ProgramRun:
        said = mark.stats
        return cls(said.get("program_id"), _text(mark, "hlo_module") or _text(mark, "program_name"), said.get("run_id"))


class _Steps:
    """The step of each operation. The training loop marks each step on the host where it starts a program. The run has
    a number, which its later operations carry. A program of a single device starts without a number: then starts and
    increasing numbers are matched in order. If their counts differ, an operation belongs to the step started last."""

    def __init__(self, found: Sequence[Plane]):
        self.of_run: dict[object, int | None] = {}
        self.begun: list[tuple[int, int]] = []
        self.windows: dict[str, list[tuple[int, int, object]]] = {}  # the runs of each device with a line for them
        starts: list[tuple[int, int | None]] = []
        seen: set[int] = set()
        for plane in found:
            for line, marks in plane.lines():
                if DEVICE.search(plane.name) is None:
                    starts += self._look(marks)
                elif line == "XLA Modules":
                    runs = sorted(marks, key=lambda mark: mark.start)
                    self.windows[plane.name] = [(mark.start, mark.end, mark.stats.get("run_id")) for mark in runs]
                seen |= {run for mark in marks if isinstance(run := mark.stats.get("run_id"), int)}
        self.begun.sort()
        unseen = sorted(seen - self.of_run.keys())
        if len(unseen) == len(starts):
            self.of_run |= {run: step for run, (_, step) in zip(unseen, sorted(starts), strict=True)}

    def _look(self, marks: list[Mark]) -> list[tuple[int, int | None]]:
        """Read a thread; return the starts of single-device programs, each with its step."""
        steps = [(mark, number) for mark in marks if isinstance(number := mark.stats.get("step_num"), int)]
        self.begun += [(mark.start, number) for mark, number in steps]
        if not steps:
            return []

        def around(mark: Mark) -> int | None:
            return next((number for step, number in steps if _inside(mark, step)), None)

        numbered = [mark for mark in marks if "run_id" in mark.stats and "device_ordinal" not in mark.stats]
        self.of_run |= {mark.stats["run_id"]: around(mark) for mark in numbered}
        alone = [mark for mark in marks if mark.name.endswith("::ExecuteHelperOnSingleDevice")]
        return [(mark.start, around(mark)) for mark in alone if not any(_inside(mark, other) for other in numbered)]

    def of(self, plane: Plane, mark: Mark) -> int | None:
        run = mark.stats.get("run_id")
        if run is None:
            windows = self.windows.get(plane.name, [])
            place = bisect.bisect_right(windows, mark.start, key=lambda window: window[0]) - 1
            run = windows[place][2] if place >= 0 and mark.start < windows[place][1] else None
        if run in self.of_run:
            return self.of_run[run]
        place = bisect.bisect_right(self.begun, mark.start, key=lambda each: each[0]) - 1
        return self.begun[place][1] if place >= 0 else None


def _inside(mark: Mark, other: Mark) -> bool:
    return other.start <= mark.start <= other.end
