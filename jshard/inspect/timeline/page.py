"""The timeline as one HTML page: every event is a bar that the script draws, totals and the longest operations below."""

from __future__ import annotations

from pathlib import Path

from jshard.inspect.report.shell import bar, document, section, stack, table, tiles
from jshard.inspect.report.words import breakable, signal_name, times
from jshard.inspect.timeline.lanes import Drawing, Lane
from jshard.inspect.timeline.words import Sum, by_signal, share, span, sums
from jshard.markup import Child, Markup, data, element
from jshard.version import __version__

HERE = Path(__file__).parent
LINKS = (("#timeline", "Timeline"), ("#devices", "Devices"), ("#signals", "Signals"), ("#operations", "Operations"))
LONGEST = 30
KEYS = "+ and − zoom, ← and → move, 0 shows all, ] and [ go from operation to operation."


def page(drawn: Drawing) -> str:
    """The whole page."""
    return document(
        f"{drawn.title} · jshard timeline",
        element("a", "To the longest operations", href="#operations", class_="skip"),
        bar(LINKS),
        element(
            "main",
            _opening(drawn),
            section("timeline", "What ran, where and when", _says(drawn), _picture(drawn)),
            section(
                "devices",
                "What each device did",
                "A collective begins when its device comes to it, so that what it waits for the others is in its time. "
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
        _footer(drawn),
        data(_told(drawn), "events"),
        styles=[HERE / "style.css"],
        scripts=[HERE / "script.js"],
    )


def _opening(drawn: Drawing) -> Markup:
    lanes, length = drawn.lanes, drawn.length * len(drawn.lanes)
    compute, moving = sum(lane.compute for lane in lanes), sum(lane.collectives for lane in lanes)
    both, idle = sum(lane.both for lane in lanes), sum(lane.idle for lane in lanes)
    steps = [window.end - window.start for window in drawn.steps]
    numbers = [window.step for window in drawn.steps]
    which = f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"step {numbers[0]}" if numbers else "none"
    figures: list[tuple[str, Child, Child]] = [
        (
            "Operations",
            element("data", f"{len(drawn.bars):,}", value=len(drawn.bars), data_total="events"),
            f"on {times(len(lanes), 'device')}",
        ),
        ("A step", span(sum(steps) / len(steps)) if steps else "not marked", which),
        ("Computing", share(compute, length), "of the time, on average"),
        ("Collectives", share(moving, length), f"{share(both, moving)} of it beside computing" if moving else "none"),
        ("Idle", share(idle, length), "neither, on average"),
    ]
    return element(
        "div",
        element("h1", drawn.title),
        element("p", " · ".join(drawn.about), class_="about"),
        tiles(figures),
        class_="opening",
    )


def _says(drawn: Drawing) -> str:
    return " ".join(("A lane for each device, a bar for each operation; point at one to see what it is.", *drawn.notes))


def _picture(drawn: Drawing) -> Markup:
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
            element("p", "The bars are drawn by a script, and this browser runs none: see jshard timeline --png."),
        ),
        element(
            "figcaption",
            element("ul", id="legend", class_="legend"),
            element("p", id="said", aria_live="polite"),
            element("p", f"Drag to move, Ctrl and the wheel or a double click to zoom. {KEYS}", class_="quiet keys"),
        ),
        class_="timeline",
    )


def _devices(drawn: Drawing) -> Markup:
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
    """Computing, then both at once, then collectives, then nothing."""
    return stack(
        [
            ("compute", lane.compute - lane.both, None),
            ("both", lane.both, None),
            ("collective", lane.collectives - lane.both, None),
        ],
        length,
        track=True,
    )


def _signals(drawn: Drawing) -> Markup:
    found = by_signal(drawn.bars)
    whole = sum(compute + moving for _, compute, moving in found)
    lines = {bar.signal: bar.line for bar in drawn.bars if bar.line}
    rows = [
        (
            signal_name(signal),
            element("span", lines.get(signal, "–"), class_="place"),
            _or_none(compute),
            _or_none(moving),
            share(compute + moving, whole),
        )
        for signal, compute, moving in found
    ]
    return table("signals", ("Signal", "Line", "Computing", "Collectives", "Of all"), rows, numbers=range(2, 5))


def _operations(drawn: Drawing) -> Markup:
    found = sums(drawn.bars)
    whole = sum(each.total for each in found)
    rows = [_operation(each, whole) for each in found[:LONGEST]]
    more = len(found) - LONGEST
    says = "Press one to see where it ran." + (f" {times(more, 'more operation')} took less." if more > 0 else "")
    head = ("Operation", "What", "Signal", "Line", "Runs", "Longest", "Mean", "In all", "Of all")
    shown = table("longest operations", head, rows, numbers=range(4, 9))
    return element("div", element("p", says, class_="says"), shown)


def _operation(each: Sum, whole: float) -> list[Child]:
    what = each.collective.replace("_", "-") or "computes"
    chosen = element("button", each.op, type="button", class_="name", data_op=each.op, data_program=each.program,
                     aria_pressed="false")  # fmt: skip
    return [
        chosen,
        [element("span", what, class_=f"what {each.kind}"), element("span", each.phase, class_="via")],
        "–" if each.signal == "-" else breakable(each.signal),
        element("span", each.line or "–", class_="place"),
        f"{each.runs:,}",
        span(each.longest),
        span(each.total / each.runs),
        span(each.total),
        share(each.total, whole),
    ]


def _or_none(time: float) -> str:
    return span(time) if time else "–"


def _told(drawn: Drawing) -> dict[str, object]:
    """What the script draws: each list has one entry for each event."""
    kinds: dict[tuple[str, ...], int] = {}
    which = [
        kinds.setdefault((bar.op, bar.kind, bar.collective, bar.signal, bar.phase, bar.line, bar.program), len(kinds))
        for bar in drawn.bars
    ]
    return {
        "lanes": [{"name": lane.name, "rows": lane.rows} for lane in drawn.lanes],
        "steps": [[window.step, round(window.start), round(window.end)] for window in drawn.steps],
        "length": drawn.length,
        "kinds": list(kinds),
        "kind": which,
        "lane": [bar.lane for bar in drawn.bars],
        "row": [bar.row for bar in drawn.bars],
        "step": [bar.step for bar in drawn.bars],
        "start": [_short(bar.start) for bar in drawn.bars],
        "duration": [_short(bar.duration) for bar in drawn.bars],
    }


def _short(nanoseconds: float) -> float | int:
    rounded = round(nanoseconds, 1)
    return int(rounded) if rounded.is_integer() else rounded


def _footer(drawn: Drawing) -> Markup:
    return element(
        "footer",
        element(
            "p",
            "An operation is one that XLA compiled and a device ran, under the name that the compiled program gives it. What "
            "signal it stands under is told by the name stack that the program was written under; of operations that were "
            "fused, by that of the last.",
        ),
        element(
            "p", f"jshard {__version__}. {len(drawn.bars):,} events were captured in the time shown, and each is a bar."
        ),
    )
