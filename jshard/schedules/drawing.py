"""Drawings of a schedule: text for a terminal, SVG, and a part of a page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from jshard.printing.markup import Markup, element
from jshard.printing.pages.shell import legend
from jshard.printing.pages.words import svg
from jshard.printing.table import BETWEEN
from jshard.printing.table import table as aligned
from jshard.schedules.cost import Cost, TimedTable, percent
from jshard.schedules.table import SLOTS, Table

SAYS = {"F": "forward", "B": "backward", "W": "weight gradients"}
# The class of a colour on jshard's pages, and the colour for a picture without a page.
COLOURS = {"F": ("ax0", "#2459c9"), "B": ("ax2", "#137a4b"), "W": ("ax1", "#a84a08")}
LEFT, LANE, GAP, HEAD, FOOT = 66, 22, 4, 34, 14
LONGEST = 24_000  # pixels
FONT = "ui-sans-serif, system-ui, sans-serif"


def grid(drawn: Table, width: int | None) -> list[str]:
    """Return the table with names of stages and ticks, in several parts if it is wider than `width`."""
    columns = [[str(tick), *words] for tick, words in enumerate(zip(*drawn.words(), strict=True))]
    names = ["", *(f"stage {stage}" for stage in range(drawn.stages))]
    lines: list[str] = []
    while columns:
        needed = itertools.accumulate(
            (len(BETWEEN) + max(map(len, column)) for column in columns), initial=len(names[-1])
        )
        room = len(columns) if width is None else max(1, sum(each <= width for each in needed) - 1)
        lines += aligned(list(zip(names, *columns[:room], strict=True)))
        columns = columns[room:]
    return lines


def picture(costs: Sequence[Cost]) -> Markup:
    """Draw tables on a common time axis, as they run in lock-step."""
    runs = [cost.lock_step for cost in costs]
    longest = max(run.length for run in runs)
    shortest = min(bar.end - bar.start for run in runs for bar in run.bars)
    scale = min(24 / (shortest or 1), LONGEST / longest)
    top, drawn = 0.0, []
    for cost, run in zip(costs, runs, strict=True):
        drawn += _panel(run, f"{cost.table.name}: {percent(run.idle)} idle", top, scale)
        top += HEAD + run.stages * (LANE + GAP) + FOOT
    width, namespace = LEFT + longest * scale + GAP, "http://www.w3.org/2000/svg"
    return svg(width, top, drawn, xmlns=namespace, class_="schedule", font_family=FONT)


def drawn(costs: Sequence[Cost]) -> Markup:
    """Return the picture for a page, with its legend."""
    return element(
        "div",
        legend((f"fill {COLOURS[slot][0]}", SAYS[slot], slot) for slot in SLOTS),
        element("div", picture(costs), class_="scroller", tabindex=0, role="region", aria_label="picture"),
    )


def _panel(run: TimedTable, title: str, top: float, scale: float) -> Iterator[Markup]:
    def text(words: str, x: float, y: float, size: int, **attributes: object) -> Markup:
        return element("text", words, x=x, y=y, font_size=size, **{"fill": "currentColor", **attributes})

    yield text(title, 0, top + 22, 14, font_weight=600)
    tops = [top + HEAD + stage * (LANE + GAP) for stage in range(run.stages)]
    for stage, y in enumerate(tops):
        yield text(f"stage {stage}", 0, y + 15, 12)
        lane = {"x": LEFT, "y": y, "width": run.length * scale, "height": LANE}
        yield element("rect", **lane, fill="currentColor", fill_opacity="0.06")
    for each in run.bars:
        width, (class_, colour) = (each.end - each.start) * scale, COLOURS[each.op.slot]
        x, y = LEFT + each.start * scale, tops[each.stage]
        yield element(
            "rect",
            element("title", f"{each.op} of stage {each.stage}: {each.start:g} to {each.end:g}"),
            x=x, y=y, width=max(0.5, width - 1), height=LANE, rx=2, fill=colour, class_=f"fill {class_}",
            fill_opacity=None if each.op.chunk % 2 == 0 else "0.7",
        )  # fmt: skip
        number = str(each.op).removeprefix(each.op.slot)
        if width > 8 * len(number):
            yield text(number, x + width / 2, y + 15, 11, fill="#ffffff", text_anchor="middle", class_="on")
