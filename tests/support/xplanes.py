"""Captures written by hand, as JAX's profiler writes them for devices that are not here."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

Field = tuple[int, int | str | bytes]


def message(*fields: Field) -> bytes:
    """A protocol buffer of these fields."""
    written = []
    for number, value in fields:
        if isinstance(value, int):
            written += [digits(number << 3), digits(value % 2**64)]
        else:
            content = value.encode() if isinstance(value, str) else value
            written += [digits(number << 3 | 2), digits(len(content)), content]
    return b"".join(written)


def digits(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    return bytes((*written, number))


@dataclasses.dataclass(frozen=True)
class Op:
    """An event: its name, when it begins and how long it takes in nanoseconds, and what is said of it."""

    name: str
    start: float
    duration: float
    stats: Mapping[str, int | str] = dataclasses.field(default_factory=dict)


def plane(name: str, lines: Mapping[str, Iterable[Op]], begin: int = 1_000, **said: str) -> bytes:
    """A plane; `begin` is the time that its lines count from, in nanoseconds."""
    words: dict[str, int] = {}
    kinds: dict[str, int] = {}

    def stat(key: str, value: int | str) -> bytes:
        word = (1, words.setdefault(key, len(words) + 1))
        if isinstance(value, int):
            return message(word, (4, value))
        shared = words.setdefault(value, len(words) + 1)
        return message(word, (7, shared)) if len(value) % 2 else message(word, (5, value))  # as texts come in both ways

    written = []
    for line, ops in lines.items():
        events = [
            message(
                (1, kinds.setdefault(op.name, len(kinds) + 1)),
                (2, round(op.start * 1000)),
                (3, round(op.duration * 1000)),
                *((4, stat(key, value)) for key, value in op.stats.items()),
            )
            for op in ops
        ]
        written.append(message((1, 7), (2, line), (3, begin), *((4, event) for event in events)))
    about = [(6, stat(key, value)) for key, value in said.items()]
    return message(
        (2, name),
        *((3, line) for line in written),
        *((4, message((1, number), (2, message((1, number), (2, kind))))) for kind, number in kinds.items()),
        *((5, message((1, number), (2, message((1, number), (2, word))))) for word, number in words.items()),
        *about,
    )


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    stack: str = ""
    calls: tuple[int, ...] = ()  # computations by their numbers
    groups: tuple[Field, ...] = ()  # of the devices that a collective joins, as fields of the instruction


def programs(
    *more: tuple[str, Mapping[int, Iterable[Instruction]]], **modules: Mapping[int, Iterable[Instruction]]
) -> bytes:
    """The plane that holds compiled programs, numbered from 1: computations by their numbers, of instructions."""
    kinds = []
    for number, (name, computations) in enumerate([*modules.items(), *more], 1):
        bodies = [
            message((1, f"c{identity}"), *((2, _instruction(each)) for each in body), (5, identity))
            for identity, body in computations.items()
        ]
        proto = message((1, message((1, name), *((3, body) for body in bodies))))
        stats = [(5, message((1, 1), (6, proto))), (5, message((1, 2), (3, number)))]
        kinds.append((4, message((1, number), (2, message((1, number), (2, f"{name}({number})"), *stats)))))
    words = [
        (5, message((1, number), (2, message((1, number), (2, word)))))
        for number, word in enumerate(("Hlo Proto", "program_id"), 1)
    ]
    return message((2, "/host:metadata"), *kinds, *words)


def _instruction(each: Instruction) -> bytes:
    called = [(38, b"".join(map(digits, each.calls)))] if each.calls else []
    unused = [(99, struct.pack("<d", 1.0))]  # a field that nobody reads
    return message((1, each.name), (2, each.opcode), (7, message((2, each.stack))), *called, *each.groups, *unused)


def write(folder: Path, *planes: bytes) -> Path:
    """A capture as JAX lays it down."""
    where = folder / "plugins/profile/2026_01_01_00_00_00"
    where.mkdir(parents=True)
    (where / "host.xplane.pb").write_bytes(message(*((1, each) for each in planes)))
    return folder
