"""The stages of a pipeline: its schedule drawn, and what each stage holds, keeps and sends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jshard.inspect.ledger.entries import Staged
from jshard.inspect.report.facts import PARAMETER, Facts
from jshard.printing.markup import Child, Markup, element
from jshard.printing.pages.shell import table
from jshard.printing.pages.words import measured
from jshard.schedules import Cost, sends
from jshard.schedules.cost import gradients_kept, inputs_kept, left_kept
from jshard.schedules.drawing import drawn

HEAD = (
    "Stage", "Parameters", "At rest", "Microbatches kept", "Gradients kept", "Kept", "Sends forward", "Sends backward", "Sent",
)  # fmt: skip


def stages(facts: Facts) -> Markup:
    """Each pipeline of the program: figures by stage, then the picture and the table."""
    return element("div", [list(_of(facts, staged)) for staged in facts.ledger.stages])


def _of(facts: Facts, staged: Staged) -> Iterator[Markup]:
    yield element(
        "p", f"{Cost(staged.table)}. What a stage holds is that of its device that holds most.", class_="says"
    )
    yield table(f"stages of {staged.table.name}", HEAD, list(_rows(facts, staged)), numbers=range(1, len(HEAD)))
    yield drawn([Cost(staged.table)])
    yield element("pre", staged.table.text(), tabindex=0, class_="scroller")


def _rows(facts: Facts, staged: Staged) -> Iterator[list[Child]]:
    grid = np.arange(facts.devices).reshape(tuple(facts.mesh.shape.values()))
    axis, table = facts.mesh_axes.index(staged.mesh_axis), staged.table
    sent = [line for line in facts.ledger if line.each is not None and line.mesh_axes == (staged.mesh_axis,)]
    bytes_of = {phase: sum(line.payload for line in sent if line.phase == phase) for phase in ("forward", "backward")}
    kept = [[max(ticks) for ticks in each(table)] for each in (inputs_kept, gradients_kept, left_kept)]
    each = staged.kept or bytes_of["forward"]
    for stage, (inputs, gradients, left, forward, backward) in enumerate(
        zip(*kept, *sends(table).values(), strict=True)
    ):
        devices = [facts.memory[n] for n in np.take(grid, stage, axis).flat]
        yield [
            f"{stage}",
            measured(max(device[PARAMETER] for device in devices)),
            measured(max(sum(device.values()) for device in devices)),
            f"{inputs:,}",
            f"{gradients:,}",
            measured(inputs * each + gradients * bytes_of["backward"] + left * staged.left),
            f"{forward:,}",
            f"{backward:,}",
            measured(forward * bytes_of["forward"] + backward * bytes_of["backward"]),
        ]
