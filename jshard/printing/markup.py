"""HTML and SVG as text in which whatever is not markup by construction is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

EMPTY = frozenset("br circle col hr input line meta path rect stop wbr".split())
# Characters that no text shows: a page with them would not be the text that it claims to be.
CONTROLS = dict.fromkeys([*range(0x00, 0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0)], "\ufffd")


class Markup(str):
    """Text that is markup already. Only this module and the page's own files make it."""

    __slots__ = ()


Child = str | int | None | Iterable[Any]


def escaped(text: object) -> str:
    """Text as the content of an element or of a quoted attribute."""
    shown = str(text).translate(CONTROLS).encode("utf-8", "replace").decode()
    return html.escape(shown, quote=True)


def element(name: str, /, *children: Child, **attributes: object) -> Markup:
    """`element("a", "see", href="#x", class_="name")`. None and False attributes are left out, True ones are bare, and
    underscores are dashes: `aria_label`. Two decimals of a coordinate are enough."""
    opened = name
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            opened += f" {key}"
        elif value is not None and value is not False:
            value = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
            opened += f' {key}="{escaped(value)}"'
    if name in EMPTY and not children:
        return Markup(f"<{opened}/>")
    return Markup(f"<{opened}>{joined(children)}</{name}>")


def joined(children: Iterable[Any]) -> Markup:
    """Children, one after another; lists among them are theirs."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, (str, int, float)):
            parts.append(escaped(child))
        else:
            parts.append(joined(child))
    return Markup("".join(parts))


def data(value: object, identity: str) -> Markup:
    """A value for the script to read: JSON that no text inside it can end."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace").decode()
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json" id="{identity}">{text}</script>')
