"""HTML and SVG as text; everything is escaped unless it is `Markup`."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

EMPTY = frozenset("br circle col hr input line meta path rect stop wbr".split())
# Control characters: invisible in a page, so they are replaced.
CONTROLS = dict.fromkeys([*range(0x00, 0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0)], "\ufffd")


class Markup(str):
    """Text that is already markup. Only this module and the page's own files create it."""

    __slots__ = ()


Child = str | int | None | Iterable[Any]


def escaped(text: object) -> str:
    """Return text escaped for an element or a quoted attribute."""
    shown = str(text).translate(CONTROLS).encode("utf-8", "replace").decode()
    return html.escape(shown, quote=True)


def element(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element: `element("a", "see", href="#x", class_="name")`. Attributes of None or False are
    left out, True is bare, and underscores are dashes: `aria_label`. Coordinates have two decimals."""
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
    """Join children; lists among them are flattened."""
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
    """Return a value as JSON for the page's script; no text inside can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace").decode()
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json" id="{identity}">{text}</script>')
