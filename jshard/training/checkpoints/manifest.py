"""The manifest of a checkpoint: a JSON file beside the arrays, with a checksum of every file and of itself.

A folder is a checkpoint if it holds this file. Nothing in it is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jshard.runs.names import MANIFEST

FORMAT = 1


class Damaged(Exception):
    """A fault of a checkpoint, as the end of a sentence."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    step: int
    position: Mapping[str, Any]  # in the data, after the step
    arrays: Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype
    files: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)  # path -> bytes, SHA-256

    def write(self, folder: Path) -> None:
        """Write the manifest with the checksums of all files in `folder`; on return all files are on disk."""
        files = {str(path.relative_to(folder)): _digest(path, flush=True) for path in _files(folder)}
        fields = {**dataclasses.asdict(dataclasses.replace(self, files=files)), "format": FORMAT}
        fields["sha256"] = _own(fields)
        with (folder / MANIFEST).open("w") as file:
            json.dump(fields, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        for parent in {path.parent for path in _files(folder)}:
            flush(parent)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest and check its own checksum, not yet the other files."""
        try:
            fields = json.loads((folder / MANIFEST).read_bytes())
            own = fields.pop("sha256")
        except FileNotFoundError:
            raise Damaged(f"is half-written: it has no {MANIFEST}") from None
        except (ValueError, KeyError, AttributeError, TypeError):
            raise Damaged(f"is damaged: {MANIFEST} is cut off or changed") from None
        if own != _own(fields):
            raise Damaged(f"is damaged: {MANIFEST} is cut off or changed")
        if fields.pop("format") != FORMAT:
            raise Damaged("was written by another release of jshard, whose format this one does not know")
        arrays = {name: (tuple(shape), dtype) for name, (shape, dtype) in fields.pop("arrays").items()}
        files = {path: (size, digest) for path, (size, digest) in fields.pop("files").items()}
        return cls(**fields, arrays=arrays, files=files)

    def check_files(self, folder: Path) -> None:
        """Raise `Damaged` if a file is missing or differs from the manifest in size or checksum."""
        for name, (size, digest) in self.files.items():
            path = folder / name
            if not path.is_file():
                raise Damaged(f"is damaged: {name} is missing")
            if (here := path.stat().st_size) != size:
                raise Damaged(f"is damaged: {name} has {here:,} of its {size:,} bytes")
            if _digest(path)[1] != digest:
                raise Damaged(f"is damaged: the bytes of {name} are not those that were saved")


def flush(folder: Path) -> None:
    """Write a folder's directory entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def _digest(path: Path, *, flush: bool = False) -> tuple[int, str]:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _own(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
