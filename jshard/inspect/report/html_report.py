"""`jshard report`: a page on layouts, traffic and memory, and the YAML with its prices."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jshard.inspect.report.device_memory import memory_bars, stages
from jshard.inspect.report.facts import PARAMETER, Facts
from jshard.inspect.report.gather import TrainingProgram, facts_of_experiment, facts_of_function
from jshard.inspect.report.ledger_table import claims_table, ledger_table
from jshard.inspect.report.mesh_picture import Pictures, mesh_picture
from jshard.inspect.report.model_tree import model_tree
from jshard.inspect.report.source import source
from jshard.printing.markup import Markup, data, element
from jshard.printing.pages.shell import Figure, document, framed, section, write
from jshard.printing.pages.words import Colours, amount, measured, size, times

HERE = Path(__file__).parent
LINKS = (("YAML", "#source"), ("Layout", "#places"), ("Wire", "#ledger-section"), ("Memory", "#memory"))
FOOTER = (
    "Bytes on the wire are per device, for a group of n and a payload b: all-reduce 2b(n−1)/n; all-gather, reduce-scatter and "
    "all-to-all b(n−1)/n; permute b. A gradient is counted as large as its parameter.",
    "The collectives are read from the program's own jaxpr, its backward included; nothing ran.",
)


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """A page and its facts. It prints as a line about the page; `save` writes the page."""

    facts: Facts
    html: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to an HTML file without dependencies."""
        return write(Path(path), self.html.encode(), "the report", "-o report.html")

    def __str__(self) -> str:
        ledger = self.facts.ledger
        return (
            f"{self.facts.title}: {ledger.count:,} collectives, {ledger.total:,} B on the wire per device, "
            f"a page of {size(len(self.html.encode()))}"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return framed(self.html)


def report(f: TrainingProgram | Callable[..., Any], *args: object, **kwargs: object) -> Report:
    """Make a page on `f(*args)`, or on the training step of an experiment. Nothing is compiled and nothing runs.

    jshard.report(loss, model, x).save("report.html")
    """
    facts = facts_of_experiment(f) if isinstance(f, TrainingProgram) else facts_of_function(f, args, kwargs)
    return Report(facts, page(facts))


def page(facts: Facts) -> str:
    """Return the whole page as HTML."""
    colours = Colours(facts.mesh_axes)
    pictures = Pictures(facts, colours)
    priced = section(
        "source",
        "The configuration, priced",
        "Each line with its bytes on the wire, per device and step, and its bytes at rest.",
        source(facts, colours),
    )
    return document(
        facts.title,
        "report",
        skip=("To the ledger", "#ledger-section"),
        links=LINKS,
        about=" · ".join(facts.about),
        figures=_figures(facts, colours),
        sections=(
            priced if facts.texts else None,
            section(
                "places",
                "Where everything lies",
                "Choose an array: each device shows its shard of it.",
                _places(facts, colours, pictures),
                claims_table(facts),
            ),
            section(
                "ledger-section",
                "On the wire",
                "Every collective of one step, per device, as the program asks for it. Nothing has run.",
                ledger_table(facts, colours),
            ),
            section(
                "memory",
                "Memory at rest",
                "The memory of each device between steps. Activations and temporaries come on top.",
                memory_bars(facts),
            ),
            section(
                "stages",
                "The stages",
                "The schedule of each stage, and its memory and traffic in a step.",
                stages(facts),
            )
            if facts.ledger.stages
            else None,
            None if facts.texts else priced,
        ),
        footer=FOOTER,
        more=(*pictures.templates(), data(pictures.fields | {"devices": _devices(facts)}, "facts")),
        scripts=[HERE / "script.js"],
    )


def _figures(facts: Facts, colours: Colours) -> list[Figure]:
    shape = facts.mesh.shape if facts.mesh is not None else {}
    chips = [colours.chip(name, count) for name, count in shape.items()]
    parameters = sum(math.prod(array.shape) for array in facts.of(PARAMETER))
    heaviest = max((sum(device.values()) for device in facts.memory), default=0)
    ledger = facts.ledger
    phases = " · ".join(f"{phase} {size(total)}" for phase, total in ledger.by("phase").items())
    return [
        ("Devices", f"{facts.devices:,}", chips or "no mesh"),
        ("Parameters", amount(parameters), times(len(facts.of(PARAMETER)), "array")),
        ("On the wire", measured(ledger.total, name="wire"), phases or "nothing moves"),
        (
            "Collectives",
            element("data", f"{ledger.count:,}", value=ledger.count, data_total="count"),
            "per step, on each device",
        ),
        ("At rest", measured(heaviest, name="rest"), "on the device that holds most"),
    ]


def _places(facts: Facts, colours: Colours, pictures: Pictures) -> Markup:
    figure = element(
        "figure",
        element(
            "div",
            element(
                "div",
                mesh_picture(facts, colours),
                id="mesh",
                tabindex=0,
                role="group",
                class_="scroller",
                aria_label="The mesh. Arrow keys go from device to device.",
                aria_describedby="said",
            ),
        ),
        element(
            "figcaption",
            element("h3", "–", id="chosen-name", class_="name"),
            element("div", id="chosen-caption"),
            element("p", id="said", aria_live="polite"),
        ),
        class_="picture",
    )
    return element("div", model_tree(facts, pictures), figure, class_="places")


def _devices(facts: Facts) -> list[str]:
    """Return each device in words: `data 1, tensor 2`."""
    if facts.mesh is None:
        return ["the only device"]
    sizes = facts.mesh.shape
    return [
        ", ".join(f"{name} {index}" for name, index in zip(sizes, at, strict=True))
        for at in np.ndindex(*sizes.values())
    ]
