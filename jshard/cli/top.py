"""`jshard top`: the processes of a run, a row each, from their logs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING

from jshard.printing.units import duration, size

if TYPE_CHECKING:
    from rich.table import Table

    from jshard.training.telemetry.process_status import Standing

SCHEMA = "jshard.top/1"
EVERY = 1.0  # seconds between two tables
WIDE = 200  # columns without a terminal
# Columns for a run on tokens: heading -> field of a row, and its format.
OF_TOKENS = {
    "perplexity": ("perplexity", "{:,.4g}".format), "tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "of peak": ("share_of_peak", "{:.1%}".format),
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard top [-h] RUN [--once] [--json]"
    parser.epilog = "RUN is the output folder of a run trained with log=true; the run may have ended."
    parser.add_argument("run", metavar="RUN", help="the output folder of a run, or its folder of logs")
    parser.add_argument(
        "--once", action="store_true", help="print one table and end; the default if stdout is no terminal"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, its schema named in it")


def run(chosen: argparse.Namespace) -> int:
    """Draw the table; on a terminal redraw it each second until all processes have ended, or Ctrl-C."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from jshard.training.log_reader import Logs, folder_of
    from jshard.training.telemetry.process_status import standings

    name, logs, is_terminal = chosen.run, Logs(folder_of(chosen.run), full=False), sys.stdout.isatty()
    if chosen.json:
        ranks = [dataclasses.asdict(row) for row in standings(logs.read(), time.time())]
        print(json.dumps({"schema": SCHEMA, "run": name, "ranks": ranks, "notes": logs.faults}, indent=2))
        return 0

    def look() -> tuple[bool, Group]:
        """Read new lines of the logs; return whether all processes have ended, and the table."""
        rows = standings(logs.read(), time.time())
        return all(row.is_over for row in rows), Group(table(name, rows), *map(Text, logs.faults))

    if chosen.once or not is_terminal:
        Console(highlight=False, width=None if is_terminal else WIDE).print(look()[1])
        return 0
    with Live(auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        is_over = False
        while not is_over:
            is_over, drawn = look()
            live.update(drawn, refresh=True)
            time.sleep(0 if is_over else EVERY)
    return 0


def table(name: str, rows: list[Standing]) -> Table:
    """Return the table: stragglers in yellow, with the reason in the last column."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(name), box=box.SIMPLE, title_justify="left", pad_edge=False)
    known = {heading: each for heading, each in OF_TOKENS.items() if any(getattr(row, each[0]) for row in rows)}
    headings = ("rank", "host", "step", "steps/s", "loss", *known, "memory", "on device", "seen", "state")
    for heading in headings:
        drawn.add_column(heading, justify="left" if heading in ("host", "state") else "right")
    for row in rows:
        of = f"/{row.steps}" if row.steps is not None else ""
        drawn.add_row(
            str(row.rank),
            Text(row.host or "-"),
            "-" if row.step is None else f"{row.step}{of}",
            "-" if row.steps_per_second is None else f"{row.steps_per_second:,.1f}",
            f"{row.loss:.4f}" if isinstance(row.loss, float) else str(row.loss or "-"),
            *("-" if (figure := getattr(row, field)) is None else form(figure) for field, form in known.values()),
            "-" if row.rss is None else size(row.rss),
            "-" if row.device_memory is None else size(row.device_memory),
            "-" if row.seen is None else f"{duration(row.seen)} ago",
            Text("; ".join((row.state, *row.why))),
            style="yellow" if row.why else None,
        )
    return drawn
