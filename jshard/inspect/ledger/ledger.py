"""What a program asks of the wire: every collective of its jaxpr, with the place in the YAML that asked for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax.interpreters import partial_eval

from jshard.errors import JShardError, Place
from jshard.inspect.ledger.jaxpr_walk import Asked, Chosen, Decided, choices_in, walk
from jshard.inspect.ledger.memory import Rest
from jshard.inspect.ledger.serialize import document_of, entry_of, line_document
from jshard.inspect.ledger.unsplit import Unsplit
from jshard.inspect.table import folded, size, table
from jshard.kernels.collectives import COLLECTIVES
from jshard.kernels.kernel_traffic import Schedule

PlaceOf = Callable[[Asked | Chosen | Decided], Place | None]
SCHEMA = "jshard.explain/1"
UNASKED = "no signal asked"


@dataclasses.dataclass(frozen=True)
class Line:
    """One collective, `count` times. `payload` and `wire` are bytes of once; `total` of all times, on each device."""

    place: Place | None
    signal: str  # "decoder/attn"; "-" when it stands under none
    phase: str  # forward, backward, update
    collective: str  # a name in COLLECTIVES
    primitive: str
    mesh_axes: tuple[str, ...]
    group: int
    count: int
    count_known: bool  # False inside a while loop, whose trips no program text tells: then count is that of one trip
    payload: int
    dtype: str
    shape: tuple[int, ...]
    via: str = ""  # redistribute, remat, branch 1 of 2, sharding in types, no signal asked
    source: str = dataclasses.field(default="", compare=False)  # the line of the program: model.py:12
    declared: int | None = None  # bytes on the wire that a kernel says of itself, once
    schedule: Schedule | None = None  # what such a kernel computes meanwhile

    @property
    def wire(self) -> int:
        """Bytes on the wire per device, once."""
        return COLLECTIVES[self.collective].wire(self.payload, self.group) if self.declared is None else self.declared

    @property
    def total(self) -> int:
        """Bytes on the wire per device, all times."""
        return self.count * self.wire

    @property
    def asked(self) -> bool:
        """Whether a signal asked for it, as far as that is known."""
        return UNASKED not in self.via

    @property
    def axis(self) -> str:
        return ", ".join(self.mesh_axes)

    @property
    def line(self) -> str:
        return str(self.place or "-")

    def cells(self) -> tuple[str, ...]:
        """The line as the words of a table."""
        times = "" if self.count_known else "? x "
        return (
            self.line,
            self.signal,
            self.phase,
            self.collective,
            f"over {self.axis} ({self.group})",
            f"{times}{self.count:,} x {self.payload:,} B",
            self.dtype,
            f"{times}{self.total:,} B on the wire",
            f"({self.via})" if self.via else "",
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy that jshard took by itself where no signal names one, and what its forward puts on the wire."""

    place: Place | None
    signal: str
    words: str  # row=data, 0 B on the wire per device
    source: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        asked = f"{self.place or '-'}  {self.signal}  chosen: {self.words}"
        return f"{asked}  ({self.source})" if self.source else asked


@dataclasses.dataclass(frozen=True)
class Left:
    """An operation that is left to the compiler: it can't be done without moving something over these mesh axes, nobody
    asked for it, and how many bytes it takes no program text tells. Compile it, and it can be read: `jshard plan`."""

    place: Place | None
    signal: str
    phase: str
    primitive: str  # rev, concatenate, slice
    mesh_axes: tuple[str, ...]
    count: int
    count_known: bool
    via: str = ""
    source: str = dataclasses.field(default="", compare=False)

    @property
    def axis(self) -> str:
        return ", ".join(self.mesh_axes)

    @property
    def words(self) -> str:
        """`2 x concatenate over data (model.py:12)`"""
        times = f"{self.count:,} x " if self.count > 1 else ""
        times = times if self.count_known else f"? x {times}"
        around = ", ".join(filter(None, (self.source, self.via)))
        return f"{times}{self.primitive} over {self.axis}" + (f" ({around})" if around else "")

    def __str__(self) -> str:
        return f"{self.place or '-'}  {self.signal}  {self.phase}  {self.words}: not asked for, decided by the compiler"


@dataclasses.dataclass(frozen=True)
class Unused:
    """A signal of the configuration that nothing in the program stands under."""

    place: Place | None
    signal: str

    def __str__(self) -> str:
        return f"{self.place or '-'}  {self.signal}  unused: nothing in this program is under it"


NUMBERS = (5, 7)  # the columns of `cells` that stand to the right


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All collectives of a program, in its order. `str()` is a table; sums are bytes on the wire per device."""

    lines: tuple[Line, ...]
    choices: tuple[Choice, ...] = ()
    unused: tuple[Unused, ...] = ()
    left: tuple[Left, ...] = ()  # what the compiler moves and nobody asked for; not in the sums
    memory: tuple[Rest, ...] = ()  # what a training step holds between steps; empty where there is no optimizer
    unsplit: tuple[Unsplit, ...] = ()  # parameters that lie whole under a signal that would split them
    is_auto: bool = False  # whether arrays lie on Auto axes, where the compiler adds collectives of its own

    @property
    def total(self) -> int:
        """Bytes on the wire per device. Every branch of a cond counts, and one trip of a while loop."""
        return sum(line.total for line in self.lines)

    @property
    def count(self) -> int:
        """How many collectives run."""
        return sum(line.count for line in self.lines)

    @property
    def held(self) -> int:
        """Bytes at rest on each device."""
        return sum(rest.total for rest in self.memory)

    def by(self, key: str) -> dict[str, int]:
        """Bytes on the wire by `signal`, `phase`, `collective`, `axis`, `line` or any other column."""
        sums: dict[str, int] = {}
        for line in self.lines:
            word = _word(getattr(line, key))
            sums[word] = sums.get(word, 0) + line.total
        return sums

    def counts(self, key: str = "collective") -> dict[str, int]:
        """How many collectives, by the same keys."""
        sums: dict[str, int] = {}
        for line in self.lines:
            word = _word(getattr(line, key))
            sums[word] = sums.get(word, 0) + line.count
        return sums

    def only(self, **columns: Any) -> Ledger:
        """The lines whose columns are as given: `ledger.only(signal="layer1", phase="backward")`."""

        def alike(entry: Line | Left) -> bool:
            return all(getattr(entry, name, None) == value for name, value in columns.items())

        return Ledger(tuple(filter(alike, self.lines)), left=tuple(filter(alike, self.left)), is_auto=self.is_auto)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The table, folded to `width`."""
        told = table([line.cells() for line in self.lines], right=NUMBERS, width=width)
        for remark in (*self.left, *self.choices, *self.unused, *self.unsplit):
            told += folded(str(remark), width)
        if self.memory:
            told += table([_memory_cells(rest) for rest in self.memory], right=range(3, 8), width=width)
            told += folded(self.memory_summary(), width)
        return "\n".join([*told, *folded(self.summary(), width)])

    def text_by(self, key: str, width: int | None = None) -> str:
        """One row for each `signal`, mesh `axis` or YAML `line`: collectives, wire and, but by axis, memory."""
        wire, counts, memory = self.by(key), self.counts(key), dict[str, int]()
        for rest in self.memory if key != "axis" else ():
            word = rest.signal if key == "signal" else str(rest.place or "-")
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
        told = table(rows, right=(1, 2, 3), width=width)
        told += folded(self.memory_summary(), width) if memory else []
        return "\n".join([*told, *folded(self.summary(), width)])

    def summary(self) -> str:
        """The last line of the table."""
        uncounted = f"; not counted: {len(self.left)} that the compiler decides" if self.left else ""
        if self.is_auto:
            uncounted += (
                "; on axis_types: auto the compiler adds collectives of its own where it needs them: see jshard plan"
            )
        if not self.lines:
            return f"total: no collectives{uncounted}"
        phases = ", ".join(f"{phase} {total:,} B" for phase, total in self.by("phase").items())
        told = f"total: {_counted(self.count)}, {size(self.total)} on the wire per device ({phases})"
        if not all(line.count_known for line in self.lines):
            told += "; a line with ? is one trip of a while loop"
        if any("branch" in line.via for line in self.lines):
            told += "; every branch of a cond is counted"
        return told + uncounted

    def memory_summary(self) -> str:
        kinds = {
            words: sum(getattr(rest, kind) for rest in self.memory)
            for kind, words in (
                ("parameters", "parameters"), ("gradients", "gradients"), ("optimizer", "optimizer state"), ("other", "other"),
            )
        }  # fmt: skip
        parts = ", ".join(f"{words} {number:,} B" for words, number in kinds.items() if number)
        return f"memory: {size(self.held)} at rest per device ({parts})"

    def to_json(self) -> str:
        """One document, `"schema": "jshard.explain/1"`: `lines`, `left`, `choices`, `unused`, `unsplit`,
        `is_auto`, `memory` and `total`."""
        totals = {key: self.by(key) for key in ("phase", "signal", "axis", "line")}
        document = {
            "schema": SCHEMA,
            "lines": list(map(line_document, self.lines)),
            **{key: list(map(document_of, getattr(self, key))) for key in ("left", "choices", "unused", "unsplit")},
            "is_auto": self.is_auto,
            "memory": [{**document_of(rest), "total": rest.total} for rest in self.memory],
            "total": {"wire": self.total, "count": self.count, "memory": self.held, **totals},
        }
        return json.dumps(document, indent=2)

    @classmethod
    def from_json(cls, text: str, label: str = "the document") -> Ledger:
        """The ledger that `to_json` wrote; `label` opens the sentence when it is of another version."""
        document = json.loads(text)
        if document.get("schema") != SCHEMA:
            raise JShardError(
                f'{label} has the schema "{document.get("schema")}", and this jshard reads "{SCHEMA}"',
                mend="write it anew: jshard explain --json",
            )
        kinds = {
            "lines": Line, "choices": Choice, "unused": Unused, "left": Left, "memory": Rest, "unsplit": Unsplit
        }  # fmt: skip
        # "left", "unsplit" and "is_auto" are newer than the others
        return cls(
            **{key: tuple(entry_of(kind, each) for each in document.get(key, ())) for key, kind in kinds.items()},
            is_auto=document.get("is_auto", False),
        )


def _word(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _counted(number: int) -> str:
    return f"{number:,} collective{'' if number == 1 else 's'}"


def _memory_cells(rest: Rest) -> tuple[str, ...]:
    return (
        str(rest.place or "-"),
        rest.signal,
        "at rest",
        f"parameters {rest.parameters:,} B" if rest.parameters else "",
        f"gradients {rest.gradients:,} B" if rest.gradients else "",
        f"optimizer state {rest.optimizer:,} B" if rest.optimizer else "",
        f"other {rest.other:,} B" if rest.other else "",
        f"{rest.total:,} B",
    )


def read(jaxpr: Any, place_of: PlaceOf | None = None, *, is_asked_for: Callable[[Asked], bool] | None = None) -> Ledger:
    """The ledger of a (closed) jaxpr. What no result depends on is left out, as the compiler leaves it out."""
    bare = getattr(jaxpr, "jaxpr", jaxpr)
    live, _ = partial_eval.dce_jaxpr(bare, [True] * len(bare.outvars), instantiate=True)
    found = list(walk(live))
    asked = [each for each in found if isinstance(each, Asked)]
    return Ledger(
        tuple(_merged(_line(each, place_of, is_asked_for) for each in asked)),
        tuple(dict.fromkeys(_choice(chosen, place_of) for chosen in choices_in(live))),
        left=tuple(_together(_left(each, place_of) for each in found if isinstance(each, Decided))),
    )


def _line(asked: Asked, place_of: PlaceOf | None, is_asked_for: Callable[[Asked], bool] | None) -> Line:
    fields = {field.name: getattr(asked, field.name) for field in dataclasses.fields(Asked) if field.name != "path"}
    if is_asked_for is not None and not is_asked_for(asked):
        fields["via"] = ", ".join(filter(None, (asked.via, UNASKED)))
    return Line(
        place=place_of(asked) if place_of is not None and asked.path else None,
        signal="/".join(asked.path) or "-",
        **fields,
    )


def _choice(chosen: Chosen, place_of: PlaceOf | None) -> Choice:
    place = place_of(chosen) if place_of is not None and chosen.path else None
    return Choice(place, "/".join(chosen.path) or "-", chosen.words, chosen.source)


def _left(decided: Decided, place_of: PlaceOf | None) -> Left:
    names = [field.name for field in dataclasses.fields(Left) if field.name not in ("place", "signal")]
    place = place_of(decided) if place_of is not None and decided.path else None
    said: dict[str, Any] = {name: getattr(decided, name) for name in names}
    return Left(place=place, signal="/".join(decided.path) or "-", **said)


def _together(remarks: Iterable[Left]) -> list[Left]:
    """One for each line of the program, wherever it stands: its times added up."""
    counts: dict[Any, Left] = {}
    for remark in remarks:
        key = dataclasses.replace(remark, count=0), remark.source
        held = counts.get(key)
        counts[key] = remark if held is None else dataclasses.replace(held, count=held.count + remark.count)
    return list(counts.values())


def _merged(lines: Iterable[Line]) -> Iterator[Line]:
    """Neighbours that differ in nothing but their count, as one line."""
    held: Line | None = None
    for line in lines:
        if held is not None and dataclasses.replace(held, count=line.count) == line:
            held = dataclasses.replace(held, count=held.count + line.count)
            continue
        if held is not None:
            yield held
        held = line
    if held is not None:
        yield held
