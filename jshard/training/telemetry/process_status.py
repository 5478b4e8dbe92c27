"""The status of a run's processes, from their logs: a row for each, with reasons for stragglers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from jshard.printing.units import perplexity
from jshard.training.log_reader import Logs, Rank

LATEST = 20  # steps for the mean of the speed
BEHIND = 20  # steps behind the others; the loop dispatches at most 16 unfinished steps
SILENT = 10.0  # seconds without a line, or the time of ten steps if that is longer
SLOW = 2.0  # times the median of the others
MATTERS = 0.25  # of a step, the least time that the others wait for a straggler


@dataclasses.dataclass(frozen=True)
class Standing:
    """The status of a rank; None means unknown. `seen` is the age of its last line in seconds, and
    `why` lists the reasons if it is a straggler."""

    rank: int
    host: str = ""
    pid: int | None = None
    state: str = "no log"
    step: int | None = None
    steps: int | None = None  # of the whole run
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
    """Return a row for each rank, with or without a log, at the wall clock's time `now`."""
    pace = {number: _Pace.of(rank) for number, rank in logs.ranks.items()}
    rows = [_row(rank, pace[number], now) for number, rank in sorted(logs.ranks.items())]
    rows = [dataclasses.replace(row, why=tuple(_why(row, rows, pace))) for row in rows]
    rows += [Standing(rank, why=("no log: it has not begun, or its file is elsewhere",)) for rank in logs.missing]
    return sorted(rows, key=lambda row: row.rank)


@dataclasses.dataclass(frozen=True)
class _Pace:
    """The mean seconds of the latest steps, and of each step's wait for data."""

    step: float | None
    fed: float

    @classmethod
    def of(cls, rank: Rank) -> _Pace:
        compiled = len(rank.of("compiled")[:1])  # the first step includes the compilation
        steady = rank.of("step")[compiled:][-LATEST:]
        return cls(_mean(steady, "seconds"), _mean(steady, "fed")) if steady else cls(None, 0.0)


def _mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    """Return the mean of a figure. The median would mislead: the loop dispatches several steps and
    then waits, so that a typical step may take no time."""
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
    words = {
        "ended": f"ended: {last.get('how', '')}",
        "saving": "saving",
        "waits": f"waits for step {last.get('step')}",
    }
    words |= dict.fromkeys(["begin", "program", "collective"], "compiling")
    return words.get(str(last["what"]), "running") if last else "has written nothing"


def _why(row: Standing, rows: Sequence[Standing], pace: dict[int, _Pace]) -> Iterator[str]:
    if row.is_over:
        if row.state != "ended: finished" and any(other.state == "ended: finished" for other in rows):
            yield "ended before the others"
        return
    mine = pace[row.rank]
    silent = max(SILENT, 10 * (mine.step or 0.0))
    if row.seen is not None and row.seen > silent and row.state != "compiling":
        yield f"silent for {row.seen:.0f} s"
    others = [other for rank, other in pace.items() if rank != row.rank and other.step]
    if mine.step and others:
        steps, feds = [other.step or 0.0 for other in others], [other.fed for other in others]
        if is_slow(mine.step, steps, mine.step):
            yield f"slow: {mine.step / statistics.median(steps):.1f}x the median step of the others"
        if is_slow(mine.fed, feds, mine.step):
            yield f"slow: waits {mine.fed:.2f} s of each step for its data, the others {statistics.median(feds):.2f} s"
    furthest = max(other.step or 0 for other in rows)
    if furthest - (row.step or 0) > BEHIND:
        yield f"{furthest - (row.step or 0)} steps behind"


def is_slow(late: float, others: Sequence[float], took: float) -> bool:
    """Return True if a delay of `late` seconds in a step of `took` holds up the others, given their delays."""
    middle = statistics.median(others)
    return late > 0 and late >= SLOW * middle and late - middle >= MATTERS * took
