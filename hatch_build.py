"""The README for a package index, where no file of the repository is: a link to one becomes its text and its path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"\[([^]]+)\]\((?![a-z]+:|#)([^)#]+)[^)]*\)")


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": RELATIVE.sub(r"\1 (\2)", text)}
