"""The timeline as an HTML page: a bar for each event, drawn by a script, then totals and the longest operations."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from jshard.inspect.timeline.event import Event
from jshard.inspect.timeline.lanes import Lane, Window, by_signal, sums
from jshard.printing.markup import Child, Markup, data, element
from jshard.printing.pages.shell import Figure, document, framed, section, stack, table, write
from jshard.printing.pages.words import breakable, signal_name, times
from jshard.printing.units import three_digits

HERE = Path(__file__).parent
SCHEMA = "jshard.timeline/1"
LINKS = (("Timeline", "#timeline"), ("Devices", "#devices"), ("Signals", "#signals"), ("Operations", "#operations"))
LONGEST = 30
READING = "A lane for each device, a bar for each operation; point at one to see what it is."
KEYS = "+ and − zoom, ← and → move, 0 shows all, ] and [ go from operation to operation."
FOOTER = (
    "An operation is an instruction of a compiled program, with the compiler's name for it. Its signal is that of its name "
    "stack; fused operations have the signal of the last of them."
)


@dataclasses.dataclass(frozen=True, repr=False)
class Timeline:
    """A bar for each event of a capture, as a page or JSON. `notes` are sentences on how to read it."""

    title: str
    about: tuple[str, ...]
    lanes: tuple[Lane, ...]
    bars: tuple[Event, ...]
    steps: tuple[Window, ...]
    length: float
    notes: tuple[str, ...]

    def total(self, what: str) -> float:
        """Return the sum of a time, a field of the lanes, over all lanes."""
        return sum(getattr(lane, what) for lane in self.lanes)

    def html(self) -> str:
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to an HTML file without dependencies."""
        return write(Path(path), self.html().encode(), "the timeline", "-o timeline.html")

    def json_lines(self) -> Iterator[str]:
        """Yield a JSON document for each event, after a first line with the schema."""
        yield json.dumps({"schema": SCHEMA, "title": self.title, "events": len(self.bars), "notes": self.notes})
        for bar in self.bars:
            of = {key: getattr(bar.operation, key) for key in ("kind", "collective", "signal", "phase")}
            own = {key: getattr(bar, key) for key in ("row", "op", "line", "program", "step", "start", "duration")}
            yield json.dumps({"device": self.lanes[bar.lane].name, **own, **of})

    def __str__(self) -> str:
        when = steps_in_words([window.step for window in self.steps]) or "no marked step"
        return f"{self.title}: {when}, {len(self.bars):,} operations on {times(len(self.lanes), 'device')}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return framed(self.html())


def span(nanoseconds: float) -> str:
    """Return a time in three digits: `412 ns`, `1.23 µs`, `45.6 ms`."""
    return three_digits(nanoseconds, 1000, ("ns", "µs", "ms", "s"))


def share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "–"


def steps_in_words(numbers: Sequence[int]) -> str:
    """Return `steps 7 to 8`, `step 7`, or "" for none."""
    return f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else "".join(f"step {n}" for n in numbers)


def page(drawn: Timeline) -> str:
    """Return the whole page as HTML."""
    return document(
        drawn.title,
        "timeline",
        skip=("To the longest operations", "#operations"),
        links=LINKS,
        about=" · ".join(drawn.about),
        figures=_figures(drawn),
        sections=(
            section("timeline", "What ran, where and when", " ".join((READING, *drawn.notes)), _picture(drawn)),
            section(
                "devices",
                "What each device did",
                "A collective begins when its device reaches it, so its time includes the wait for other devices. "
                f"All of it is {span(drawn.length)}.",
                _devices(drawn),
            ),
            section(
                "signals",
                "What each signal took",
                "Time of all its operations, summed over devices and steps.",
                _signals(drawn),
            ),
            section("operations", "The longest operations", None, _operations(drawn)),
        ),
        footer=(FOOTER, f"{len(drawn.bars):,} events were captured in the time shown, and each is a bar."),
        more=[data(_events(drawn), "events")],
        styles=[HERE / "style.css"],
        scripts=[HERE / "script.js"],
    )


def _figures(drawn: Timeline) -> list[Figure]:
    length, moving = drawn.length * len(drawn.lanes), drawn.total("collectives")
    steps = [window.end - window.start for window in drawn.steps]
    which = steps_in_words([window.step for window in drawn.steps]) or "none"
    return [
        (
            "Operations",
            element("data", f"{len(drawn.bars):,}", value=len(drawn.bars), data_total="events"),
            f"on {times(len(drawn.lanes), 'device')}",
        ),
        ("A step", span(sum(steps) / len(steps)) if steps else "not marked", which),
        ("Computing", share(drawn.total("compute"), length), "of the time, on average"),
        (
            "Collectives",
            share(moving, length),
            f"{share(drawn.total('both'), moving)} of it beside computing" if moving else "none",
        ),
        ("Idle", share(drawn.total("idle"), length), "neither, on average"),
    ]


def _picture(drawn: Timeline) -> Markup:
    def choice(what: str, *words: str) -> Markup:
        chosen = [
            element(
                "button", f"by {word}", type="button", data_what=what, data_by=word, aria_pressed=str(not at).lower()
            )
            for at, word in enumerate(words)
        ]
        return element("div", element("span", what.capitalize(), class_="quiet"), chosen, class_="segments")

    def act(word: str, does: str, says: str) -> Markup:
        return element("button", word, type="button", class_="plain", data_do=does, aria_label=says, title=says)

    steps = [element("option", "all steps", value="")]
    steps += [element("option", f"step {window.step}", value=number) for number, window in enumerate(drawn.steps)]
    return element(
        "figure",
        element(
            "div",
            choice("colours", "kind", "signal"),
            choice("labels", "operation", "signal"),
            element(
                "div",
                element("select", steps, id="step", class_="plain", aria_label="step") if drawn.steps else None,
                act("−", "out", "zoom out"),
                act("+", "in", "zoom in"),
                act("All", "all", "show all"),
                class_="acts",
            ),
            class_="controls",
        ),
        element(
            "div",
            element("canvas", "", id="canvas"),
            element("div", id="height"),
            id="view",
            tabindex=0,
            role="group",
            aria_label=f"The timeline. {KEYS}",
            aria_describedby="said",
        ),
        element("div", id="tip", class_="tip", hidden=True),
        element(
            "noscript",
            element("p", "The bars are drawn by a script, and this browser runs none: see jshard timeline --json."),
        ),
        element(
            "figcaption",
            element("ul", id="legend", class_="legend"),
            element("p", id="said", aria_live="polite"),
            element("p", f"Drag to move, Ctrl and the wheel or a double click to zoom. {KEYS}", class_="quiet keys"),
        ),
        class_="timeline",
    )


def _devices(drawn: Timeline) -> Markup:
    def timed(time: float) -> list[Child]:
        return [span(time), element("span", share(time, drawn.length), class_="part")]

    rows = [
        (
            lane.name,
            element("div", _split(lane, drawn.length), class_="how"),
            timed(lane.compute),
            timed(lane.collectives),
            _or_none(lane.both),
            timed(lane.idle),
        )
        for lane in drawn.lanes
    ]
    head = ("Device", "", "Computing", "Collectives", "of it beside computing", "Idle")
    return table("devices", head, rows, numbers=range(2, 6))


def _split(lane: Lane, length: float) -> Markup:
    """Draw computing, then both at once, then collectives, then idle time."""
    lengths = {"compute": lane.compute - lane.both, "both": lane.both, "collective": lane.collectives - lane.both}
    return stack(lengths.items(), length, track=True)


def _signals(drawn: Timeline) -> Markup:
    found = by_signal(drawn.bars)
    total = sum(compute + moving for _, compute, moving in found)
    lines = {bar.operation.signal: bar.line for bar in drawn.bars if bar.line}
    rows = [
        (
            signal_name(signal),
            element("span", lines.get(signal, "–"), class_="place"),
            _or_none(compute),
            _or_none(moving),
            share(compute + moving, total),
        )
        for signal, compute, moving in found
    ]
    return table("signals", ("Signal", "Line", "Computing", "Collectives", "Of all"), rows, numbers=range(2, 5))


def _operations(drawn: Timeline) -> Markup:
    found = sums(drawn.bars)
    total = sum(sum(runs) for _, runs in found)
    rows = [_operation(bar, runs, total) for bar, runs in found[:LONGEST]]
    more = len(found) - LONGEST
    says = "Press one to see where it ran." + (f" {times(more, 'more operation')} took less." if more > 0 else "")
    head = ("Operation", "What", "Signal", "Line", "Runs", "Longest", "Mean", "In all", "Of all")
    shown = table("longest operations", head, rows, numbers=range(4, 9))
    return element("div", element("p", says, class_="says"), shown)


def _operation(bar: Event, runs: Sequence[float], total: float) -> list[Child]:
    of = bar.operation
    what = of.collective.replace("_", "-") or "computes"
    return [
        element(
            "button",
            bar.op,
            type="button",
            class_="name",
            data_op=bar.op,
            data_program=bar.program,
            aria_pressed="false",
        ),
        [element("span", what, class_=f"what {of.kind}"), element("span", of.phase, class_="via")],
        "–" if of.signal == "-" else breakable(of.signal),
        element("span", bar.line or "–", class_="place"),
        f"{len(runs):,}",
        span(max(runs)),
        span(sum(runs) / len(runs)),
        span(sum(runs)),
        share(sum(runs), total),
    ]


def _or_none(time: float) -> str:
    return span(time) if time else "–"


def _events(drawn: Timeline) -> dict[str, object]:
    """Return the data of the script, an entry for each event; times in whole nanoseconds."""
    kinds: dict[tuple[str, ...], int] = {}
    which = []
    for bar in drawn.bars:
        of = bar.operation
        kind = bar.op, of.kind, of.collective, of.signal, of.phase, bar.line, bar.program
        which.append(kinds.setdefault(kind, len(kinds)))
    return {
        "lanes": [{"name": lane.name, "rows": lane.rows} for lane in drawn.lanes],
        "steps": [[window.step, round(window.start), round(window.end)] for window in drawn.steps],
        "length": drawn.length,
        "kinds": list(kinds),
        "kind": which,
        "lane": [bar.lane for bar in drawn.bars],
        "row": [bar.row for bar in drawn.bars],
        "step": [bar.step for bar in drawn.bars],
        "start": [round(bar.start) for bar in drawn.bars],
        "duration": [round(bar.duration) for bar in drawn.bars],
    }
