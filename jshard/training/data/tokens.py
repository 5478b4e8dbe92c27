"""Tokenizers: UTF-8 bytes, or a tokenizer.json of the tokenizers library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jshard.errors import JShardError, did_you_mean, quoted, refused
from jshard.training.settings import Settings

BYTES = "bytes"


class Bytes:
    """UTF-8 bytes as tokens; byte 0 ends a document, because text has no byte 0.

    `vocabulary` is the largest token + 1, and `end` the token after each document. Tokenizers with different tokens have
    different `identity`. A document is given in pieces of at most `piece` bytes; -1 means whole.
    """

    vocabulary, end, identity, piece = 256, 0, BYTES, 1 << 20

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token != self.end).decode(errors="replace")


class Library:
    """A tokenizer.json without its template's special tokens; documents end with `end`, if it is given."""

    piece = -1  # a token may cross any cut, so documents are given whole

    def __init__(self, path: str, label: str, end: str | None, end_label: str):
        try:
            from tokenizers import Tokenizer as Read  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise JShardError(
                f"{label}, and the library tokenizers, which reads it, is not installed",
                hint='type: pip install "jshard[text]"',
            ) from error
        with refused(f"{label}, which can't be read", hint=f"write tokens: {BYTES}, or the tokenizer.json of a model"):
            written = Path(path).read_bytes()
        try:
            self.tokenizer = Read.from_buffer(written)
        except Exception as error:  # it raises no class of its own
            raise JShardError(
                f"{label}, which is no tokenizer: {' '.join(str(error).split())[:200]}",
                hint="name a tokenizer.json of the tokenizers library",
            ) from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        numbers = self.tokenizer.get_vocab(with_added_tokens=True)
        if end is not None and end not in numbers:
            known = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
            raise JShardError(
                f"{end_label} is {quoted(end)}, and {path} has no such token",
                hint=did_you_mean(end, known, f"use {' or '.join(known[:3])}" if known else "remove it"),
            )
        self.vocabulary = max(numbers.values()) + 1
        self.end = None if end is None else numbers[end]
        self.identity = f"{hashlib.sha256(written).hexdigest()} {self.end}"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.asarray(each.ids, np.uint32) for each in self.tokenizer.encode_batch(texts, add_special_tokens=False)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(map(int, tokens)))


Tokenizer = Bytes | Library


def tokenizer(settings: Settings) -> Tokenizer:
    """Return the tokenizer named in `jshard.train.data`, by default bytes."""
    table = settings.table("data")
    name, end = table.get("tokens", BYTES), table.get("end")
    end_label = settings.label("data.end")
    if name != BYTES:
        return Library(name, f'{settings.label("data.tokens")} is "{name}"', end, end_label)
    if end is not None:
        raise JShardError(f"{end_label} is {quoted(end)}, but with bytes as tokens 0 ends a document", hint="remove it")
    return Bytes()
