"""`jshard new`: a small project to train, if you have only installed the package."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from jshard.cli.terminal import show
from jshard.errors import JShardError, refused

PROJECT = Path(__file__).parent / "project"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="DIR", help="the folder to make")
    parser.set_defaults(needs=("a folder to make", "mine"))


def run(chosen: argparse.Namespace) -> int:
    target = Path(chosen.path)
    files = {source.name.removesuffix(".txt"): source for source in sorted(PROJECT.iterdir()) if source.is_file()}
    with refused(f"{target} can't be made", hint="name another folder"):
        if target.is_dir() and any(target.iterdir()):
            raise JShardError(f"{target} is not empty", hint=f"type: jshard new {shlex.quote(f'{target}-2')}")
        target.mkdir(parents=True, exist_ok=True)
        for name, source in files.items():
            (target / name).write_bytes(source.read_bytes())
    show(f"{target}: {', '.join(files)}\ntype: cd {shlex.quote(str(target))} && jshard train train.yaml")
    return 0
