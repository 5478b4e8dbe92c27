"""A plan as one JSON document with a version."""

from __future__ import annotations

import json

from jshard.inspect.ledger.serialize import document_of
from jshard.inspect.plan.difference import digest
from jshard.inspect.plan.estimate import MODEL
from jshard.inspect.plan.result import Result

SCHEMA = "jshard.plan/1"


def document(plan: Result) -> str:
    comparison, memory, estimate = plan.comparison, plan.memory, plan.estimate
    rows = [] if comparison is None else list(map(document_of, comparison.rows))
    fields = {
        "schema": SCHEMA,
        "topology": {
            "name": plan.topology.name,
            "chip": plan.topology.chip.name,
            "kind": plan.topology.chip.kind,
            "devices": plan.topology.devices,
            "slices": plan.topology.slices,
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
            "needed": memory.needed,
            "capacity": memory.capacity,
            "fits": memory.fits,
            "budget": memory.budget,
            "within_budget": None if memory.budget is None else memory.over_budget() is None,
            "parts": dict(memory.parts),
            "peak": memory.peak,
            "rest": list(map(document_of, memory.rest)),
            "largest": list(map(document_of, memory.largest)),
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
            "parts": [{**document_of(part), "seconds": part.seconds} for part in estimate.parts],
        },
    }
    return json.dumps(fields, indent=2)
