"""`jshard launch`: a program in several processes, on this machine or on several hosts."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from jshard.errors import JShardError, nearest
from jshard.launch.cluster_env import Membership, found
from jshard.launch.supervisor import Supervisor, local

HOW = """
The program is a command of jshard (train configs/digits.yaml steps=20), a script (train.py --rate 3) or a module
(-m package.train). With -n, all processes run on this machine. With --coordinator, this is one process among several
hosts; Slurm, Open MPI, Kubernetes, Cloud TPU, or JAX_NUM_PROCESSES and JAX_PROCESS_ID give its number without options.
"""
COMMANDS = ("train", "resume", "generate", "trace", "verify", "bench")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard launch [-n 4] [--restarts 3] program [arguments ...]"
    parser.epilog = HOW
    parser.add_argument("-n", type=int, metavar="4", dest="count", help="the number of processes on this machine")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="the address of process 0")
    parser.add_argument("--processes", type=int, metavar="16", help="the number of processes on all hosts")
    parser.add_argument("--process-id", type=int, metavar="3", help="the number of this process, from 0")
    parser.add_argument("--restarts", type=int, default=0, metavar="3", help="the number of restarts after a failure")
    parser.add_argument(
        "--grace", type=float, default=30, metavar="30", help="seconds for processes to save and end after a SIGTERM"
    )


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words of `launch` from the program, which begins at `-m` or at the first word without a dash."""
    at = words.index("launch") + 1
    while at < len(words) and words[at] != "-m" and words[at].startswith("-"):
        has_value = "=" in words[at] or words[at] in ("-h", "--help") or (words[at][:2] == "-n" and words[at] != "-n")
        at += 1 if has_value else 2
    return words[:at], words[at:]


def run(chosen: argparse.Namespace) -> int:
    command = command_of(chosen.words, chosen.count or 4)
    alone = [] if chosen.count is not None else [member(chosen)]
    if chosen.count is not None and chosen.count < 1:
        raise JShardError(f"jshard launch can't start {chosen.count} processes", hint="type: jshard launch -n 4")
    bar = None
    if sys.stdout.isatty():
        from jshard.training.telemetry.progress import LaunchBar

        bar = LaunchBar()
    memberships = lambda: alone or local(chosen.count)
    try:
        return Supervisor(command, memberships, restarts=chosen.restarts, grace=chosen.grace, bar=bar).run()
    finally:
        if bar is not None:
            bar.stop()


def member(chosen: argparse.Namespace) -> Membership:
    """Return the membership of the single process on this host."""
    options = {"--coordinator": chosen.coordinator, "--processes": chosen.processes, "--process-id": chosen.process_id}
    missing = [name for name, value in options.items() if value is None]
    if len(missing) == len(options):
        membership = found()
        if membership is None:
            raise JShardError(
                "jshard launch does not know how many processes to start",
                hint="type: jshard launch -n 4, or --coordinator host:port --processes 16 --process-id 3 on each host",
            )
        return membership
    if missing:
        raise JShardError(
            f"jshard launch has no {' and no '.join(missing)}",
            hint="type: jshard launch --coordinator host:port --processes 16 --process-id 3",
        )
    return Membership(chosen.coordinator, chosen.processes, chosen.process_id, "jshard launch")


def command_of(words: list[str], count: int = 4) -> list[str]:
    """Return the command to run in each of `count` processes."""
    if not words or words == ["-m"]:
        raise JShardError(
            "jshard launch names no program", hint="type: jshard launch -n 4 train configs/digits.yaml, or a script"
        )
    first = words[0]
    if re.fullmatch(r"python[\d.]*", Path(first).name) and words[1:]:
        raise JShardError(
            f'jshard launch adds "{first}" by itself',
            hint=f"type: jshard launch -n {count} {shlex.join(words[1:])}",
        )
    if first in COMMANDS:
        return [sys.executable, "-m", "jshard", *words]
    if first == "-m" or Path(first).is_file():
        return [sys.executable, *words]
    if first.endswith(".py"):
        raise JShardError(f'there is no file "{first}" to launch', hint="start in the folder of the file")
    close = nearest(first, COMMANDS)
    raise JShardError(
        f'"{first}" is neither a script nor a command for jshard launch',
        hint=f"type: jshard launch -n 4 {close or 'train configs/digits.yaml'}",
    )
