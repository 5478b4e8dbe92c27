"""A ledger as one JSON document with a version, and back."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from jshard.errors import JShardError, Place
from jshard.inspect.ledger import Choice, Ledger, Left, Line, Unused
from jshard.inspect.memory import Rest
from jshard.kernels.declare import Schedule

SCHEMA = "jshard.explain/1"


def line_document(line: Line) -> dict[str, Any]:
    return {
        **_plain(line),
        "schedule": None if line.schedule is None else dataclasses.asdict(line.schedule),
        "mesh_axes": list(line.mesh_axes),
        "shape": list(line.shape),
        "asked": line.asked,
        "wire": line.wire,
        "total": line.total,
    }


def left_document(left: Left) -> dict[str, Any]:
    return _plain(left)


def written(ledger: Ledger) -> str:
    memory = [{**_plain(rest), "total": rest.total} for rest in ledger.memory]
    total = {
        "wire": ledger.total,
        "count": ledger.count,
        "memory": ledger.held,
        **{key: ledger.by(key) for key in ("phase", "signal", "axis", "line")},
    }
    return json.dumps(
        {
            "schema": SCHEMA,
            "lines": list(map(line_document, ledger.lines)),
            "left": list(map(left_document, ledger.left)),
            "choices": list(map(_plain, ledger.choices)),
            "unused": list(map(_plain, ledger.unused)),
            "memory": memory,
            "total": total,
        },
        indent=2,
    )


def read_document(text: str, said: str = "the document") -> Ledger:
    """The ledger that `to_json` wrote; `said` opens the sentence when it is of another version."""
    document = json.loads(text)
    if document.get("schema") != SCHEMA:
        raise JShardError(
            f'{said} has the schema "{document.get("schema")}", and this jshard reads "{SCHEMA}"',
            mend="write it anew: jshard explain --json",
        )
    return Ledger(
        tuple(_entry(Line, each) for each in document["lines"]),
        tuple(_entry(Choice, each) for each in document["choices"]),
        tuple(_entry(Unused, each) for each in document["unused"]),
        tuple(_entry(Left, each) for each in document.get("left", ())),  # newer than the others
        tuple(_entry(Rest, each) for each in document["memory"]),
    )


def _plain(entry: Any) -> dict[str, Any]:
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    return {**fields, "place": None if entry.place is None else str(entry.place)}


def _entry(kind: Any, said: dict[str, Any]) -> Any:
    fields = {field.name: said[field.name] for field in dataclasses.fields(kind) if field.name in said}
    for name, value in fields.items():
        if name == "place":
            fields[name] = _place(value)
        elif name == "schedule":
            fields[name] = None if value is None else Schedule(**value)
        elif isinstance(value, list):
            fields[name] = tuple(value)
    return kind(**fields)


def _place(text: str | None) -> Place | None:
    if text is None:
        return None
    found = re.fullmatch(r"(.+):(\d+)", text)
    return Place(text) if found is None else Place(found[1], int(found[2]))
