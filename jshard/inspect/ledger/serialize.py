"""The entries of a ledger as JSON documents."""

from __future__ import annotations

import dataclasses
from typing import Any

from jshard.errors import Location


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
    if isinstance(value, Location):
        return str(value)
    return document_of(value) if dataclasses.is_dataclass(value) else value
