"""`jshard timeline`: a capture as an HTML page or lines of JSON."""

from __future__ import annotations

import argparse

from jshard.cli.terminal import show
from jshard.errors import JShardError

FILE = "timeline.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard timeline [-h] RUN [-o timeline.html] [--json]"
    parser.set_defaults(needs=("the folder of a run", "runs/digits"))
    parser.epilog = "RUN is the folder of a run, or a folder written by JAX's profiler."
    parser.add_argument("-o", "--output", metavar=FILE, help=f"the page to write; {FILE} unless --json is given")
    parser.add_argument("--json", action="store_true", help="print each event as a line of JSON")


def run(chosen: argparse.Namespace) -> int:
    if chosen.overrides:
        raise JShardError(
            f"jshard timeline draws a finished capture, and can't change {chosen.overrides[0]}",
            hint=f"type: jshard trace and the configuration, then jshard timeline {chosen.path}",
        )
    from jshard.inspect.timeline import timeline

    drawn = timeline(chosen.path)
    if chosen.json:
        for line in drawn.json_lines():
            print(line)
    if chosen.output or not chosen.json:
        show(f"{drawn}: {drawn.save(chosen.output or FILE)}")
    return 0
