"""What a checkpoint says of itself: a text file beside the arrays, with the checksum of every other file and its own.

A folder is a checkpoint when this file is in it. Nothing here is ever executed: it is JSON.
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
    """What is wrong with a checkpoint, as the end of a sentence."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    step: int
    position: Mapping[str, Any]  # in the data, behind that step
    arrays: Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype
    files: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)  # path -> bytes, SHA-256

    def write(self, folder: Path) -> None:
        """Write the checksums of all files in `folder`, and this beside them; all of it is on the disk when it returns."""
        files = {str(path.relative_to(folder)): _digest(path, flush=True) for path in _files(folder)}
        fields = {**dataclasses.asdict(dataclasses.replace(self, files=files)), "format": FORMAT}
        fields["sha256"] = _own(fields)
        with (folder / MANIFEST).open("w") as file:
            json.dump(fields, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        for each in {path.parent for path in _files(folder)}:
            flush(each)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the file and check it itself, and not yet the others."""
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
        """Check that every file is there, as long as it was and with the bytes that it had."""
        for name, (size, digest) in self.files.items():
            path = folder / name
            if not path.is_file():
                raise Damaged(f"is damaged: {name} is missing")
            if (here := path.stat().st_size) != size:
                raise Damaged(f"is damaged: {name} has {here:,} of its {size:,} bytes")
            if _digest(path)[1] != digest:
                raise Damaged(f"is damaged: the bytes of {name} are not those that were saved")


def flush(folder: Path) -> None:
    """Write the names in a folder to the disk."""
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
