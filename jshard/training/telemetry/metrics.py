"""The record of an experiment in its output folder: the configuration, and the figures as lines of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jshard.errors import JShardError, Location, refused
from jshard.runs.names import CONFIGURATION
from jshard.signals.config import Configuration
from jshard.signals.effective_config import changed, pipeline_keys
from jshard.signals.signal import Signal

TENSORBOARD = "tensorboard"  # in the output folder


class Record:
    """A writer of figures: `write(step=10, loss=0.3)` appends to `metrics.jsonl`, and to
    TensorBoard's file. A resumed run keeps the figures of its first `done` steps."""

    def __init__(
        self, folder: str | None, configuration: Configuration, done: int = 0, *, tensorboard: bool = False
    ):  # fmt: skip
        self.metrics: Path | None = None
        self.board: Any = None
        self.kept: dict[str, float] = {}  # the figures of step `done` from the earlier run
        if folder is None:
            return
        place = configuration.train_places["output"]
        self.fault = f'jshard.train.output ({place}) is "{folder}", which can\'t be written to'
        writer = _board_writer(configuration.train_places["log.tensorboard"]) if tensorboard else None
        with refused(self.fault, hint="make it writable, or name another output"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            _put(Path(folder) / CONFIGURATION, written(configuration))
            self.metrics = Path(folder) / "metrics.jsonl"
            kept = _until(done, self.metrics) if done and self.metrics.exists() else []
            _put(self.metrics, "".join(f"{json.dumps(line)}\n" for line in kept))
            self.kept = {name: line[name] for line in kept if line["step"] == done for name in line}
            if writer is not None:
                self.board = writer(str(Path(folder) / TENSORBOARD), purge_step=done + 1 if done else None)

    def write(self, **figures: float) -> None:
        if self.metrics is not None:
            with refused(self.fault, hint="make room, or name another output"), self.metrics.open("a") as file:
                print(json.dumps(figures), file=file)
        if self.board is not None:
            for name, figure in figures.items():
                if name != "step":
                    self.board.add_scalar(name, figure, figures["step"])

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _put(path: Path, text: str) -> None:
    """Replace a file atomically: a process killed meanwhile leaves the old or the new text."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def _board_writer(place: Location) -> Any:
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise JShardError(
            f"jshard.train.log.tensorboard ({place}) is true, and tensorboardX, which writes for it, is not installed",
            hint='type: pip install "jshard[tensorboard]"',
        ) from error
    return SummaryWriter


def _until(step: int, metrics: Path) -> list[dict[str, float]]:
    """Return the lines up to a step; cut-off lines are dropped."""
    kept = []
    for text in metrics.read_text().splitlines():
        with contextlib.suppress(ValueError):
            kept.append(json.loads(text))
    return [line for line in kept if line["step"] <= step]


def written(configuration: Configuration) -> str:
    """Return the configuration as a single YAML text, with includes, `extends` and command-line changes resolved."""
    jshard: dict[str, Any] = {"axis_types": configuration.axis_types, "strict": configuration.strict}
    if configuration.mesh is not None and configuration.mesh.places:
        sizes = zip(configuration.mesh.names, configuration.mesh.sizes, strict=True)
        across = configuration.mesh.across
        jshard["mesh"] = {name: {"size": n, "over": "dcn"} if name in across else n for name, n in sizes}
    if configuration.pipeline is not None:
        jshard["pipeline"] = pipeline_keys(configuration.pipeline)
    jshard |= {key: value for key in ("default", "budget") if (value := getattr(configuration, key)) is not None}
    if configuration.train:
        jshard["train"] = yaml_value(configuration.train)
    signals = {signal.name: _keys(signal) for signal in configuration.signals.values()}
    return yaml.safe_dump({"jshard": jshard, **signals}, sort_keys=False)


def _keys(signal: Signal) -> dict[str, Any]:
    """Return the YAML keys of a signal."""
    says = changed(signal).items()
    keys = {name: yaml_value(value) for name, value in says if name not in ("name", "place", "places")}
    if "store_optimizer" in keys:
        keys["store"] = {"optimizer": keys.pop("store_optimizer")}
    for word in ("keep", "prefetch"):
        if keys.pop(f"store_{word}", False):
            keys["store"] = {"parameters": keys["store"], word: True}
    if signal.kernel:
        keys["kernel"] = dict(signal.kernel)
    if ":" in signal.stage:
        keys["stage"] = {layers: int(n) for layers, n in (each.split(": ") for each in signal.stage.split(", "))}
    elif signal.stage.isdecimal():
        keys["stage"] = int(signal.stage)
    if isinstance(signal.remat, tuple):
        keys["remat"] = {"save": keys["remat"]}
    if "expect" in keys:
        keys["expect"] = dict(signal.expect)
    return keys


def yaml_value(value: object) -> Any:
    """Convert mappings, tuples and dataclasses for YAML; absent keys are omitted."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {
            name: yaml_value(part)
            for name, part in fields.items()
            if part is not None and part is not False and part != ()
        }
    if isinstance(value, Mapping):
        return {key: yaml_value(part) for key, part in value.items()}
    return [yaml_value(part) for part in value] if isinstance(value, (list, tuple)) else value
