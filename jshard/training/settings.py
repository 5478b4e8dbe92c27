"""The keys under `jshard.train` with their defaults, and checks without JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.errors import JShardError, Location, multiples
from jshard.runs import names
from jshard.signals.config import Configuration
from jshard.signals.schema import TRAIN
from jshard.signals.signal import Signal
from jshard.signals.trust import is_ours
from jshard.signals.value_types import Keys

DEFAULTS: Mapping[str, Any] = {
    "batch": 64,
    "microbatches": 1,
    "steps": 1000,
    "seed": 0,
    "optimizer": "adamw",
}
LEARNING_RATE = 1e-3
LOG = 100
LENGTH = 256  # tokens in a row of text
KEEP = 3


@dataclasses.dataclass(frozen=True)
class Policy:
    """The values of `jshard.train.checkpoint`; `label` opens an error message."""

    every: int
    keep: int
    folder: Path
    label: str
    run: str  # the words after `jshard resume`


class Settings:
    """The values under `jshard.train`, with defaults and places: `settings["batch"]`."""

    def __init__(self, configuration: Configuration):
        self.configuration = configuration

    def __getitem__(self, key: str) -> Any:
        return self.configuration.train.get(key, DEFAULTS.get(key))

    def table(self, key: str) -> dict[str, Any]:
        """Return the value of `key` as a mapping; a bare value becomes the value of the key's main word."""
        value, kind = self[key], TRAIN[key].kind
        if value is None or isinstance(value, Mapping):
            return dict(value or {})
        assert isinstance(kind, Keys) and kind.stands_for is not None
        return {kind.stands_for: value}

    @property
    def text(self) -> str | None:
        """The file or folder of text to train on; None for other data."""
        table = self.table("data")
        return None if "path" in table else table.get("text")

    def place(self, key: str) -> Location:
        return self.configuration.train_places.get(key, Location(self.configuration.source))

    def label(self, key: str) -> str:
        """Return the subject of an error message: `jshard.train.batch (configs/digits.yaml:4)`."""
        return f"jshard.train.{key} ({self.place(key)})"

    def checkpoint(self) -> Policy | None:
        """Return when and where to save; the default place is the output folder."""
        table = self.table("checkpoint")
        if not table:
            return None
        folder, key = self._folder("checkpoint", names.CHECKPOINTS, "save to")
        label = f'{self.label(key)} saves to "{folder}", which'
        run = f"{self['output'] or folder}{' --trust' * self._runs_others()}"
        return Policy(table["every"], table.get("keep", KEEP), folder, label, run)

    def _runs_others(self) -> bool:
        """Return True if `jshard resume` needs `--trust` to run code named in the configuration."""
        named = [self.table(key).get("path") for key in ("model", "data", "loss")]
        named += [*(self["metrics"] or ()), self.table("optimizer").get("name"), *self.table("optimizer")]
        return any(path and ":" in path and not is_ours(path.partition(":")[0]) for path in named)

    def ran(self) -> Path | None:
        """Return the folder of the processes' logs; None if they write none."""
        table = self.table("log")
        return self._folder("log", names.LOG, "write to")[0] if table.get("ran", "folder" in table) else None

    def tensorboard(self) -> bool:
        """Return True if figures are written for TensorBoard too."""
        if wanted := self.table("log").get("tensorboard", False):
            self._output("log.tensorboard", "write to", "write output: runs/mine")
        return wanted

    def check_folders(self) -> None:
        """Raise an error if checkpoints, logs or TensorBoard files have no folder."""
        for look in (self.checkpoint, self.ran, self.tensorboard):
            look()

    def _folder(self, key: str, name: str, purpose: str) -> tuple[Path, str]:
        """Return the folder named under `key`, else `name` in the output folder; and the deciding key."""
        if (folder := self.table(key).get("folder")) is not None:
            return Path(folder), f"{key}.folder"
        return self._output(key, purpose, "write output: runs/mine beside it, or folder: in it") / name, key

    def _output(self, key: str, purpose: str, hint: str) -> Path:
        if self["output"] is None:
            raise JShardError(f"{self.label(key)} has no folder to {purpose}", hint=hint)
        return Path(self["output"])

    def check_rows(self, ways: int | None = None) -> None:
        """Raise an error if a batch does not divide by `ways`, by default the size of the configured mesh axes."""
        batch, over = self["batch"], rows_over(self.configuration.signals)
        parts = self["microbatches"]
        if batch % parts:
            pipeline = self.configuration.pipeline
            asks = self.label("microbatches") if pipeline is None else f"jshard.pipeline ({pipeline.place})"
            raise JShardError(
                f"{asks} splits {batch} rows into {parts} microbatches",
                hint=f"use batch={multiples(batch, parts)}",
            )
        if ways is None:
            mesh = self.configuration.mesh
            sizes = dict(zip(mesh.names, mesh.sizes, strict=True)) if mesh is not None else {}
            ways = math.prod(sizes[name] for name in over)
        if ways > 1 and batch % (ways * parts):
            mesh_axes = " x ".join(f'"{name}"' for name in over)
            taken = f"{batch} rows" if parts == 1 else f"the {batch // parts} rows of each of {parts} microbatches"
            raise JShardError(
                f"{self.label('batch')} splits {taken} over mesh axis {mesh_axes} of size {ways}",
                hint=f"use {multiples(batch, ways * parts)}",
            )

    def check(self) -> None:
        """Raise an error with all faults of the configuration's text."""
        faults: list[JShardError] = []
        for look in (lambda: self.require("data"), self.check_rows, self.check_folders):
            try:
                look()
            except JShardError as error:
                faults.append(error)
        if faults:
            raise JShardError.of(faults)

    def require(self, key: str) -> None:
        if self[key] is None:
            example = {"model": "examples.digits:Model", "data": "examples.digits:data"}[key]
            raise JShardError(
                f"{self.configuration.source} names no {key} to train",
                hint=f"write {key}: {example} under jshard.train",
            )


def rows_over(signals: Mapping[str, Signal]) -> tuple[str, ...]:
    """Return the mesh axes named by every `row`; batches split over them need no gather in any layer."""
    rows = [signal.row for signal in signals.values() if signal.row]
    return tuple(name for name in rows[0] if all(name in row for row in rows)) if rows else ()
