"""The effective configuration by key and line, after includes, `extends` and the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jshard.errors import Location
from jshard.signals.config import Configuration, Pipeline
from jshard.signals.signal import Signal


def lines(configuration: Configuration) -> Iterator[tuple[Location, str, str]]:
    """Yield place, key and value: `configs/mlp.yaml:5`, `layer1.row`, `data`."""
    mesh = configuration.mesh
    if mesh is not None:
        for name in mesh.names:
            yield mesh.places.get(name, mesh.place), f"jshard.mesh.{name}", mesh.size_in_words(name)
    if configuration.pipeline is not None:
        for key, value in pipeline_keys(configuration.pipeline).items():
            yield configuration.pipeline.place, f"jshard.pipeline.{key}", _word(value)
    for key, value in flat(configuration.train):
        place = configuration.train_places.get(key, Location(configuration.source))
        yield place, f"jshard.train.{key}", _word(value)
    for signal in configuration.signals.values():
        says = list(_keys(signal))
        for key, value in says:
            yield signal.at(key), f"{signal.name}.{key}", value
        if not says:
            yield signal.place, signal.name, "{}"


def pipeline_keys(pipeline: Pipeline) -> dict[str, Any]:
    """Return the keys under `jshard.pipeline`; microbatches are a key of the experiment."""
    return {key: value for key, value in changed(pipeline).items() if key not in ("place", "microbatches")}


def _keys(signal: Signal) -> Iterator[tuple[str, str]]:
    for key, value in changed(signal).items():
        if dataclasses.is_dataclass(value):
            value = changed(value)
        elif key in ("kernel", "expect"):
            value = dict(value)
        if key not in ("name", "place", "places"):
            spelled = "remat.save" if key == "remat" and isinstance(value, tuple) else key.replace("store_", "store.")
            for name, inside in flat(value, spelled):
                yield name, _word(inside)


def changed(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with values other than their defaults."""
    fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    return {name: present for name, (present, default) in fields.items() if present != default}


def flat(value: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested mappings, joined by dots, and their values."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inside in value.items():
        yield from flat(inside, f"{key}.{name}" if key else str(name))


def _word(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_word, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
