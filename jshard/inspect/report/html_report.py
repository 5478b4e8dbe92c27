"""`jshard report`: one page on where everything lies and what a step costs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jshard.inspect.report.facts import Facts
from jshard.inspect.report.gather import TrainingProgram, facts_of_experiment, facts_of_function
from jshard.inspect.report.page import page
from jshard.printing.pages.shell import framed, write
from jshard.printing.pages.words import size

SCHEMA = "jshard.report/1"


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """A page and the facts it tells. It prints as one line about it; `save` writes it."""

    facts: Facts
    html: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page to one HTML file, which needs nothing else."""
        return write(Path(path), self.html.encode(), "the report", "-o report.html")

    def to_json(self) -> str:
        """What the page tells, as one document with its schema named in it. Bytes are per device."""
        facts = self.facts
        arrays = [
            {
                **{key: getattr(array, key) for key in ("kind", "path", "signal", "shape", "dtype", "axes", "local")},
                "place": None if array.place is None else str(array.place),
                "bytes": array.bytes_each,
            }
            for array in facts.arrays
        ]
        document = {
            "schema": SCHEMA,
            "title": facts.title,
            "mesh": {} if facts.mesh is None else dict(facts.mesh.shape),
            "arrays": arrays,
            "memory": facts.memory,
            "ledger": json.loads(facts.ledger.to_json()),
            "plan": None if facts.plan is None else json.loads(facts.plan.to_json()),
        }
        return json.dumps(document, indent=2)

    def __str__(self) -> str:
        ledger = self.facts.ledger
        return (
            f"{self.facts.title}: {ledger.count:,} collectives, {ledger.total:,} B on the wire per device, "
            f"a page of {size(len(self.html.encode()))}"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return framed(self.html)


def report(f: TrainingProgram | Callable[..., Any], *args: object, plan: object = None, **kwargs: object) -> Report:
    """A page on `f(*args)`, or on the training step of an experiment. Nothing runs.

    jshard.report(loss, model, x).save("report.html")
    """
    if isinstance(f, TrainingProgram):
        facts = facts_of_experiment(f, plan)
    else:
        facts = facts_of_function(f, args, kwargs, plan)
    return Report(facts, page(facts))
