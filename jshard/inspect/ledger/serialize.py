"""The entries of a ledger as JSON documents, and back."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jshard.errors import Place
from jshard.kernels.kernel_traffic import Schedule
from jshard.provenance import Cause


def line_document(line: Any) -> dict[str, Any]:
    return {
        **caused_document(line),
        "schedule": None if line.schedule is None else dataclasses.asdict(line.schedule),
        "shape": list(line.shape),
        "asked": line.asked,
        "wire": line.wire,
        "total": line.total,
    }


def caused_document(entry: Any) -> dict[str, Any]:
    """The columns of an entry that has a cause, and the facts of the cause."""
    fields, facts = document_of(entry), document_of(entry.cause)
    del fields["cause"], facts["path"], facts["asked"]
    more = {"signal": entry.signal, "via": entry.via}
    return {**facts, **fields, **more, "mesh_axes": list(entry.mesh_axes), "branches": list(entry.branches)}


def document_of(entry: Any) -> dict[str, Any]:
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    return {**fields, "place": None if entry.place is None else str(entry.place)}


def entry_of(kind: Any, document: dict[str, Any]) -> Any:
    fields = {field.name: document[field.name] for field in dataclasses.fields(kind) if field.name in document}
    if "cause" in kind.__dataclass_fields__:
        path = () if document["signal"] == "-" else tuple(document["signal"].split("/"))
        fields["cause"] = dataclasses.replace(entry_of(Cause, document), path=path)
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
