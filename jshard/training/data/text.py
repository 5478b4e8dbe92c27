"""Text to train on: tokenized once into memory-mapped files, and cut into rows of a fixed length.

A row may hold parts of several documents. `segments` numbers them from 1 in each row, so that attention stays within a
document; `positions` counts from the document's first token in the row. An incomplete last row is dropped.
"""

from __future__ import annotations

import array
import codecs
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jshard.errors import JShardError, quoted, refused
from jshard.inspect.plan import cache
from jshard.training.data.sources import Batch
from jshard.training.data.tokens import Tokenizer, tokenizer
from jshard.training.settings import LENGTH, Settings
from jshard.training.telemetry.progress import byte_bar

FORMAT = 1  # of the files; a change makes all caches stale
TOGETHER, BYTES_TOGETHER = 256, 4 << 20  # documents and bytes in one call of a tokenizer, for its threads


@dataclasses.dataclass(frozen=True)
class Packed:
    """The `chosen` rows of `length` consecutive tokens each in `tokens`; documents begin at `starts`."""

    tokens: np.ndarray
    starts: np.ndarray
    length: int
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, rows: np.ndarray) -> Batch:
        at = self.chosen[rows][:, None] * self.length + np.arange(self.length + 1)
        document = np.searchsorted(self.starts, at, side="right")
        tokens = self.tokens[at].astype(np.int32)
        begin = np.maximum(self.starts[document - 1], at[:, :1])
        parts = {"tokens": tokens, "positions": at - begin, "segments": document - document[:, :1] + 1}
        x = {name: part[:, :-1].astype(np.int32) for name, part in parts.items()}
        return x, np.where(document[:, 1:] == document[:, :-1], tokens[:, 1:], -1).astype(np.int32)


def packed_rows(settings: Settings, *, only_shapes: bool = False) -> dict[str, Packed]:
    """Return the rows of `jshard.train.data`'s text to train on, "train", and the held-out rows,
    "test". With `only_shapes`, return a row of zeros and read no text."""
    table, numbering = settings.table("data"), tokenizer(settings)
    length, part = table.get("length", LENGTH), table.get("held_out")
    if only_shapes:
        tokens = np.zeros(length + 1, np.uint8)
        return {"train": Packed(tokens, np.zeros(1, np.int64), length, np.arange(1))}
    train = _rows(settings, "text", numbering, length)
    if part is None:
        return {"train": train}
    if isinstance(part, str):
        return {"train": train, "test": _rows(settings, "held_out", numbering, length)}
    # Held-out rows are spread evenly over the text, because its last pages may be an index.
    numbers = np.arange(len(train) + 1)
    is_held = np.diff(np.floor(numbers * part)) > 0
    if is_held.all() or not is_held.any():
        raise JShardError(
            f"{settings.label('data.held_out')} is {part:g}, which is "
            f"{is_held.sum():,} of {len(train):,} rows of {length:,} tokens",
            hint=f"use {max(1 / len(train), 0.05):.2g} to 0.5" if len(train) > 1 else "give more text",
        )
    rows = {"train": numbers[:-1][~is_held], "test": numbers[:-1][is_held]}
    return {name: dataclasses.replace(train, chosen=chosen) for name, chosen in rows.items()}


def _rows(settings: Settings, key: str, numbering: Tokenizer, length: int) -> Packed:
    path = settings.table("data")[key]
    tokens, starts = _tokens(settings, key, Path(path), numbering)
    if len(tokens) <= length:
        place = settings.place("data.length") if "length" in settings.table("data") else settings.place("data")
        raise JShardError(
            f"jshard.train.data.length ({place}) is {length:,}, and {path} has {len(tokens):,} tokens",
            hint=f"use {len(tokens) - 1:,} or less, or give more text" if len(tokens) > 1 else "give more text",
        )
    return Packed(tokens, starts, length, np.arange((len(tokens) - 1) // length))


def _tokens(settings: Settings, key: str, path: Path, numbering: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Map a text's tokens and document starts into memory; the first process to call writes the files."""
    label = f'{settings.label(f"data.{key}")} is "{path}"'
    made_by = settings.table("data").get("made_by", "")  # of this text, unless an override names another
    files = _files(path, label, f"type: {made_by}" if str(path) in made_by else "name a file or a folder of text")
    about = [(str(file.relative_to(path)), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    key_of = hashlib.sha256(json.dumps([FORMAT, numbering.identity, about]).encode()).hexdigest()[:16]
    beside = Path(settings["output"]) if settings["output"] else cache.folder()
    kept = Path(settings.table("data").get("cache") or beside.parent / "tokens")
    folder = kept / f"{path.absolute().name}-{key_of}"
    with refused(f'tokens are kept in "{kept}", which can\'t be written to', hint="write cache: and another folder"):
        if not folder.exists():
            with _alone(kept):
                if not folder.exists():  # another process may have written it meanwhile
                    _write(folder, files, numbering, label)
        tokens = np.memmap(folder / "tokens", _dtype(numbering), mode="r")
        return tokens, np.load(folder / "documents.npy", mmap_mode="r")


def _dtype(numbering: Tokenizer) -> np.dtype:
    return np.min_scalar_type(numbering.vocabulary - 1)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes; the end of a process releases its lock."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _write(folder: Path, files: list[Path], numbering: Tokenizer, label: str) -> None:
    """Tokenize all documents, each with its end token, into a folder; it appears once complete."""
    starts, count, dtype = array.array("q"), 0, _dtype(numbering)
    end = np.array([] if numbering.end is None else [numbering.end], dtype)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        total = sum(file.stat().st_size for file in files)
        with byte_bar(f"numbering {folder.name}", total) as advance, (made / "tokens").open("wb") as out:
            begins = True
            for together in _together(_pieces(files, label, numbering.piece)):
                for piece, numbers in zip(together, numbering.encode([each.text for each in together]), strict=True):
                    if begins:
                        starts.append(count)
                    begins = piece.ends
                    written = np.concatenate([numbers.astype(dtype), end if begins else end[:0]])
                    out.write(written.tobytes())
                    count += len(written)
                    advance(piece.size)
        np.save(made / "documents.npy", np.array(starts, np.int64))
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made)
        raise


def _files(path: Path, label: str, hint: str) -> list[Path]:
    if not path.exists():
        raise JShardError(f"{label}, which is not there", hint=hint)
    every = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in every if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not any(file.stat().st_size for file in files):
        raise JShardError(f"{label}, which holds no text", hint=hint)
    return files


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of a document's text, its size in bytes in the file, and whether the document `ends` with it."""

    text: str
    size: int
    ends: bool = True


def _pieces(files: list[Path], label: str, most: int) -> Iterator[_Piece]:
    """Yield the pieces of each document: a file in pieces of `most` bytes, or a line of a .jsonl."""
    for file in files:
        with file.open("rb") as opened:
            if file.suffix == ".jsonl":
                for number, line in enumerate(opened, 1):
                    if text := _text_of(line, file, number, label):
                        yield _Piece(text, len(line))
                continue
            decoder, number, read = codecs.getincrementaldecoder("utf-8")(), 1, opened.read(most)
            while read:
                after = opened.read(most)
                decode = functools.partial(decoder.decode, final=not after)
                yield _Piece(_text(read, file, number, label, decode), len(read), ends=not after)
                number, read = number + read.count(b"\n"), after


def _together(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    together: list[_Piece] = []
    for piece in pieces:
        together.append(piece)
        if len(together) == TOGETHER or sum(piece.size for piece in together) >= BYTES_TOGETHER:
            yield together
            together = []
    if together:
        yield together


def _text(written: bytes, file: Path, line: int, label: str, decode: Callable[[bytes], str] = bytes.decode) -> str:
    try:
        text, at = decode(written), written.find(0)
    except UnicodeDecodeError as error:
        text, at, written = "", error.start, error.object  # begins with the undecoded end of the piece before
    if at >= 0:
        line += written[:at].count(b"\n")
        raise JShardError(
            f"{label}, and {file}:{line} is not UTF-8 text: it holds the byte 0x{written[at]:02x}",
            hint=f"leave it out, or convert it: iconv -f LATIN1 -t UTF-8 {file.name}",
        )
    return text


def _text_of(line: bytes, file: Path, number: int, label: str) -> str:
    try:
        value: Any = json.loads(_text(line, file, number, label)) if line.strip() else {"text": ""}
    except json.JSONDecodeError:
        value = None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise JShardError(
            f"{label}, and {file}:{number} is {quoted(line.decode().strip(), 30)}, which is no document",
            hint='write each as {"text": "..."}',
        )
    return text
