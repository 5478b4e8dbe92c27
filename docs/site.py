"""Pages of the site besides docs/: the README first, the keys of YAML, and the API."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import jshard
from jshard.cli.schema import page
from jshard.signals.schema import json_schema

ROOT = Path(__file__).parent.parent
RELATIVE = re.compile(r"\[([^]]+)\]\((?![a-z]+:|#)([^)#]+)[^)]*\)")


def on_files(files: Files, config: Any) -> Files:
    entries = [f"::: jshard.{name}\n" for name in dir(jshard) if name != "__version__"]
    pages = {
        "index.md": (ROOT / "README.md").read_text().replace("](docs/", "]("),
        "api.md": "# API\n\n" + "\n".join(entries),
        "yaml.md": page(json_schema()),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """A link to a file of the repository that is no page becomes its text and its path; one to nowhere stays, and fails."""

    def linked(found: re.Match[str]) -> str:
        from_docs = os.path.normpath(os.path.join(os.path.dirname(page.file.src_uri), found[2]))
        in_tree = ROOT / ("" if page.file.src_uri == "index.md" else "docs") / from_docs
        is_page = files.get_file_from_path(from_docs) is not None
        is_there = in_tree.exists() or (ROOT / "docs" / from_docs).exists()
        return found[0] if is_page or not is_there else f"{found[1]} (`{os.path.relpath(in_tree, ROOT)}`)"

    return RELATIVE.sub(linked, markdown)
