"""The shell of jshard's pages: a single HTML file with a bar, sections and tiles. Its one style and
one script are allowed by their hashes; it has no network access and no inline handlers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from jshard.errors import refused
from jshard.printing.markup import Child, Markup, element
from jshard.version import __version__

HERE = Path(__file__).parent
Figure = tuple[str, Child, Child]  # name, figure, description


def document(
    title: str,
    command: str,
    *,
    skip: tuple[str, str],
    links: Iterable[tuple[str, str]],
    about: str,
    figures: Iterable[Figure],
    sections: Iterable[Markup | None],
    footer: Sequence[str],
    more: Iterable[Markup] = (),
    styles: Iterable[Path] = (),
    scripts: Iterable[Path] = (),
) -> str:
    """Return the whole page of a command. `skip` and `links` are words with their targets. The last sentence of
    `footer` follows the version. Styles and scripts follow those of all pages; `more` is markup for the scripts."""
    style = _joined([HERE / "style.css", *styles])
    script = _joined([HERE / "theme.js", *scripts])
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"jshard {__version__}"),
        element("title", f"{title} · jshard {command}"),
        element("style", Markup(style)),
    )
    tiles = element(
        "dl",
        [
            element("div", element("dt", name), element("dd", value), element("dd", says, class_="quiet"))
            for name, value, says in figures
        ],
        class_="tiles",
    )
    shown = element("p", about, class_="about") if about else None
    opening = element("div", element("h1", title), shown, tiles, class_="opening")
    *notes, last = footer
    body = element(
        "body",
        element("a", skip[0], href=skip[1], class_="skip"),
        _bar(links),
        element("main", opening, sections),
        element("footer", [element("p", words) for words in (*notes, f"jshard {__version__}. {last}")]),
        more,
        element("script", Markup(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def framed(page: str) -> Markup:
    """Return a page as a part of a notebook, apart from the notebook's scripts and styles."""
    style = "width: 100%; height: 80vh; border: 0"
    return element("iframe", srcdoc=page, sandbox="allow-scripts", style=style)


def write(target: Path, content: bytes, what: str, option: str) -> Path:
    with refused(f"{what} can't be written to {target}", hint=f"name another file by {option}"):
        target.write_bytes(content)
    return target


def _joined(files: Iterable[Path]) -> str:
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _bar(links: Iterable[tuple[str, str]]) -> Markup:
    """Return the bar at the top: links to the sections, and the choice of light or dark."""
    return element(
        "header",
        element("span", "jshard", class_="brand"),
        element("nav", [element("a", word, href=target) for word, target in links], aria_label="sections"),
        element(
            "button",
            element("span", "Theme: ", class_="long"),
            element("span", "auto", id="theme-word"),
            type="button",
            id="theme",
            class_="plain",
        ),
        class_="bar",
    )


def section(identity: str, title: str, says: str | None, *content: Markup | None) -> Markup:
    heading = f"{identity}-title"
    words = element("p", says, class_="says") if says else None
    return element("section", element("h2", title, id=heading), words, content, id=identity, aria_labelledby=heading)


def stack(parts: Iterable[tuple[str, float]], total: float, *, track: bool = False) -> Markup:
    """Draw lengths end to end from zero, scaled to `total` = 1000: a class and a length each."""
    x, drawn = 0.0, [element("rect", width=1000, height=16, class_="track")] if track else []
    for class_, length in parts:
        width = 1000 * length / total if total else 0.0
        if length:
            drawn.append(element("rect", x=x, width=max(5.0, width - 1.5), height=16, class_=class_))
        x += width
    box = {"viewBox": "0 0 1000 16", "preserveAspectRatio": "none"}
    return element("svg", drawn, **box, class_="split", aria_hidden="true")


def legend(entries: Iterable[tuple[str, Child, Child]]) -> Markup:
    """Return the legend of colours: class, name and number of each."""
    return element(
        "ul",
        [
            element("li", element("span", class_=f"swatch {class_}"), name, element("b", number))
            for class_, name, number in entries
        ],
        class_="legend",
    )


def table(
    label: str,
    head: Sequence[str],
    rows: Iterable[Iterable[Child]],
    *,
    numbers: Collection[int],
) -> Markup:
    """Return a table with a scrollbar for narrow windows, and its columns `numbers` to the right."""

    def row(words: Iterable[Child], heads: int, scope: str) -> Markup:
        cells = []
        for at, word in enumerate(words):
            class_ = "n" if at in numbers else None
            if at < heads:
                cells.append(element("th", word, class_=class_, scope=scope))
            else:
                cells.append(element("td", word, class_=class_))
        return element("tr", cells)

    made = element(
        "table",
        element("thead", row(head, len(head), "col")),
        element("tbody", [row(words, 1, "row") for words in rows]),
        class_="plain-table",
    )
    return element("div", made, class_="scroller", tabindex=0, role="region", aria_label=label)
