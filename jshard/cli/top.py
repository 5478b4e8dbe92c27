"""`jshard top`: the processes of a run, a row each, from the logs that they write."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING

from jshard.units import size

if TYPE_CHECKING:
    from rich.table import Table

    from jshard.train.log_reader import Logs
    from jshard.train.process_status import Standing

SCHEMA = "jshard.top/1"
EVERY = 1.0  # seconds between two looks
WIDE = 200  # columns where nothing says how many there are


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard top [-h] RUN [--once] [--json]"
    parser.epilog = "RUN is the output folder of a run that was trained with log=true; it may be over."
    parser.add_argument("run", metavar="RUN", help="the output folder of a run, or its folder of logs")
    parser.add_argument(
        "--once", action="store_true", help="one table, and no more; so it is where stdout is no terminal"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, its schema named in it")


def run(chosen: argparse.Namespace) -> int:
    from jshard.train.log_reader import Logs, folder_of

    logs = Logs(folder_of(chosen.run), whole=False).read()
    if chosen.json:
        print(document(chosen.run, logs))
    elif chosen.once or not sys.stdout.isatty():
        _once(chosen.run, logs)
    else:
        _live(chosen.run, logs)
    return 0


def document(name: str, logs: Logs) -> str:
    """`{"schema": "jshard.top/1", "run": ..., "ranks": [...], "notes": [...]}`"""
    from jshard.train.process_status import standings

    ranks = [dataclasses.asdict(each) for each in standings(logs, time.time())]
    return json.dumps({"schema": SCHEMA, "run": name, "ranks": ranks, "notes": logs.faults}, indent=2)


def _once(name: str, logs: Logs) -> None:
    from rich.console import Console

    from jshard.train.process_status import standings

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for each in (table(name, standings(logs, time.time())), *logs.faults):
        console.print(each, markup=False, soft_wrap=isinstance(each, str))


def _live(name: str, logs: Logs) -> None:
    """Until all have ended, or Ctrl-C."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from jshard.train.process_status import standings

    with Live(auto_refresh=False) as live:
        while True:
            rows = standings(logs.read(), time.time())
            live.update(Group(table(name, rows), *map(Text, logs.faults)), refresh=True)
            if all(row.is_over for row in rows):
                return
            try:
                time.sleep(EVERY)
            except KeyboardInterrupt:
                return


def table(name: str, rows: list[Standing]) -> Table:
    """Stragglers in yellow, with the reason in the last column."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(name), box=box.SIMPLE, title_justify="left", pad_edge=False)
    for heading in ("rank", "host", "step", "steps/s", "loss", "memory", "on device", "seen", "state"):
        drawn.add_column(heading, justify="left" if heading in ("host", "state") else "right")
    for row in rows:
        of = f"/{row.steps}" if row.steps is not None else ""
        drawn.add_row(
            str(row.rank),
            Text(row.host or "-"),
            "-" if row.step is None else f"{row.step}{of}",
            "-" if row.steps_per_second is None else f"{row.steps_per_second:,.1f}",
            f"{row.loss:.4f}" if isinstance(row.loss, float) else str(row.loss or "-"),
            "-" if row.rss is None else size(row.rss),
            "-" if row.device_memory is None else size(row.device_memory),
            "-" if row.seen is None else _ago(row.seen),
            Text("; ".join((row.state, *row.why))),
            style="yellow" if row.why else None,
        )
    return drawn


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"
