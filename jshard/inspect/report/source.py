"""The text of the configuration, with the cost of each line in the margin."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from jshard.errors import Location
from jshard.inspect.report.facts import AT_REST, Facts
from jshard.printing.markup import Markup, element, escaped
from jshard.printing.pages.shell import stack
from jshard.printing.pages.words import Colours, anchor, breakable, measured, times

WORD = re.compile(r"""(?P<text>"[^"]*"|'[^']*')|(?P<note>(?:^|(?<=\s))\#.*)|(?P<word>[A-Za-z_][\w.*/-]*)|(?P<rest>.)""")


@dataclasses.dataclass
class LineCost:
    """The cost of a line: bytes on the wire by mesh axis, the number of collectives, and bytes at rest."""

    wire: dict[str, int] = dataclasses.field(default_factory=dict)
    count: int = 0
    rest: int = 0

    @property
    def total(self) -> int:
        return sum(self.wire.values())


def costs(facts: Facts) -> dict[Location | None, LineCost]:
    """Return the cost of each line, by place without columns; None has the costs of no line."""
    found: dict[Location | None, LineCost] = {}

    def at(place: Location | None) -> LineCost:
        return found.setdefault(None if place is None else Location(place.source, place.line), LineCost())

    for line in facts.ledger:
        cost = at(line.place)
        name = line.mesh_axes[0]
        cost.wire[name] = cost.wire.get(name, 0) + line.total
        cost.count += line.count
    for array in facts.of(*AT_REST):
        at(array.place).rest += array.bytes_each
    return found


def source(facts: Facts, colours: Colours) -> Markup:
    found = costs(facts)
    most = max((cost.total for cost in found.values()), default=0) or 1
    blocks, shown = [], set()
    for name, lines in facts.texts.items():
        rows = []
        for number, line in enumerate(lines, 1):
            place = Location(name, number)
            shown.add(place)
            rows.append(_line(place, line, found.get(place), most, facts, colours))
        head = element("h3", breakable(name)) if len(facts.texts) > 1 else None
        blocks.append(element("div", head, element("ol", rows, class_="code"), class_="file"))
    elsewhere = {place: cost for place, cost in found.items() if place not in shown and (cost.count or cost.rest)}
    if elsewhere:
        blocks.append(
            element(
                "ul",
                [
                    element("li", element("span", _elsewhere(place), class_="quiet"), _margin(cost, most, colours))
                    for place, cost in elsewhere.items()
                ],
                class_="elsewhere",
            )
        )
    nothing = None if facts.texts else element("p", "There is no file of a configuration to show.", class_="quiet")
    return element("div", nothing, blocks, class_="source")


def _elsewhere(place: Location | None) -> str:
    return "no line asks for" if place is None else f"{place} asks for"


def _line(place: Location, line: str, cost: LineCost | None, most: int, facts: Facts, colours: Colours) -> Markup:
    margin = _margin(cost, most, colours) if cost is not None else None
    return element(
        "li",
        element("span", str(place.line), class_="no", aria_hidden="true"),
        element("code", list(_coloured(line, () if place in facts.settings else facts.mesh_axes, colours)) or " "),
        margin,
        id=anchor(place, facts.sources),
        class_="costs" if margin is not None else None,
    )


def _margin(cost: LineCost, most: int, colours: Colours) -> Markup | None:
    if not cost.count and not cost.rest:
        return None
    bar = stack([(f"fill {colours.of(name)}", total) for name, total in cost.wire.items()], most)
    wire = rest = None
    if cost.count:
        wire = element(
            "span",
            element("b", measured(cost.total, name="margin")),
            f" in {times(cost.count, 'collective')}",
            class_="wire",
        )
    if cost.rest:
        rest = element("span", measured(cost.rest), " at rest", class_="rest quiet")
    return element("span", bar if cost.count else None, wire, rest, class_="margin")


def _coloured(line: str, mesh_axes: tuple[str, ...], colours: Colours) -> Iterator[Markup]:
    """Yield a line of YAML: notes quiet, keys strong, mesh axes in their colour."""
    for part in WORD.finditer(line):
        text = part.group()
        bare = text.strip("\"'")
        if part.lastgroup == "note":
            yield element("span", text, class_="note")
        elif bare in mesh_axes:
            yield element("span", text, class_=f"ink {colours.of(bare)}")
        elif line[part.end() :].lstrip().startswith(":") and part.lastgroup in ("word", "text"):
            yield breakable(text, "key")
        else:
            yield Markup(escaped(text))
