"""The command line: a parser for each command, and what it does.

Nothing here imports JAX before a command needs it, so that `--help`, `check` and `schema` answer at once.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from jshard.cli.launch import COMMANDS, split
from jshard.cli.terminal import tell
from jshard.errors import JShardError, nearest, reason
from jshard.launch.cluster_env import found
from jshard.version import __version__

Run = Callable[[argparse.Namespace], int]
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
OVERRIDES = """
A word like steps=20 or optimizer.learning_rate=1e-3 changes a key of the experiment (jshard.train); a path whose first
word is a signal or jshard goes to that: layer1.column=tensor, jshard.mesh.data=4.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that is typed. The exit status is 2 for a mistake, in the configuration or in the words, as 1 is the
    answer of some commands: a difference, a promise that is broken, a program that does not fit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    gc.set_threshold(100_000, 10, 20)  # what is traced lives long: collections took a tenth of the time of `explain`
    try:
        try:
            importlib.import_module("jshard.runs.events")  # a mistake in JSHARD_LOG is told here
            chosen = parse(words)
            if chosen.name not in COMMANDS or found() is None:
                return chosen.command(chosen)
            from jshard.cli.rank_main import as_member

            return as_member(lambda: chosen.command(chosen))
        finally:
            sys.stdout.flush()  # a reader that has gone, or a full disk, is noticed here, and not at exit
    except JShardError as error:
        tell(str(error))
        return 2
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        _write_no_more()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        _write_no_more()
        command = " ".join(["jshard", *words[:1]])
        fault = f"what {command} prints can't be written: {reason(error)}"
        tell(str(JShardError(fault, hint="send it to another place")))
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _write_no_more() -> None:
    """Discard what is still held for stdout, or Python would fail to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """argparse, with a mistake told the way all others are told."""

    def error(self, message: str) -> NoReturn:
        raise JShardError(f"{self.prog}: {message}", hint=f"type: {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse passes over a disk that is full


def _parser() -> tuple[Parser, Collection[str]]:
    """Make the parser of all commands; return it and their names."""
    parser = Parser(
        prog="jshard",
        description="YAML says how a Flax model lies on a mesh; layers turn that into explicit collectives.",
        epilog="More about one: jshard train --help",
    )
    parser.add_argument("--version", action="version", version=f"jshard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="", required=True, dest="name")

    def command(name: str, says: str, run: Run | None = None, *, configured: bool = True) -> Parser:
        """Add a command: its arguments and its `run` are those of the module of its name, unless `run` is given."""
        added = commands.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".", epilog=OVERRIDES)
        if configured:
            added.usage = f"jshard {name} [-h] path [key=value ...]"
            added.add_argument("path", nargs="?", help="the configuration: a YAML file")
            added.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it, for this run")
        if configured and name not in ("train", "timeline"):
            says_trust = "run what the YAML names, also of modules outside of its folder, jshard, flax and optax"
            added.add_argument("--trust", action="store_true", help=says_trust)
        if run is None:
            module = importlib.import_module(f"jshard.cli.{name}")
            module.arguments(added)
            run = module.run
        added.set_defaults(command=run)
        return added

    command("train", "train the experiment, after showing what its configuration costs", train)
    command("launch", "start a program in several processes, here or on many hosts", configured=False)
    command("resume", "go on with a run from a checkpoint")
    command("generate", "go on from a text by a model that was trained")
    command("explain", "list every collective of a training step and what it holds in memory, and run none")
    command("plan", "compile a training step for devices that are not here, and say what they would do")
    command("trace", "capture what the devices do in a few steps, of an experiment or of a run that goes on")
    command("timeline", "draw a capture as an HTML page: a lane for each device, a bar for each operation")
    command("top", "show how the processes of a run stand, as it goes on or after it", configured=False)
    command("report", "write one HTML page on where everything lies and what a step costs")
    command("diff", "compare two configurations, or one at two commits, collective by collective")
    command("check", "find all mistakes of a configuration, say what it means, and hold what it promises")
    command("verify", "hold the sharded model against the same model unsharded")
    command("bench", "time the collectives and products on the devices here", configured=False)
    command("schedule", "draw and price pipeline schedules, side by side", configured=False)
    command("schema", "print the JSON Schema of a configuration, for editors", schema, configured=False).epilog = None
    command("new", "make a small project that trains: a model, data, a configuration", configured=False)
    completion = command("completion", "print a script that completes words at Tab in a shell", configured=False)
    completion.set_defaults(parser=parser)
    return parser, commands.choices


def parse(words: list[str]) -> argparse.Namespace:
    """Read the words that are typed; a mistake in them is one sentence."""
    parser, commands = _parser()
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in commands:
        close = nearest(first, commands) or "--help"
        raise JShardError(f'"{first}" is not a command of jshard', hint=f"type: jshard {close}")
    if not words:
        parser.print_help()
        raise SystemExit(2)
    words, behind = (
        split(words) if first == "launch" else (words[:2], words[2:]) if first == "completion" else (words, [])
    )
    chosen, rest = parser.parse_known_args(words)
    chosen.words = behind
    if hasattr(chosen, "overrides"):
        _check_dashes(chosen.name, rest, words)
        chosen.overrides += [word for word in rest if not word.startswith("-")]  # argparse takes none behind an option
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if getattr(chosen, "path", "") is None:
        needs, example = getattr(chosen, "needs", ("a configuration", "configs/digits.yaml"))
        raise JShardError(f"jshard {chosen.name} needs {needs}", hint=f"type: jshard {chosen.name} {example}")
    return chosen


def _check_dashes(command: str, rest: list[str], words: list[str]) -> None:
    """Raise an error for `--steps 10`, where steps is a key and no option."""
    from jshard.signals.compose import full_key

    for word in rest:
        option, equals, value = word.partition("=")
        key = full_key(option.removeprefix("--")) if option.startswith("--") else None
        if key is not None:
            value = value if equals else next(iter(words[words.index(word) + 1 :]), "...")
            raise JShardError(f"jshard {command} has no option {option}", hint=f"write {key}={value}")


def train(chosen: argparse.Namespace) -> int:
    from jshard.cli.resume import trained
    from jshard.cli.target import Target

    return trained(Target(chosen.path, tuple(chosen.overrides)), None)


def schema(chosen: argparse.Namespace) -> int:
    from jshard.signals.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
