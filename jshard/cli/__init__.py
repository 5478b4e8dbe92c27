"""The command line: a parser and a function for each command. No module here imports JAX before a
command needs it, so `--help`, `check` and `schema` answer at once."""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
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
A word like steps=20 or optimizer.learning_rate=1e-3 changes a key of the experiment (jshard.train). A word that begins
with a signal or jshard changes a key there: layer1.column=tensor, jshard.mesh.data=4.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the typed command and return its exit status. The status is 2 for a mistake in the
    configuration or on the command line. Some commands answer 1: for a difference, a broken
    promise, or a program too large for a device."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    gc.set_threshold(100_000, 10, 20)  # traced programs live long: collections took a tenth of `explain`
    try:
        try:
            importlib.import_module("jshard.runs.events")  # raises for a mistake in JSHARD_LOG
            chosen = parse(words)
            if chosen.name not in COMMANDS or found() is None:
                return chosen.command(chosen)
            from jshard.cli.rank_main import as_member

            return as_member(lambda: chosen.command(chosen))
        finally:
            sys.stdout.flush()  # a closed pipe or a full disk fails here, not at exit
    except JShardError as error:
        tell(str(error))
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has ended
        _write_no_more()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        _write_no_more()
        command = " ".join(["jshard", *words[:1]])
        fault = f"the output of {command} can't be written: {reason(error)}"
        tell(str(JShardError(fault, hint="redirect it to another disk")))
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _write_no_more() -> None:
    """Discard the buffer of stdout: Python would fail to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """An argparse parser with mistakes as JShardErrors."""

    def error(self, message: str) -> NoReturn:
        raise JShardError(f"{self.prog}: {message}", hint=f"type: {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse ignores a full disk


def _parser() -> tuple[Parser, Collection[str]]:
    """Return the parser of all commands, and their names."""
    parser = Parser(
        prog="jshard",
        description="Shard a Flax model over devices by a YAML file, with explicit collectives.",
        epilog="Help for a command: jshard train --help",
    )
    parser.add_argument("--version", action="version", version=f"jshard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="", required=True, dest="name")

    def command(name: str, says: str, run: Run | None = None, *, configured: bool = True) -> Parser:
        """Add a command with the arguments and `run` of its module, unless `run` is given."""
        added = commands.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".", epilog=OVERRIDES)
        if configured:
            added.usage = f"jshard {name} [-h] path [key=value ...]"
            added.add_argument("path", nargs="?", help="the configuration: a YAML file")
            added.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it, for this run only")
        if configured and name not in ("train", "timeline"):
            says_trust = "let the YAML run code outside of its folder, jshard, flax and optax"
            added.add_argument("--trust", action="store_true", help=says_trust)
        if run is None:
            module = importlib.import_module(f"jshard.cli.{name}")
            module.arguments(added)
            run = module.run
        added.set_defaults(command=run)
        return added

    command("train", "print what the configuration of an experiment costs, and train it", train)
    command("launch", "start a program in several processes, here or on many hosts", configured=False)
    command("resume", "continue a run from a checkpoint")
    command("generate", "generate text by a trained model")
    command("explain", "list every collective and the memory of a training step, without running it")
    command("plan", "compile a training step for absent devices: their time, memory and collectives")
    command("trace", "capture the operations of a few steps, of an experiment or of a run in progress")
    command("timeline", "draw a capture as an HTML page: a lane for each device, a bar for each operation")
    command("top", "show the progress of a run's processes, during the run or after it", configured=False)
    command("report", "write an HTML page on the layout of all arrays and the costs of a step")
    command("diff", "compare two configurations, or one at two commits, collective by collective")
    command("check", "find all mistakes in a configuration, print its meaning, and check its promises")
    command("verify", "compare the sharded model with the same model unsharded")
    command("bench", "time the collectives and products on the devices here", configured=False)
    command("schedule", "draw and price pipeline schedules, side by side", configured=False)
    command("schema", "print the keys of a configuration: as JSON Schema, for editors, or as a page", configured=False)
    command("new", "make a small project to train: a model, data, a configuration", configured=False)
    completion = command("completion", "print a script for completion at Tab in a shell", configured=False)
    completion.set_defaults(parser=parser)
    return parser, commands.choices


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the words of the command line; raise a JShardError for a mistake."""
    parser, commands = _parser()
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in commands:
        close = nearest(first, commands) or "--help"
        raise JShardError(f'"{first}" is not a command of jshard', hint=f"type: jshard {close}")
    if not words:
        parser.print_help()
        raise SystemExit(2)
    words, program = (
        split(words) if first == "launch" else (words[:2], words[2:]) if first == "completion" else (words, [])
    )
    chosen, rest = parser.parse_known_args(words)
    chosen.words = program
    if hasattr(chosen, "overrides"):
        _check_dashes(chosen.name, rest, words)
        chosen.overrides += [word for word in rest if not word.startswith("-")]  # argparse takes none after an option
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
