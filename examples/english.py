"""English to learn: what Python's own `help()` says of its language, 0.5 MB, a file for each of some 80 topics.

python -m examples.english runs/english
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in topics.items():
        Path(folder, f"{name}.txt").write_text(text, encoding="utf-8")
    print(f"{folder}: {len(topics)} documents, {sum(map(len, topics.values())):,} letters")


if __name__ == "__main__":
    main(*sys.argv[1:])
