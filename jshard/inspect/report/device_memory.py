"""The memory at rest on each device, as bars, and the memory and traffic of each stage of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from jshard.inspect.ledger.entries import Staged
from jshard.inspect.ledger.memory import KINDS
from jshard.inspect.report.facts import AT_REST, PARAMETER, Facts
from jshard.printing.markup import Child, Markup, element
from jshard.printing.pages.shell import legend, stack, table
from jshard.printing.pages.words import measured
from jshard.schedules import Cost, sends
from jshard.schedules.cost import gradients_kept, inputs_kept, left_kept
from jshard.schedules.drawing import drawn

MOST_BARS = 16
HEAD = (
    "Stage", "Parameters", "At rest", "Microbatches kept", "Gradients kept", "Kept", "Sends forward", "Sends backward", "Sent",
)  # fmt: skip


def memory_bars(facts: Facts) -> Markup:
    memory = facts.memory
    most = max((sum(device.values()) for device in memory), default=0)
    if not most:
        return element("p", "The program holds nothing from one step to the next.", class_="quiet")
    kinds = [kind for kind in AT_REST if any(device[kind] for device in memory)]
    runs = itertools.groupby(range(len(memory)), memory.__getitem__)
    groups = [list(numbers) for _, numbers in runs]  # neighbours with equal memory
    more = len(groups) - MOST_BARS
    bars = [_bar(run[0], run[-1], memory[run[0]], most, kinds) for run in groups[:MOST_BARS]]
    heaviest = {kind: measured(max(device[kind] for device in memory)) for kind in kinds}
    return element(
        "div",
        legend((_colour(kind), KINDS[kind], heaviest[kind]) for kind in kinds),
        element("ol", bars, class_="devices"),
        element("p", f"{more:,} more runs of devices are left out.", class_="quiet") if more > 0 else None,
        class_="memory",
    )


def _bar(first: int, last: int, device: dict[str, int], most: int, kinds: list[str]) -> Markup:
    name = f"device {first}" if first == last else f"devices {first:,}–{last:,}, each"
    parts = [(_colour(kind), device[kind]) for kind in kinds]
    total = element("b", measured(sum(device.values())))
    return element("li", element("span", name, class_="who"), stack(parts, most), total)


def _colour(kind: str) -> str:
    return f"m{AT_REST.index(kind)}"


# -- the stages of a pipeline --


def stages(facts: Facts) -> Markup:
    """Draw each pipeline of the program: figures by stage, then the schedule."""
    parts = []
    for staged in facts.ledger.stages:
        cost, rows = Cost(staged.table), list(_rows(facts, staged))
        parts.append(element("p", f"{cost}. The memory of a stage is that of its fullest device.", class_="says"))
        parts.append(table(f"stages of {staged.table.name}", HEAD, rows, numbers=range(1, len(HEAD))))
        parts.append(drawn([cost]))
    return element("div", parts)


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
