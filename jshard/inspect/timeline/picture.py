"""Draw the timeline as a PNG by Pillow: what the page shows before one touches it."""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import math
from collections.abc import Iterator
from typing import Any

from jshard.errors import JShardError
from jshard.inspect.timeline.lanes import Drawing, TimedEvent
from jshard.inspect.timeline.words import share, span

WIDTH, LEFT, EDGE = 2400, 300, 32
ROW, GAP = 34, 16
HEAD, AXIS, FOOT = 108, 64, 56
NARROWEST = 1  # pixels of the shortest bar
WIDEST = 6  # letters of a text in a bar need so much more than none
PAPER, INK, SOFT, LINE, TINT = "#ffffff", "#1b1c1e", "#5b5e63", "#e2e2dd", "#f4f4f1"
COLOURS = {"compute": "#2459c9", "collective": "#a84a08", "around": "#ffffff"}
WORDS = {"compute": "computes", "collective": "collective", "around": "a loop or a call"}
MOST = 30_000  # pixels in height that readers of PNGs take


def drawn(timeline: Drawing) -> bytes:
    """Return the file, a bar in it for each event."""
    *tops, bottom = itertools.accumulate((lane.rows * ROW + GAP for lane in timeline.lanes), initial=HEAD + AXIS)
    height = bottom + FOOT + 40 * len(timeline.notes)
    if height > MOST:
        raise JShardError(
            f"{len(timeline.lanes)} devices are too many for one PNG, which would be {height:,} pixels high",
            hint="draw the page by -o timeline.html",
        )
    sheet = _Sheet(height)
    sheet.text((EDGE, 20), timeline.title, 34)
    sheet.text((EDGE, 64), " · ".join((*timeline.about, f"{len(timeline.bars):,} operations")), 22, SOFT)
    scale = (WIDTH - LEFT - EDGE) / (timeline.length or 1.0)
    for number, window in enumerate(timeline.steps):
        left, right = LEFT + window.start * scale, LEFT + window.end * scale
        if number % 2 == 0:
            sheet.rectangle(left, HEAD + AXIS - 8, right, bottom - 8, TINT)
        if right - left > 90:
            sheet.text((left + 6, HEAD), f"step {window.step}", 22)
    for at in _ticks(timeline.length):
        sheet.rectangle(LEFT + at * scale, HEAD + 30, LEFT + at * scale + 1, bottom - 8, LINE)
        sheet.text((LEFT + at * scale + 6, HEAD + 28), span(at), 19, SOFT)
    for lane, top in zip(timeline.lanes, tops, strict=True):
        sheet.text((EDGE, top + 4), lane.name, 22)
    for bar in timeline.bars:
        sheet.bar(bar, LEFT + bar.start * scale, tops[bar.lane] + bar.row * ROW, bar.duration * scale)
    _foot(sheet, timeline, bottom)
    return sheet.file()


def _ticks(length: float) -> Iterator[float]:
    """Choose round times, not more than a dozen."""
    if length <= 0:
        return
    rough = length / 12
    ten = 10.0 ** math.floor(math.log10(rough))
    each = next(times * ten for times in (1, 2, 5, 10) if times * ten >= rough)
    for number in range(int(length / each) + 1):
        yield number * each


def _foot(sheet: _Sheet, timeline: Drawing, bottom: int) -> None:
    left, there = EDGE, {bar.kind for bar in timeline.bars}
    for kind in (kind for kind in COLOURS if kind in there):
        sheet.rectangle(left, bottom + 8, left + 22, bottom + 30, COLOURS[kind], SOFT if kind == "around" else None)
        left = sheet.text((left + 32, bottom + 5), WORDS[kind], 22) + 40
    time = timeline.length * len(timeline.lanes)
    shares = (("computing", "compute"), ("collectives", "collectives"), ("idle", "idle"))
    sums = ", ".join(f"{word} {share(timeline.total(what), time)}" for word, what in shares)
    sheet.text((left + 20, bottom + 5), f"of the time: {sums}", 22, SOFT)
    for number, note in enumerate(timeline.notes):
        sheet.text((EDGE, bottom + 48 + 40 * number), note, 22, SOFT)


class _Sheet:
    def __init__(self, height: int):
        try:
            image: Any = importlib.import_module("PIL.Image")
            fonts: Any = importlib.import_module("PIL.ImageFont")
            pen: Any = importlib.import_module("PIL.ImageDraw")
        except ImportError:
            raise JShardError(
                "a PNG is drawn by Pillow, which is not installed", hint="type: pip install 'jshard[timeline]'"
            ) from None
        self.image = image.new("RGB", (WIDTH, height), PAPER)
        self.pen = pen.Draw(self.image)
        self.font = functools.cache(fonts.load_default)  # of a size

    def text(self, place: tuple[float, float], words: str, size: int, colour: str = INK) -> float:
        """Write, and return where it ends."""
        font = self.font(size)
        self.pen.text(place, words, fill=colour, font=font)
        return place[0] + self.pen.textlength(words, font=font)

    def rectangle(
        self, left: float, top: float, right: float, bottom: float, colour: str, edge: str | None = None
    ) -> None:
        self.pen.rectangle((left, top, max(left, right - 1), bottom - 1), fill=colour, outline=edge)

    def bar(self, bar: TimedEvent, left: float, top: float, width: float) -> None:
        """Draw a bar at least as wide as can be seen, with its name where there is room."""
        begin, end = round(left), max(round(left) + NARROWEST, round(left + width))
        self.rectangle(begin, top, end, top + ROW - 5, COLOURS[bar.kind], SOFT if bar.kind == "around" else None)
        room = end - begin - 12
        letters = int(room / 11)
        if letters >= WIDEST:
            words = bar.op if len(bar.op) <= letters else f"{bar.op[: letters - 1]}…"
            self.text((begin + 6, top + 3), words, 19, SOFT if bar.kind == "around" else PAPER)

    def file(self) -> bytes:
        into = io.BytesIO()
        self.image.save(into, "PNG")
        return into.getvalue()
