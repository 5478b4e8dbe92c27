"""The entries of a ledger as JSON documents, and back."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jshard.errors import Location
from jshard.programs.provenance import Cause


def line_document(line: Any) -> dict[str, Any]:
    return {**caused_document(line), "asked": line.asked, "wire": line.wire, "total": line.total}


def caused_document(entry: Any) -> dict[str, Any]:
    """The columns of an entry that has a cause, and the facts of the cause."""
    fields = document_of(entry)
    facts = fields.pop("cause")
    del facts["path"], facts["asked"]
    return {**facts, **fields, "signal": entry.signal, "via": entry.via}


def document_of(entry: Any) -> dict[str, Any]:
    """The fields of a dataclass, and of those inside it, as JSON has them."""
    return {field.name: _plain(getattr(entry, field.name)) for field in dataclasses.fields(entry)}


def _plain(value: object) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return (
        str(value) if isinstance(value, Location) else document_of(value) if dataclasses.is_dataclass(value) else value
    )


def entry_of(kind: Any, document: dict[str, Any]) -> Any:
    fields = {field.name: document[field.name] for field in dataclasses.fields(kind) if field.name in document}
    if "cause" in kind.__dataclass_fields__:
        path = () if document["signal"] == "-" else tuple(document["signal"].split("/"))
        fields["cause"] = dataclasses.replace(entry_of(Cause, document), path=path)
    for name, value in fields.items():
        if name == "place":
            fields[name] = _place(value)
        elif isinstance(value, list):
            fields[name] = tuple(value)
    return kind(**fields)


def _place(text: str | None) -> Location | None:
    if text is None:
        return None
    found = re.fullmatch(r"(.+):(\d+)", text)
    return Location(text) if found is None else Location(found[1], int(found[2]))
