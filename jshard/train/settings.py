"""What `jshard.train` says of an experiment, with the defaults, and what can be wrong with it before JAX is needed."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard import run_names
from jshard.errors import JShardError, Place
from jshard.signals.config import Configuration
from jshard.signals.signal import Signal

DEFAULTS: Mapping[str, Any] = {
    "batch": 64,
    "steps": 1000,
    "seed": 0,
    "optimizer": "adamw",
}
LEARNING_RATE = 1e-3
LOG = 100
KEEP = 3


@dataclasses.dataclass(frozen=True)
class Policy:
    """What `jshard.train.checkpoint` says; `said` opens a sentence about it."""

    every: int
    keep: int
    folder: Path
    said: str
    run: str  # what `jshard resume` is given


class Settings:
    """What `jshard.train` says, with the defaults, and where."""

    def __init__(self, configuration: Configuration):
        self.configuration = configuration

    def __getitem__(self, key: str) -> Any:
        return self.configuration.train.get(key, DEFAULTS.get(key))

    def every(self, key: str, default: int) -> int:
        said = self[key]
        return said if type(said) is int else said.get("every", default) if isinstance(said, Mapping) else default

    def place(self, key: str) -> Place:
        return self.configuration.train_places.get(key, Place(self.configuration.source))

    def checkpoint(self) -> Policy | None:
        """When to save, and where: in the output folder, unless it is said."""
        said, output = self["checkpoint"], self["output"]
        if said is None:
            return None
        said: Mapping[str, Any] = {"every": said} if isinstance(said, int) else said
        key, folder = ("checkpoint.folder", str(said["folder"])) if "folder" in said else ("checkpoint", None)
        if folder is None and output is None:
            raise JShardError(
                f"jshard.train.checkpoint ({self.place('checkpoint')}) has no folder to save to",
                hint="write output: runs/mine beside it, or folder: in it",
            )
        where = Path(folder or Path(output) / run_names.CHECKPOINTS)
        text = f'jshard.train.{key} ({self.place(key)}) saves to "{where}", which'
        return Policy(said["every"], said.get("keep", KEEP), where, text, str(output or where))

    def ran(self) -> Path | None:
        """Where each process writes what it runs; None where it does not."""
        said = self["log"]
        said = said if isinstance(said, Mapping) else {"ran": said}
        if not said.get("ran", "folder" in said):
            return None
        if "folder" not in said:
            self._require_output("log", "write output: runs/mine beside it, or folder: in it")
        return Path(said.get("folder") or Path(self["output"]) / run_names.LOG)

    def tensorboard(self) -> bool:
        """Whether figures are written for TensorBoard too."""
        said = self["log"]
        asked = isinstance(said, Mapping) and said.get("tensorboard", False)
        if asked:
            self._require_output("log.tensorboard", "write output: runs/mine")
        return asked

    def _require_output(self, key: str, hint: str) -> None:
        if self["output"] is None:
            raise JShardError(f"jshard.train.{key} ({self.place(key)}) has no folder to write to", hint=hint)

    def check_rows(self, ways: int | None = None) -> None:
        """An error when a batch can't be split evenly; in as many ways as the configuration says, unless they are known."""
        batch, over = self["batch"], rows_over(self.configuration.signals)
        if ways is None:
            mesh = self.configuration.mesh
            sizes = dict(zip(mesh.names, mesh.sizes, strict=True)) if mesh is not None else {}
            ways = math.prod(sizes[name] for name in over)
        if ways > 1 and batch % ways:
            below, above = batch // ways * ways, -(-batch // ways) * ways
            names = " x ".join(f'"{name}"' for name in over)
            raise JShardError(
                f"jshard.train.batch ({self.place('batch')}) splits {batch} rows over mesh axis {names} of size {ways}",
                hint=f"use {above}" if below == 0 else f"use {below} or {above}",
            )

    def check(self) -> list[tuple[str, str]]:
        """Raises every fault that the text alone tells. Returns what it names that its modules do not show by their source:
        keys, and import paths or names."""
        faults: list[JShardError] = []
        for look in (lambda: self.require("data"), self.check_rows, self.checkpoint, self.ran, self.tensorboard):
            try:
                look()
            except JShardError as error:
                faults.append(error)
        if faults:
            raise JShardError.of(faults)
        named = {key: self[key] for key in ("model", "data", "loss", "optimizer") if self[key] is not None}
        paths = {
            key: each if isinstance(each, str) else each.get("path", each.get("name")) for key, each in named.items()
        }
        return [
            (key, path)
            for key, path in paths.items()
            if not is_written(f"optax:{path}" if key == "optimizer" else path)
        ]

    def require(self, key: str) -> None:
        if self[key] is None:
            example = {"model": "examples.digits:Model", "data": "examples.digits:data"}[key]
            raise JShardError(
                f"{self.configuration.source} names no {key} to train",
                hint=f"write {key}: {example} under jshard.train",
            )


def rows_over(signals: Mapping[str, Signal]) -> tuple[str, ...]:
    """The mesh axes that every `row` names, so that no layer has to gather its input."""
    rows = [signal.row for signal in signals.values() if signal.row]
    return tuple(name for name in rows[0] if all(name in row for row in rows)) if rows else ()


def is_written(path: str) -> bool:
    """Whether the source of a module defines `module:name`, which is found without running it. What it makes while it is
    imported is not seen."""
    module, _, name = path.partition(":")
    try:
        found = importlib.util.find_spec(module)
        body = ast.parse(Path(found.origin or "").read_bytes()).body if found is not None else []
    except (ImportError, OSError, SyntaxError, ValueError):  # importing it tells what is wrong
        return False
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {each.asname or each.name for each in node.names}
    return name in names
