"""How the processes of a run stand, from their logs: a row for each, and why one of them is a straggler."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from jshard.printing.units import perplexity
from jshard.training.log_reader import Logs, Rank

LATEST = 20  # steps that speed is told of
BEHIND = 20  # steps: the loop sends out at most 16 that are not done
SILENT = 10.0  # seconds without a line, or ten steps where these are longer
SLOW = 2.0  # times as late as the process in the middle
MATTERS = 0.25  # part of a step that the others must wait for it


@dataclasses.dataclass(frozen=True)
class Standing:
    """One rank. None where nothing is known; `seen` is seconds ago, `why` what makes it a straggler."""

    rank: int
    host: str = ""
    pid: int | None = None
    state: str = "no log"
    step: int | None = None
    steps: int | None = None  # how many there will be
    steps_per_second: float | None = None
    loss: float | str | None = None
    perplexity: float | None = None
    tokens_per_second: float | None = None
    share_of_peak: float | None = None
    rss: int | None = None
    device_memory: int | None = None
    seen: float | None = None
    why: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.state.startswith("ended")


def standings(logs: Logs, now: float) -> list[Standing]:
    """Make a row for each rank, those without a file too. `now` is the wall clock's time."""
    pace = {number: _Pace.of(rank) for number, rank in logs.ranks.items()}
    rows = [_row(rank, pace[number], now) for number, rank in sorted(logs.ranks.items())]
    rows = [dataclasses.replace(row, why=tuple(_why(row, rows, pace))) for row in rows]
    rows += [Standing(rank, why=("no log: it has not begun, or its file is elsewhere",)) for rank in logs.missing]
    return sorted(rows, key=lambda row: row.rank)


@dataclasses.dataclass(frozen=True)
class _Pace:
    """What the latest steps took: seconds between them, and seconds of each that the process waited for its data."""

    step: float | None
    fed: float

    @classmethod
    def of(cls, rank: Rank) -> _Pace:
        compiled = len(rank.of("compiled")[:1])  # as many of the first steps took their time for that
        steady = rank.of("step")[compiled:][-LATEST:]
        return cls(_mean(steady, "seconds"), _mean(steady, "fed")) if steady else cls(None, 0.0)


def _mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    """Average, as steps are sent out by several and then waited for: the middle one of them may have taken no time."""
    return statistics.fmean(float(line[key]) if isinstance(line.get(key), (int, float)) else 0.0 for line in lines)


def _row(rank: Rank, pace: _Pace, now: float) -> Standing:
    begin, steps = rank.begin, rank.of("step")
    here = [line for line in rank.lines if line["attempt"] == rank.attempt]
    last: dict[str, Any] = max(here, key=lambda line: (line["what"] == "ended", line["mono"]), default={})
    losses = [line["loss"] for line in steps if line.get("loss") is not None]
    latest = steps[-1] if steps else {}
    tokens, at_peak, loss = begin.get("tokens"), latest.get("seconds_at_peak"), losses[-1] if losses else None
    return Standing(
        rank=rank.rank,
        host=str(begin.get("host", "")),
        pid=begin.get("pid"),
        state=_state(last),
        step=latest.get("step", last.get("step")),
        steps=begin.get("steps"),
        steps_per_second=1 / pace.step if pace.step else None,
        loss=loss,
        perplexity=perplexity(loss) if begin.get("likelihood") and isinstance(loss, float) else None,
        tokens_per_second=tokens / pace.step if tokens and pace.step else None,
        share_of_peak=at_peak / pace.step if at_peak and pace.step else None,
        rss=latest.get("rss"),
        device_memory=latest.get("device_memory"),
        seen=max(0.0, now - last["time"] - rank.jumped) if last else None,
    )


def _state(last: dict[str, Any]) -> str:
    match last.get("what"):
        case "ended":
            return f"ended: {last.get('how', '')}"
        case "begin" | "program" | "collective":
            return "compiling"
        case "saving":
            return "saving"
        case "waits":
            return f"waits for step {last['step']}"
        case None:
            return "has written nothing"
        case _:
            return "running"


def _why(row: Standing, rows: Sequence[Standing], pace: dict[int, _Pace]) -> Iterator[str]:
    if row.is_over:
        if row.state != "ended: finished" and any(other.state == "ended: finished" for other in rows):
            yield "ended before the others"
        return
    mine = pace[row.rank]
    silent = max(SILENT, 10 * (mine.step or 0.0))
    if row.seen is not None and row.seen > silent and row.state != "compiling":
        yield f"silent for {row.seen:.0f} s"
    others = [each for rank, each in pace.items() if rank != row.rank and each.step]
    if mine.step and others:
        steps, feds = [each.step or 0.0 for each in others], [each.fed for each in others]
        if is_slow(mine.step, steps, mine.step):
            yield f"slow: {mine.step / statistics.median(steps):.1f}x the median step of the others"
        if is_slow(mine.fed, feds, mine.step):
            yield f"slow: waits {mine.fed:.2f} s of each step for its data, the others {statistics.median(feds):.2f} s"
    furthest = max(other.step or 0 for other in rows)
    if furthest - (row.step or 0) > BEHIND:
        yield f"{furthest - (row.step or 0)} steps behind"


def is_slow(late: float, others: Sequence[float], took: float) -> bool:
    """Whether who is `late` seconds in each step of `took` holds up the others, which are so late."""
    middle = statistics.median(others)
    return late > 0 and late >= SLOW * middle and late - middle >= MATTERS * took
