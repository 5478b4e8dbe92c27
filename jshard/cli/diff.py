"""`jshard diff`: two configurations, or one at two commits; the exit status is 0 if equal, else 1."""

from __future__ import annotations

import argparse

from jshard.cli.target import function_arguments, is_function
from jshard.cli.terminal import show
from jshard.errors import JShardError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard diff [-h] old [new] [key=value ...] [--trust] [--topology CHIP:SIZE] [--json]"
    parser.epilog = (
        "OLD and NEW are YAML files with an experiment, or git:REVISION:path, as in git:HEAD~1:configs/digits.yaml. "
        "Words like layer1.column=tensor change NEW; without NEW, they change a copy of OLD. A function "
        "(module:function, git:REVISION:module:function) may have two --config, one for each side. Exit status: 0 for "
        "equal programs, 1 for a difference, 2 for a mistake."
    )
    parser.add_argument(
        "--topology",
        metavar="CHIP:SIZE",
        help="also compile both for these devices, and compare the compiled programs; default: jshard.topology; none "
        "compiles nothing",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, its schema named in it")
    function_arguments(parser, several=True)


def run(chosen: argparse.Namespace) -> int:
    from jshard.training.diff import diff

    words = [*chosen.overrides, *(word for word in chosen.args or () if "=" in word)]
    others = [word for word in words if "=" not in word or word.startswith("git:")]
    overrides = [word for word in words if word not in others]
    configs, args = chosen.config or [], [word for word in chosen.args or () if "=" not in word]
    if len(others) > 1 or not (others or overrides or len(configs) > 1):
        raise JShardError(
            f"jshard diff takes two configurations, and {1 + len(others)} {'are' if others else 'is'} given",
            hint=f"type: jshard diff {chosen.path} configs/other.yaml",
        )
    old, new = chosen.path, others[0] if others else chosen.path
    kinds = [is_function(side.split(":", 2)[-1] if side.startswith("git:") else side) for side in (old, new)]
    if kinds[0] != kinds[1]:
        names = (old, new) if kinds[0] else (new, old)
        raise JShardError(
            f"jshard diff compares two of a kind, and {names[0]} is a function, {names[1]} a configuration",
            hint=f"type: jshard diff {names[0]} --config {names[1]} --config configs/other.yaml",
        )
    if not kinds[0] and (configs or args):
        option = "--config" if configs else "--args"
        raise JShardError(f"{option} is for a function, and {old} is a configuration", hint=f"remove {option}")
    if len(configs) > 2:
        raise JShardError(f"--config is given {len(configs)} times", hint="give it once, or once for each side")
    difference = diff(
        old, new, overrides=overrides, topology=chosen.topology, configs=configs, args=args, trust=chosen.trust
    )
    if chosen.json:
        print(difference.to_json())
    else:
        show(str(difference))
    return 0 if difference.same else 1
