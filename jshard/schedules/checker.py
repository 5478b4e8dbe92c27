"""Reading a table written by hand, and checking its order and completeness."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jshard.errors import JShardError, quoted, refused
from jshard.schedules.table import SLOTS, Op, StageOp, Table, counted, key_of, needs

OP = re.compile(r"([FBW])([0-9]{1,6})(?:\.([0-9]{1,3}))?")
TICK = re.compile(rf"\.|(?:{OP.pattern})+")


class Word(NamedTuple):
    """An operation with its place in the file."""

    op: Op
    stage: int
    tick: int
    place: str  # mine.txt:3:12
    text: str  # as written

    @property
    def subject(self) -> str:
        return f'"{self.text}" ({self.place})'


def load(path: str | Path) -> Table:
    """Read and check the table in a file."""
    with refused(f"the table {path} can't be read", hint="name a file with a row for each stage, as F0 F1 B0 B1"):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    return read(text, str(path))


def read(text: str, source: str) -> Table:
    """Read a table from `text`: a row for each stage, and # begins a remark; see `Table` for its meaning.

    Every microbatch must go forward and back through every chunk of every stage once, and an operation must follow
    its inputs. Raises JShardError only for the first fault, with its line and column: others often follow from it.
    """
    rows = [_row(line, number, source) for number, line in enumerate(text.split("\n"), 1)]
    rows = [row for row in rows if row]
    if not rows:
        raise JShardError(f"the table ({source}:1:1) has no row", hint="write one for each stage, as F0 F1 B0 B1")
    ends = [_after(row[-1], source) for row in rows]
    ticks = [(stage, tick, found) for stage, row in enumerate(rows) for tick, found in enumerate(row)]
    words = [word for stage, tick, found in ticks for word in _ops(found, stage, tick, source)]
    _nothing_twice(words, len(rows))
    by_key = {key_of(word.op, word.stage, len(rows)): word for word in words}
    _nothing_missing(by_key, ends)
    _in_order(by_key, len(rows))
    return Table.of(source, len(rows), {key: word.tick for key, word in by_key.items()})


Found = tuple[int, "re.Match[str]"]  # a line's number, and a word in it


def _row(line: str, number: int, source: str) -> list[Found]:
    row = [(number, found) for found in re.finditer(r"\S+", line.partition("#")[0])]
    for _, found in row:
        if not TICK.fullmatch(found[0]):
            raise JShardError(
                f"{quoted(found[0])} ({source}:{number}:{found.start() + 1}) is no tick",
                hint="write F3, B3 or W3 for microbatch 3, F3.1 for its chunk 1, F4B3 for both, or . to wait",
            )
    return row


def _after(found: Found, source: str) -> str:
    """Return the place after a word."""
    return f"{source}:{found[0]}:{found[1].end() + 1}"


def _ops(found: Found, stage: int, tick: int, source: str) -> Iterator[Word]:
    number, word = found
    slots = ""
    for each in OP.finditer(word[0]):
        place = f"{source}:{number}:{word.start() + each.start() + 1}"
        at = Word(Op(each[1], int(each[2]), int(each[3] or 0)), stage, tick, place, each[0])
        if each[1] in slots:
            fault = f"{at.subject} is the second {each[1]} in tick {tick} of stage {stage}"
            raise JShardError(fault, hint="put it in another tick")
        if slots and SLOTS.index(each[1]) < SLOTS.index(slots[-1]):
            fault = f"{at.subject} follows a {slots[-1]}, but a tick runs F, then B, then W"
            raise JShardError(fault, hint=f"write it before the {slots[-1]}")
        slots += each[1]
        yield at


def _nothing_twice(words: list[Word], stages: int) -> None:
    first: dict[StageOp, Word] = {}
    for word in words:
        before = first.setdefault(key_of(word.op, word.stage, stages), word)
        if before is not word:
            raise JShardError(
                f"{word.subject} runs a second time on stage {word.stage}, after tick {before.tick}",
                hint="remove one of them",
            )


def _nothing_missing(by_key: dict[StageOp, Word], ends: list[str]) -> None:
    """Check for every chunk of every microbatch on every stage, in each slot used by the table."""
    stages = len(ends)
    slots = SLOTS if any(key.slot == "W" for key in by_key) else SLOTS[:2]
    microbatches = 1 + max((key.microbatch for key in by_key), default=0)
    chunks = 1 + max((word.op.chunk for word in by_key.values()), default=0)
    for microbatch in range(microbatches):
        for virtual in range(chunks * stages):
            for slot in slots:
                if (key := StageOp(slot, microbatch, virtual)) not in by_key:
                    stage, op = virtual % stages, Op(slot, microbatch, virtual // stages)
                    before = [by_key[each].tick + lag for each, lag in needs(key, chunks * stages) if each in by_key]
                    of = f"{counted(microbatches, 'microbatch')} and {counted(chunks, 'chunk')}"
                    raise JShardError(
                        f"stage {stage} ({ends[stage]}) has no {op}, of {of}",
                        hint=f"write it in tick {max(before, default=0)} or later",
                    )


def _in_order(by_key: dict[StageOp, Word], stages: int) -> None:
    virtual_stages = 1 + max(key.virtual for key in by_key)
    for key, word in sorted(by_key.items(), key=lambda each: (each[1].tick, SLOTS.index(each[0].slot), each[1].stage)):
        for needed, lag in needs(key, virtual_stages):
            other = by_key[needed]
            if word.tick < other.tick + lag:
                whose = f"of stage {other.stage}" if other.stage != word.stage else "of its own stage"
                raise JShardError(
                    f"{word.subject} runs in tick {word.tick} of stage {word.stage}, but needs {other.op} {whose}, which runs "
                    f"in tick {other.tick}",
                    hint=f"move it to tick {other.tick + lag} or later",
                )
