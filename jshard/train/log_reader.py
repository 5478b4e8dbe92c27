"""The logs of all processes of a run, read as one. Needs no JAX, and never stops at a file that is damaged."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jshard.errors import JShardError
from jshard.run_names import CONFIGURATION, LOG

Line = Mapping[str, Any]
HEAD, TAIL = 64 * 1024, 1024 * 1024  # of a long file, what says how it began and what it did last
JUMP = 1.0  # seconds by which a clock that runs well does not differ from what has passed


def path_of(folder: Path, rank: int) -> Path:
    """The file of a process."""
    return folder / f"rank-{rank:04}.jsonl"


def folder_of(run: str | Path) -> Path:
    """The folder of logs of a run: of its output folder, or itself."""
    run = Path(run)
    for folder in (run, run / LOG, _named(run)):
        if folder is not None and any(folder.glob("rank-*.jsonl")):
            return folder
    why = "it has no log" if run.is_dir() else "there is no such folder"
    hint = "train with log=true" if run.is_dir() else "type: jshard top and the output folder of a run"
    raise JShardError(f"{run} holds no log of what ran: {why}", hint=hint)


def _named(run: Path) -> Path | None:
    """The folder that the run's configuration names."""
    if not (run / CONFIGURATION).is_file():
        return None
    from jshard.signals.config import load_configuration

    said = load_configuration(str(run / CONFIGURATION)).train.get("log")
    return Path(said["folder"]) if isinstance(said, Mapping) and "folder" in said else None


@dataclasses.dataclass
class Rank:
    """One file, read on each time that it is asked for: `lines` holds what was there, in the order of the clock that never
    jumps, each with its `rank`, the `attempt` that it belongs to, and `time`, the wall clock's time put right."""

    path: Path
    rank: int
    whole: bool = True  # False: of a long file only its begin and its end
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    offset: int = 0
    attempt: int = 0
    zero: float | None = None  # wall minus monotonic clock at the begin of the attempt
    half: bytes = b""
    jumped: float = 0.0

    def read(self) -> list[dict[str, Any]]:
        """What is new since the last time."""
        size = self.path.stat().st_size
        if size < self.offset:  # another run has begun in this folder
            self.__init__(self.path, self.rank, self.whole)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if not self.whole and self.offset == 0 and size > HEAD + TAIL:
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
            self.attempt += 1
            self.zero, self.jumped = wall - mono, 0.0
        zero = wall - mono if self.zero is None else self.zero
        if abs(wall - mono - zero - self.jumped) > JUMP:
            self.jumped = wall - mono - zero
            self._fault(f"the clock of rank {self.rank} jumped by {self.jumped:+,.0f} s; its times are put right")
        line.update(rank=self.rank, attempt=max(self.attempt, 1), time=mono + zero, wall=wall, mono=mono)
        if not isinstance(line.get("step"), int):
            line["step"] = self.lines[-1]["step"] if self.lines else 0
        return line

    def _fault(self, says: str) -> None:
        if says not in self.faults:
            self.faults.append(says)

    @property
    def cut(self) -> list[str]:
        """What is wrong with the file as it stands."""
        half = (
            [f"the last line of {self.path.name} is half: its process was killed, or is writing"] if self.half else []
        )
        return [*self.faults, *half]

    def of(self, *what: str) -> list[dict[str, Any]]:
        """The lines of this kind in the last attempt, in their order of time."""
        return sorted(
            (line for line in self.lines if line["attempt"] == self.attempt_read and line["what"] in what), key=_mono
        )

    @property
    def attempt_read(self) -> int:
        return max(self.attempt, 1)

    @property
    def begin(self) -> Mapping[str, Any]:
        """What the process said of itself; empty where that line is gone."""
        said = self.of("begin")
        return said[-1] if said else {}


@dataclasses.dataclass
class Logs:
    """The files of a run. `read()` takes in what is new; `lines` are those of all ranks as one."""

    folder: Path
    whole: bool = True
    ranks: dict[int, Rank] = dataclasses.field(default_factory=dict)

    def read(self) -> Logs:
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            if (found := re.fullmatch(r"rank-(\d+)\.jsonl", path.name)) is not None:
                self.ranks.setdefault(int(found[1]), Rank(path, int(found[1]), self.whole)).read()
        return self

    @property
    def lines(self) -> list[dict[str, Any]]:
        """By attempt, by step, and within a step by time."""
        return merged(line for rank in self.ranks.values() for line in rank.lines)

    @property
    def missing(self) -> list[int]:
        """Ranks that the others know of, and that have no file."""
        count = max((_whole(rank.begin.get("of")) for rank in self.ranks.values()), default=0)
        return [rank for rank in range(count) if rank not in self.ranks]

    @property
    def faults(self) -> list[str]:
        """What is to be known of the files, a sentence each."""
        told = [fault for rank in sorted(self.ranks) for fault in self.ranks[rank].cut]
        return told + [f"rank {rank} has no {path_of(self.folder, rank).name}" for rank in self.missing]


def read(run: str | Path) -> Logs:
    """All that the processes of a run have written, once."""
    return Logs(folder_of(run)).read()


def merged(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order in which it happened: an attempt after the other, a step after the other, and in a step by time."""
    return sorted(lines, key=lambda line: (line["attempt"], line["step"], line["time"], line["rank"]))


def _mono(line: Mapping[str, Any]) -> float:
    return line["mono"]


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1_000_000 else 0
