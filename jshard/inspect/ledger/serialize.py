"""The entries of a ledger as JSON documents, and back."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jshard.errors import Place
from jshard.kernels.kernel_traffic import Schedule


def line_document(line: Any) -> dict[str, Any]:
    return {
        **document_of(line),
        "schedule": None if line.schedule is None else dataclasses.asdict(line.schedule),
        "mesh_axes": list(line.mesh_axes),
        "shape": list(line.shape),
        "asked": line.asked,
        "wire": line.wire,
        "total": line.total,
    }


def document_of(entry: Any) -> dict[str, Any]:
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    return {**fields, "place": None if entry.place is None else str(entry.place)}


def entry_of(kind: Any, document: dict[str, Any]) -> Any:
    fields = {field.name: document[field.name] for field in dataclasses.fields(kind) if field.name in document}
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
