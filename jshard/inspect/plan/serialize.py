"""A plan as one JSON document with a version."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jshard.inspect.plan.difference import digest
from jshard.inspect.plan.estimate import MODEL
from jshard.inspect.plan.result import Result

SCHEMA = "jshard.plan/1"


def written(plan: Result) -> str:
    comparison, memory, estimate = plan.comparison, plan.memory, plan.estimate
    rows = [] if comparison is None else [_plain(row) for row in comparison.rows]
    document = {
        "schema": SCHEMA,
        "topology": {
            "name": plan.topology.name,
            "chip": plan.topology.chip.name,
            "kind": plan.topology.chip.kind,
            "devices": plan.topology.devices,
        },
        "mesh": dict(plan.mesh),
        "compilers": plan.compilers,
        "seconds": plan.seconds,
        "cached": plan.cached,
        "program": digest(plan.text_of_program),
        "wire": {
            "asked": plan.asked.total,
            "got": None if comparison is None else comparison.got,
            "signals": {}
            if comparison is None
            else {signal: {"asked": asked, "got": got} for signal, (asked, got) in comparison.by_signal().items()},
            "rows": rows,
        },
        "memory": {
            "total": memory.total,
            "capacity": memory.capacity,
            "fits": memory.fits,
            "budget": memory.budget,
            "within_budget": None if memory.budget is None else memory.over_budget() is None,
            "parts": dict(memory.parts),
            "rest": [_plain(rest) for rest in memory.rest],
            "largest": [_plain(large) for large in memory.largest],
        },
        "time": None
        if estimate is None
        else {
            "model": MODEL,
            "measured": False,
            "seconds": estimate.seconds,
            "source": estimate.source,
            "at_most": estimate.at_most,
            "unknown": estimate.unknown,
            "parts": [{**_plain(part), "seconds": part.seconds} for part in estimate.parts],
        },
    }
    return json.dumps(document, indent=2)


def _plain(entry: Any) -> dict[str, Any]:
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    for name, value in fields.items():
        if name == "place":
            fields[name] = None if value is None else str(value)
        elif name == "differences":
            fields[name] = [_plain(each) for each in value]
        elif isinstance(value, tuple):
            fields[name] = list(value)
    return fields
