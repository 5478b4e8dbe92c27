"""The captures of a run, and the facts jshard writes beside each because the profiler does not know them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.errors import JShardError
from jshard.inspect.compiled.collective import axes_of
from jshard.inspect.timeline.event import Event, FileEvents, read
from jshard.inspect.timeline.programs import Operation
from jshard.programs.protobuf import Unreadable
from jshard.programs.provenance import Cause
from jshard.runs.names import CAPTURED, TRACE
from jshard.signals.active_config import configuration, mesh
from jshard.signals.keys import blamed
from jshard.version import __version__

SCHEMA = "jshard.trace/2"


@dataclasses.dataclass(frozen=True)
class Capture:
    """The capture of a process. `metadata` is jshard's file beside it, {} for a capture by JAX alone."""

    folder: Path
    metadata: Mapping[str, Any]

    @property
    def rank(self) -> int:
        return self.metadata.get("rank", 0)

    @property
    def processes(self) -> int:
        return self.metadata.get("processes", 1)

    def device(self, number: int) -> int:
        """Return a device's number among the devices of all processes, from its number in its process."""
        return self.metadata.get("devices", {}).get(str(number), number)

    def line(self, operation: Operation) -> str:
        """Return the line of the configuration behind an operation: `configs/mlp.yaml:4`, or
        "". An operation merged from several has several lines: `configs/mlp.yaml:4, 7`."""
        found = dict.fromkeys(filter(None, (self._lines.get(each) for each in keys(operation))))
        words: list[str] = []
        for place in found:
            source, _, number = place.rpartition(":")
            words.append(number if words and words[0].startswith(f"{source}:") else place)
        return ", ".join(words)

    @functools.cached_property
    def _lines(self) -> dict[tuple[str, ...], str]:
        return {tuple(words): line for *words, line in self.metadata.get("lines", [])}

    def file(self) -> Path | None:
        """Return the newest file of the profiler."""
        return max(self.folder.rglob("*.xplane.pb"), key=lambda file: (file.stat().st_mtime, str(file)), default=None)

    @functools.cached_property
    def read(self) -> FileEvents:
        file = self.file()
        if file is None:
            raise JShardError(f"{self.folder} no longer holds a capture", hint="capture it again by jshard trace")
        try:
            found = read(file)
        except Unreadable as error:
            raise JShardError(
                f"{file} is a damaged capture of JAX's profiler: it has {error}",
                hint="capture it again by jshard trace",
            ) from None
        if not found.events:
            raise JShardError(
                f"{file} holds no operation of a device",
                hint="capture steps that compute something, by jshard trace configs/digits.yaml --trust",
            )
        return found


Key = tuple[str, str, str, str, str, str]


def keys(operation: Operation) -> dict[Key, Cause]:
    """Return the cause of an operation under each of its signals, by everything that decides the configuration's line."""
    collective, members = operation.collective, ",".join(map(str, operation.members))
    return {
        (each.signal, each.phase, each.key, "remat" * each.remat, collective, members): each
        for each in operation.causes
        if each.path
    }


def captures(folder: Path) -> list[Capture]:
    """Return the capture of each process, by rank, in a run's folder or in any folder of JAX's profiler."""
    for place in (folder / TRACE, folder):
        found = [Capture(each.parent, _metadata(each)) for each in sorted(place.glob(f"rank*/{CAPTURED}"))]
        if found:
            return sorted(found, key=lambda each: each.rank)
    alone = Capture(folder, _metadata(folder / CAPTURED) if (folder / CAPTURED).is_file() else {})
    if alone.file() is None:
        why = "holds no capture" if folder.is_dir() else "is not there"
        raise JShardError(
            f"{folder} {why}", hint=f"capture one by: jshard trace configs/digits.yaml --trust -o {folder}"
        )
    return [alone]


def _metadata(file: Path) -> Mapping[str, Any]:
    try:
        metadata = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        metadata = {}
    schema = metadata.get("schema") if isinstance(metadata, dict) else None
    if schema != SCHEMA:
        fault = f"has the schema {schema}, but this jshard reads {SCHEMA}" if schema else "is cut off"
        raise JShardError(f"{file} {fault}", hint="capture it again by jshard trace")
    return metadata


def describe(folder: Path, title: str, **more: object) -> Capture:
    """Write the facts beside a capture that the profiler does not know. A capture without
    operations is an error at once. Call it while the configuration of the run is loaded."""
    events, own = Capture(folder, {}).read.events, jax.process_index()
    metadata = {
        "schema": SCHEMA,
        "title": title,
        "jshard": __version__,
        "jax": jax.__version__,
        "kind": jax.devices()[0].device_kind,
        "rank": own,
        "processes": jax.process_count(),
        "devices": {
            # the profiler's number of a device, by its platform
            str(device.id if device.platform == "cpu" else device.local_hardware_id): number
            for number, device in enumerate(jax.devices())
            if device.process_index == own
        },
        "steps": sorted({event.step for event in events if event.step is not None}),
        "lines": _lines(events),
        "stages": stages(),
        **more,
    }
    _write(folder, metadata)
    return Capture(folder, metadata)


def stages() -> dict[str, int]:
    """Return the pipeline stage of each device."""
    present = configuration()
    if present is None or present.pipeline is None:
        return {}
    grid, axis = mesh().devices, mesh().axis_names.index(present.pipeline.axis)
    numbers = {device: number for number, device in enumerate(jax.devices())}
    return {str(numbers[device]): at[axis] for at, device in np.ndenumerate(grid)}


def refuse(folder: Path, asked: str, fault: str) -> None:
    """Write, for the process that asked for a capture, the reason why there is none."""
    own = folder / f"rank{jax.process_index()}"
    with contextlib.suppress(OSError):  # without a writable folder, the asking process sees that nothing comes
        own.mkdir(parents=True, exist_ok=True)
        _write(own, {"schema": SCHEMA, "asked": asked, "fault": fault})


def _write(folder: Path, metadata: Mapping[str, Any]) -> None:
    unfinished = folder / f"{CAPTURED}.new"
    unfinished.write_text(json.dumps(metadata), encoding="utf-8")
    unfinished.replace(folder / CAPTURED)  # readers find it whole


def _lines(events: Iterable[Event]) -> list[list[str]]:
    """Return the line behind every operation under a signal."""
    found = {}
    for operation in dict.fromkeys(event.operation for event in events):
        for key, cause in keys(operation).items():
            if key not in found and (line := _line(cause, operation)):
                found[key] = line
    return [[*key, line] for key, line in sorted(found.items())]


def _line(cause: Cause, operation: Operation) -> str:
    present = configuration()
    if present is None:
        return ""
    sizes = {} if present.mesh is None else mesh().shape
    mesh_axes = axes_of(operation.collective, operation.members, sizes) if operation.collective else ()
    try:
        return str(blamed(cause, mesh_axes).place or "")
    except JShardError:  # a signal of another configuration, or a scope that only holds signals
        return ""
