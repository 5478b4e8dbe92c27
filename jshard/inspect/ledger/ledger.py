"""The ledger: the collectives of a jaxpr, each with its YAML line, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping

from jshard.inspect.ledger.claimed import Claimed
from jshard.inspect.ledger.entries import ChosenStrategy, Left, Line, Staged, Unused, document_of, joined
from jshard.inspect.ledger.jaxpr_walk import walk
from jshard.inspect.ledger.memory import KINDS, Resident
from jshard.inspect.ledger.whole import Unsplit
from jshard.inspect.ledger.why import why
from jshard.layers.partition import Program
from jshard.layers.roles import Placed
from jshard.printing.table import Block, Rows, Shown, as_text
from jshard.printing.units import exact_size
from jshard.programs.jaxprs import Jaxpr, pruned

SCHEMA = "jshard.explain/1"

NUMBERS = (5, 7)  # the right-aligned columns of `cells`


@dataclasses.dataclass(frozen=True, repr=False)
class Ledger(Shown):
    """All collectives of a program, in program order. It prints as a table; its sums are bytes on the wire per device."""

    lines: tuple[Line, ...]
    choices: tuple[ChosenStrategy, ...] = ()
    unused: tuple[Unused, ...] = ()
    left: tuple[Left, ...] = ()  # operations that the compiler moves data for unasked; not in the sums
    memory: tuple[Resident, ...] = ()  # bytes held between training steps; empty without an optimizer
    placed: Mapping[str, Placed] = dataclasses.field(default_factory=dict, repr=False, compare=False)  # by path
    programs: tuple[Program, ...] = dataclasses.field(default=(), repr=False, compare=False)  # the planned ones
    claims: tuple[Claimed, ...] = ()  # the claims of a model, and the layouts of its parameters
    unsplit: tuple[Unsplit, ...] = ()  # whole parameters under a signal that would split them
    is_auto: bool = False  # whether arrays are on Auto axes, where the compiler adds its own collectives
    compiler: str = ""  # the compiler whose added collectives are in `lines`: XLA for CPU
    stages: tuple[Staged, ...] = ()  # the schedules of its pipelines

    def why(self, word: str) -> str:
        """Return why a parameter (`blocks/*/up/kernel`) has its layout, or how a line's equations (`model.py:31`) run."""
        return why(self.claims, self.programs, word)

    @property
    def total(self) -> int:
        """Bytes on the wire per device. Every branch of a cond counts, and one trip of a while loop."""
        return sum(line.total for line in self.lines)

    @property
    def count(self) -> int:
        """The number of collectives, all runs counted."""
        return sum(line.count for line in self.lines)

    @property
    def held(self) -> int:
        """Bytes at rest on each device."""
        return sum(rest.total for rest in self.memory)

    def by(self, key: str) -> dict[str, int]:
        """Return bytes on the wire by `signal`, `phase`, `collective`, `axis`, `line` or any other column."""
        return self._sums(key, "total")

    def counts(self, key: str = "collective") -> dict[str, int]:
        """Return the number of collectives, by the keys of `by`."""
        return self._sums(key, "count")

    def _sums(self, key: str, number: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        for line in self.lines:
            value = getattr(line, key)
            word = ", ".join(value) if isinstance(value, tuple) else str(value)
            sums[word] = sums.get(word, 0) + getattr(line, number)
        return sums

    def only(self, **columns: object) -> Ledger:
        """Return the lines with these values in their columns: `ledger.only(signal="layer1", phase="backward")`."""

        def alike(entry: Line | Left) -> bool:
            return all(getattr(entry, name, None) == value for name, value in columns.items())

        lines, left = tuple(filter(alike, self.lines)), tuple(filter(alike, self.left))
        return Ledger(lines, left=left, is_auto=self.is_auto, compiler=self.compiler)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def blocks(self) -> Iterator[Block]:
        idle = [line for line in self.lines if line.group < 2]
        shown = joined(self.lines, lambda line: (line.once(shape=None, primitive=None), line.via))  # blocks repeat
        yield Rows([line.cells() for line in shown if line.group >= 2], NUMBERS)
        if idle:
            names = ", ".join(dict.fromkeys(line.axis for line in idle))
            yield f"{_counted(sum(line.count for line in idle))} over {names}, of one device: nothing on the wire"
        for each in self.stages:
            yield from each.says
        yield from map(str, (*self.left, *self.choices, *self.unused, *self.unsplit))
        if self.claims:
            yield Rows([claim.cells() for claim in self.claims])
        if self.memory:
            yield Rows([_memory_cells(rest) for rest in self.memory], (3, 4, 5, 6, 7))
            yield self.memory_summary()
        yield self.summary()

    def text_by(self, key: str) -> str:
        """Return a row for each `signal`, mesh `axis` or YAML `line`: collectives, wire and, by signal or line, memory."""
        wire, counts, memory = self.by(key), self.counts(key), dict[str, int]()
        for rest in self.memory if key in ("signal", "line") else ():
            word = {"signal": rest.signal, "line": str(rest.place or "-")}[key]
            memory[word] = memory.get(word, 0) + rest.total
        rows = [
            (
                word,
                _counted(counts.get(word, 0)),
                f"{wire.get(word, 0):,} B on the wire",
                f"{memory[word]:,} B at rest" if word in memory else "",
            )
            for word in dict.fromkeys((*wire, *memory))
        ]
        return as_text([Rows(rows, (1, 2, 3)), *([self.memory_summary()] if memory else []), self.summary()])

    def summary(self) -> str:
        """Return the last line of the table."""
        uncounted = f"; not counted: {len(self.left)} that the compiler decides" if self.left else ""
        if self.compiler:
            added = [line for line in self.lines if line.compiler]
            size = exact_size(sum(line.total for line in added))
            many = f"{sum(line.count for line in added):,} of them, {size}," if added else "none"
            uncounted += f"; {many} added by {self.compiler}; for another chip see jshard plan"
        elif self.is_auto:
            uncounted += "; on axis_types: auto the compiler adds collectives of its own: see jshard explain"
        if not self.lines:
            return f"total: no collectives{uncounted}"
        phases = ", ".join(f"{phase} {total:,} B" for phase, total in self.by("phase").items())
        words = f"total: {_counted(self.count)}, {exact_size(self.total)} on the wire per device ({phases})"
        if not all(line.count_known for line in self.lines):
            words += "; a line with ? is one trip of a while loop"
        if any(line.branches for line in self.lines):
            words += "; every branch of a cond is counted"
        return words + uncounted

    def memory_summary(self) -> str:
        kinds = {words: sum(getattr(rest, kind) for rest in self.memory) for kind, words in KINDS.items()}
        parts = ", ".join(f"{words} {number:,} B" for words, number in kinds.items() if number)
        return f"memory: {exact_size(self.held)} at rest per device ({parts})"

    def to_json(self) -> str:
        """Return a JSON document of `"schema": "jshard.explain/1"`, with `lines`, `left`, `choices`,
        `unused`, `claims`, `unsplit`, `is_auto`, `compiler`, `stages`, `memory` and `total`."""
        totals = {key: self.by(key) for key in ("phase", "signal", "axis", "line")}
        document = {
            "schema": SCHEMA,
            "lines": [line.document() for line in self.lines],
            "left": [each.document() for each in self.left],
            **{key: list(map(document_of, getattr(self, key))) for key in ("choices", "unused", "claims", "unsplit")},
            "is_auto": self.is_auto,
            "compiler": self.compiler,
            "stages": [each.document() for each in self.stages],
            "memory": [{**document_of(rest), "total": rest.total} for rest in self.memory],
            "total": {"wire": self.total, "count": self.count, "memory": self.held, **totals},
        }
        return json.dumps(document, indent=2)


def _counted(number: int) -> str:
    return f"{number:,} collective{'' if number == 1 else 's'}"


def _memory_cells(rest: Resident) -> tuple[str, ...]:
    kinds = [(words, getattr(rest, kind)) for kind, words in KINDS.items()]
    cells = [f"{words} {number:,} B" if number else "" for words, number in kinds]
    return str(rest.place or "-"), rest.signal, "at rest", *cells, f"{rest.total:,} B"


def read(jaxpr: Jaxpr) -> Ledger:
    """Return the ledger of a (closed) jaxpr. It leaves out dead equations, as the compiler does."""
    found = list(walk(pruned(jaxpr).jaxpr))
    # Equal neighbours are one line. An operation left to the compiler is one entry per source line.
    runs = itertools.groupby((each for each in found if isinstance(each, Line)), Line.once)
    left = joined((each for each in found if isinstance(each, Left)), lambda each: (each.once(), each.source))
    return Ledger(
        tuple(line for _, run in runs for line in joined(run)),
        tuple(dict.fromkeys(each for each in found if isinstance(each, ChosenStrategy))),
        left=tuple(left),
        stages=tuple(dict.fromkeys(each for each in found if isinstance(each, Staged))),
    )
