"""The merged logs of all processes of a run, read without JAX; damage to a file is reported, not raised."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.errors import JShardError
from jshard.runs.names import CONFIGURATION, LOG

Line = Mapping[str, Any]
HEAD, TAIL = 64 * 1024, 1024 * 1024  # bytes read of a long file: its start, and its latest lines
JUMP = 1.0  # seconds; a larger difference between wall and monotonic clock is a jump of the wall clock


def path_of(folder: Path, rank: int) -> Path:
    """Return the path of a process's log."""
    return folder / f"rank-{rank:04}.jsonl"


def folder_of(run: str | Path) -> Path:
    """Find the folder of a run's logs: `run` itself, its `log` folder, or the folder that its configuration names."""
    run = Path(run)
    for folder in (run, run / LOG, _named(run)):
        if folder is not None and any(folder.glob("rank-*.jsonl")):
            return folder
    if run.is_dir():
        raise JShardError(f"{run} holds no log of a run", hint="train with log=true")
    raise JShardError(f"there is no folder {run}", hint="type: jshard top and the output folder of a run")


def _named(run: Path) -> Path | None:
    """Return the folder of logs named in the run's configuration, if any."""
    if not (run / CONFIGURATION).is_file():
        return None
    from jshard.signals.config import load_configuration
    from jshard.training.settings import Settings

    folder = Settings(load_configuration(str(run / CONFIGURATION))).table("log").get("folder")
    return None if folder is None else Path(folder)


@dataclasses.dataclass
class Rank:
    """The log of a process; each `read` adds the new lines to `lines`. A line has its `rank`, its
    `attempt`, and `time`, the wall clock's time corrected by the monotonic clock."""

    path: Path
    rank: int
    full: bool = True  # False: read only the start and the end of a long file
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    offset: int = 0
    attempt: int = 1
    zero: float | None = None  # wall minus monotonic clock at the begin of the attempt
    half: bytes = b""
    jumped: float = 0.0

    def read(self) -> list[dict[str, Any]]:
        """Read and return the lines added since the last call."""
        size = self.path.stat().st_size
        if size < self.offset:  # another run has begun in this folder
            self.__init__(self.path, self.rank, self.full)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if not self.full and self.offset == 0 and size > HEAD + TAIL:
                begin = file.read(HEAD).rpartition(b"\n")[0] + b"\n"
                file.seek(size - TAIL)
                read = begin + file.read().partition(b"\n")[2]
            else:
                read = file.read()
            self.offset = file.tell()
        *done, self.half = (self.half + read).split(b"\n")
        new = [line for text in done if (line := self._line(text)) is not None]
        self.lines += new
        return new

    def _line(self, text: bytes) -> dict[str, Any] | None:
        if not text.strip():
            return None
        try:
            line = json.loads(text)
            what, wall, mono = line["what"], float(line["wall"]), float(line["mono"])
        except (ValueError, TypeError, KeyError):
            self._fault(f"{self.path.name} has a line that was cut off or changed; it is left out")
            return None
        if what == "begin":
            self.attempt += self.zero is not None
            self.zero, self.jumped = wall - mono, 0.0
        zero = wall - mono if self.zero is None else self.zero
        if abs(wall - mono - zero - self.jumped) > JUMP:
            self.jumped = wall - mono - zero
            self._fault(f"the clock of rank {self.rank} jumped by {self.jumped:+,.0f} s; its times are corrected")
        line.update(rank=self.rank, attempt=self.attempt, time=mono + zero, wall=wall, mono=mono)
        if not isinstance(line.get("step"), int):
            line["step"] = self.lines[-1]["step"] if self.lines else 0
        return line

    def _fault(self, says: str) -> None:
        if says not in self.faults:
            self.faults.append(says)

    @property
    def cut(self) -> list[str]:
        """The faults of the file, with a half-written last line."""
        half = f"the last line of {self.path.name} is incomplete: its process was killed, or is writing"
        return [*self.faults, half] if self.half else self.faults

    def of(self, *what: str) -> list[dict[str, Any]]:
        """Return the lines of these kinds in the last attempt, by time."""
        lines = [line for line in self.lines if line["attempt"] == self.attempt and line["what"] in what]
        return sorted(lines, key=lambda line: line["mono"])

    @property
    def begin(self) -> Mapping[str, Any]:
        """The first line of the attempt, a description of the process; empty if it is lost."""
        return next(reversed(self.of("begin")), {})


@dataclasses.dataclass
class Logs:
    """The logs of a run's processes; `read` adds new lines, and `lines` merges all ranks."""

    folder: Path
    full: bool = True
    ranks: dict[int, Rank] = dataclasses.field(default_factory=dict)

    def read(self) -> Logs:
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            if (found := re.fullmatch(r"rank-(\d+)\.jsonl", path.name)) is not None:
                self.ranks.setdefault(int(found[1]), Rank(path, int(found[1]), self.full)).read()
        return self

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of all ranks, by attempt, then step, then time."""
        lines = (line for rank in self.ranks.values() for line in rank.lines)
        return sorted(lines, key=lambda line: (line["attempt"], line["step"], line["time"], line["rank"]))

    @property
    def missing(self) -> list[int]:
        """The ranks without a file, by the process count in the other files."""
        count = max((_as_count(rank.begin.get("of")) for rank in self.ranks.values()), default=0)
        return [rank for rank in range(count) if rank not in self.ranks]

    @property
    def faults(self) -> list[str]:
        """The faults of all files, a sentence each."""
        faults = [fault for rank in sorted(self.ranks) for fault in self.ranks[rank].cut]
        return faults + [f"rank {rank} has no {path_of(self.folder, rank).name}" for rank in self.missing]


def read(run: str | Path) -> Logs:
    """Read the logs of all processes of a run."""
    return Logs(folder_of(run)).read()


def _as_count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1_000_000 else 0
