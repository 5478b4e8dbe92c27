"""`jshard schema`: the keys of a configuration, as JSON Schema for editors or as a page for readers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", action="store_true", help="print a page of Markdown instead: every key in a table")
    parser.epilog = None


def run(chosen: argparse.Namespace) -> int:
    from jshard.signals.schema import json_schema

    schema = json_schema()
    print(page(schema) if chosen.page else json.dumps(schema, indent=2))
    return 0


def page(schema: dict[str, Any]) -> str:
    """Return the reference of all keys in Markdown: those of a signal first."""
    parts = ["# Keys of a configuration", ""]
    for title, node in (("A signal", schema["$defs"]["signal"]), ("jshard", schema["properties"]["jshard"])):
        rows = dict.fromkeys(f"| `{key}` | {kind} | {text} |" for key, kind, text in _rows(node))
        parts += [f"## {title}", "", node["description"], "", "| key | values | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(parts).rstrip()


def _rows(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the path, the values and the description of each key, at any depth."""
    for each in (node, *node.get("anyOf", ())):
        for name, key in each.get("properties", {}).items():
            values = " or ".join(dict.fromkeys(_values(key))) or "a mapping"
            yield f"{prefix}{name}", values, key.get("description", "").replace("|", "\\|")
            yield from _rows(key, f"{prefix}{name}.")


def _values(key: dict[str, Any]) -> Iterator[str]:
    """Yield the values of a key, in words."""
    if "enum" in key or "const" in key:
        yield ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in key.get("enum", [key.get("const")]))
    elif "anyOf" in key:
        for each in key["anyOf"]:
            yield from _values(each if "type" in each or "anyOf" in each else {**key, **each, "anyOf": []})
    elif key.get("type") in ("object", None):
        yield "a mapping"
    else:
        words = {"array": "a list", "string": "text", "integer": "a whole number", "null": "`null`"}
        yield words.get(key["type"], f"a {key['type']}")
