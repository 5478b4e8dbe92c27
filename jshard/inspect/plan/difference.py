"""Two training steps side by side, as asked or as run: collectives added, gone, moved or grown, and their lines."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Literal

from jshard.inspect.compiled.program_text import digest, first_difference, normalised
from jshard.inspect.ledger.entries import document_of, joined
from jshard.inspect.plan.estimate import in_words
from jshard.printing.table import Block, Rows, Shown
from jshard.printing.units import exact_size, in_large_units

SCHEMA = "jshard.diff/2"
Kind = Literal["added", "gone", "moved", "grown", "shrunk"]
SIGNS = {"added": "+", "gone": "-", "moved": "~", "grown": "~", "shrunk": "~"}


@dataclasses.dataclass(frozen=True)
class Moves:
    """Collectives of a kind for a signal in a phase, on one side."""

    place: str
    signal: str
    phase: str
    collective: str
    mesh_axes: tuple[str, ...]
    group: int | None  # None for running collectives and for operations the compiler decides
    via: str
    count: int
    wire: int  # bytes on the wire per device, of all runs
    payload: int | None = None  # of one run; the wire of running collectives; None if only the compiler knows
    dtype: str = ""

    @property
    def axis(self) -> str:
        return ", ".join(self.mesh_axes)

    @property
    def where(self) -> Hashable:
        return self.signal, self.phase, self.collective, self.mesh_axes

    def plus(self, other: Moves) -> Moves:
        return dataclasses.replace(self, count=self.count + other.count, wire=self.wire + other.wire)

    def cells(self) -> tuple[str, ...]:
        if self.dtype:
            times = f"{self.count:,} x {self.payload:,} B"
        else:
            times = f"{self.count:,} x ? B" if self.payload is None else f"runs {self.count:,}"
        group = f" ({self.group})" if self.group is not None else ""
        return self.place, self.signal, self.phase, self.collective, f"over {self.axis or '?'}{group}", times


@dataclasses.dataclass(frozen=True)
class Change:
    """A collective with different sides, and the kind of its change."""

    kind: Kind
    old: Moves | None
    new: Moves | None

    @property
    def wire(self) -> int:
        """The bytes it adds on the wire per device; negative if it removes some."""
        return (self.new.wire if self.new else 0) - (self.old.wire if self.old else 0)

    @property
    def side(self) -> Moves:
        """The side to print: the new side if it has the collective."""
        side = self.new or self.old
        assert side is not None
        return side

    def cells(self) -> tuple[str, ...]:
        places, *words = zip(*(side.cells() for side in (self.old, self.new) if side is not None), strict=True)
        return (
            f"{SIGNS[self.kind]} {' -> '.join(places)}",
            *(" -> ".join(dict.fromkeys(each)) for each in words),
            "bytes unknown" if self.side.payload is None else f"{self.wire:+,} B on the wire",
            f"({', '.join(filter(None, (self.kind, self.side.via)))})",
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A side of the difference, read from the document of a ledger or a plan."""

    label: str
    topology: str  # "" for a ledger: nothing was compiled
    moves: tuple[Moves, ...]
    wire: int
    parts: Mapping[str, tuple[str, int]]  # memory by signal or kind: the line of the configuration, bytes
    memory: int  # bytes on each device
    stages: tuple[str, ...] = ()  # the schedules of its pipelines, in words
    compiler: str = ""  # the compiler whose partitioner added some of the moves
    capacity: int | None = None
    seconds: float | None = None  # of a step, by the model
    program: Mapping[str, Any] | None = None  # lines and sha256 of the text; None if it was not compiled

    @classmethod
    def of(cls, text: str, label: str) -> Outcome:
        """Read the output of `Ledger.to_json` or `Plan.to_json`."""
        document = json.loads(text)
        return _running(document, label) if "topology" in document else _asked(document, label)

    @property
    def fits(self) -> str:
        return "" if self.capacity is None else "fits" if self.memory <= self.capacity else "does not fit"


def _asked(document: Mapping[str, Any], label: str) -> Outcome:
    moves = [_moves(row, row["group"], row["total"], row["payload"], row["dtype"]) for row in document["lines"]]
    moves += [_moves({**row, "collective": row["primitive"], "decided": True}, None, 0) for row in document["left"]]
    return Outcome(
        label=label,
        topology="",
        moves=tuple(moves),
        wire=document["total"]["wire"],
        parts={rest["signal"]: (rest["place"] or "-", rest["total"]) for rest in document["memory"]},
        memory=document["total"]["memory"],
        stages=tuple(line for each in document["stages"] for line in each["says"]),
        compiler=document["compiler"],
    )


def _moves(row: Mapping[str, Any], group: int | None, wire: int, payload: int | None = None, dtype: str = "") -> Moves:
    """Read a row of a document. It drops the line of the program, so that it is no difference."""
    via = row["via"].replace(f" at {row.get('source')}", "")
    via = ", ".join(filter(None, (via, "decided by the compiler" * ("decided" in row))))
    names = row["signal"], row["phase"], row["collective"], tuple(row["mesh_axes"])
    return Moves(row["place"] or "-", *names, group, via, row["count"], wire, payload, dtype)


def _running(document: Mapping[str, Any], label: str) -> Outcome:
    rows = [{**row, "count": row["got"]} for row in document["wire"]["rows"] if row["got"]]
    moves = joined((_moves(row, None, row["wire_got"]) for row in rows), lambda row: (row.where, row.via))
    memory = document["memory"]
    return Outcome(
        label=label,
        topology=document["topology"]["name"],
        moves=tuple(dataclasses.replace(row, payload=row.wire) for row in moves),
        wire=document["wire"]["got"] or 0,
        parts={name: ("", size) for name, size in memory["parts"].items()},
        memory=memory["needed"],
        capacity=memory["capacity"],
        seconds=document["time"] and document["time"]["seconds"],
        program=document["program"],
    )


@dataclasses.dataclass(frozen=True, repr=False)
class Difference(Shown):
    """The difference between two training steps. It prints as the output of `jshard diff`."""

    old: Outcome
    new: Outcome
    changes: tuple[Change, ...]
    first: tuple[int, str, str] | None = None  # the number of lines that differ, and the first of them on both sides

    @property
    def compiled(self) -> bool:
        """True if both sides were compiled."""
        return self.old.program is not None and self.new.program is not None

    @property
    def same(self) -> bool:
        """True if both sides are the same program: by compiled text if compared, else by collectives and memory."""
        if self.compiled or self.new.topology:
            return self.compiled and self.old.topology == self.new.topology and self.old.program == self.new.program
        return not (self.changes or self._parts()) and self.old.stages == self.new.stages

    @property
    def is_open(self) -> bool:
        """True if only the compiled texts can decide: collectives and memory are equal up to names."""
        if self.new.topology and (self.same or not self.compiled):
            return False
        moved = [collections.Counter[Hashable](), collections.Counter[Hashable]()]
        for counter, side in zip(moved, (self.old, self.new), strict=True):
            for row in side.moves:
                counter[row.collective, row.group, row.payload, row.dtype] += row.count
        alike = self.old.memory == self.new.memory and self.old.stages == self.new.stages
        return alike and moved[0] == moved[1]

    def proven(self, old: str, new: str) -> Difference:
        """Return the difference with the compiled texts of both sides compared."""
        sides = [dataclasses.replace(s, program=digest(t)) for s, t in ((self.old, old), (self.new, new))]
        first = first_difference(normalised(old), normalised(new))
        return dataclasses.replace(self, old=sides[0], new=sides[1], first=first)

    def blocks(self) -> Iterator[Block]:
        if not self.same:
            yield Rows([change.cells() for change in self.changes], (6,))
            yield from (f"- {line}" for line in self.old.stages if line not in self.new.stages)
            yield from (f"+ {line}" for line in self.new.stages if line not in self.old.stages)
            if self.compiled or not self.new.topology:
                parts = self._parts()
                yield Rows(parts, (len(parts[0]) - 2,) if parts else ())
                yield f"wire: {_from_to(self.old.wire, self.new.wire)} per device"
            yield from self._totals()
        yield self.summary()

    def _parts(self) -> list[tuple[str, ...]]:
        """Return a row for each part of memory of different size."""
        rows = []
        for name in {**self.old.parts, **self.new.parts}:
            (was, before), (now, after) = (side.parts.get(name, ("", 0)) for side in (self.old, self.new))
            if before != after:
                sign = "+" if not before else "-" if not after else "~"
                places = " -> ".join(filter(None, dict.fromkeys((was, now))))
                words = (places, name, "at rest") if places else (name,)
                change = f"{after - before:+,} B", f"({before:,} B -> {after:,} B)"
                rows.append((f"{sign} {words[0]}", *words[1:], *change))
        return rows

    def _totals(self) -> Iterator[str]:
        if self.old.memory or self.new.memory:
            capacity, rest = self.new.capacity, "" if self.new.topology else " at rest"
            of = f", of {exact_size(capacity)}: {_both(self.old.fits, self.new.fits)}" if capacity is not None else ""
            yield f"memory: {_from_to(self.old.memory, self.new.memory)}{rest} per device{of}"
        if self.old.seconds is not None and self.new.seconds is not None:
            before, after = in_words(self.old.seconds), in_words(self.new.seconds)
            yield f"time: {before} -> {after} a step (a model, nothing was measured)"

    def summary(self) -> str:
        """Return the last line: the differences in few words."""
        where = _both(self.old.topology, self.new.topology)
        if not self.same:
            return f"{self._what_differs()}, on {where}" if where else self._what_differs()
        if self.new.program is None:
            return "the same collectives and memory"
        on = f" on {where}" if where else ""
        return f"same program{on}: the compiled text is the same, {self.new.program['lines']:,} lines"

    def _what_differs(self) -> str:
        if self.new.topology and not self.compiled:
            sides = [side.label for side in (self.old, self.new) if side.program is None]
            are = "is too large and was" if len(sides) == 1 else "are too large and were"
            return f"unknown difference: {' and '.join(sides)} {are} not compiled"
        kinds: dict[tuple[str, str], list[int]] = {}
        for change in self.changes:
            kinds.setdefault((change.kind, change.side.collective), []).append(change.wire)
        parts = [f"{len(w)} {name} {kind}{in_large_units(sum(w), '+')}" for (kind, name), w in kinds.items()]
        parts += ["memory changed"] * (self.old.memory != self.new.memory or bool(self._parts()))
        parts += ["another schedule"] * (self.old.stages != self.new.stages)
        if not parts and self.first is not None:
            count, one, other = self.first
            parts = [f"{count:,} lines of the compiled text, first {one!r} -> {other!r}"]
        return f"differs: {', '.join(parts) or 'the compiled text'}"

    def to_json(self) -> str:
        """Return a JSON document of `"schema": "jshard.diff/2"`."""
        changes = [{"wire": each.wire, **document_of(each)} for each in self.changes]
        sides = {"old": document_of(self.old), "new": document_of(self.new)}
        document = {"schema": SCHEMA, "same": self.same, **sides, "changes": changes, "says": self.summary()}
        return json.dumps(document, indent=2)


Key = Callable[[Moves], Hashable]


def compare(old: Outcome, new: Outcome) -> Difference:
    """Pair the collectives of two sides: equal but for the line, then but for the size, then moved, gone or added."""
    told = old.compiler == new.compiler  # XLA describes its collectives in other words than the layers do
    named: Key = lambda row: (row.where, row.via) if told else row.where
    alike: Key = lambda row: (named(row), row.group, row.payload, row.dtype)
    lost, found = (joined(side.moves, alike) for side in (old, new))
    _pairs(lost, found, lambda row: (alike(row), row.count))
    changes = []
    for key in (alike, named, lambda row: row.where):
        pairs = _pairs(lost, found, key)
        changes += [Change("grown" if now.wire >= was.wire else "shrunk", was, now) for was, now in pairs]
    moved = _pairs(lost, found, lambda row: (row.collective, row.payload, row.dtype, row.count))
    changes += [Change("moved", was, now) for was, now in moved]
    changes += [Change("gone", each, None) for each in lost] + [Change("added", None, each) for each in found]
    return Difference(old, new, tuple(changes))


def _pairs(lost: list[Moves], found: list[Moves], key: Key) -> list[tuple[Moves, Moves]]:
    """Remove the rows with equal keys from both lists, and return them as pairs."""
    waiting: dict[Hashable, list[Moves]] = {}
    for each in found:
        waiting.setdefault(key(each), []).append(each)
    pairs = [(was, same.pop(0)) for was in lost if (same := waiting.get(key(was)))]
    for was, now in pairs:
        lost.remove(was)
        found.remove(now)
    return pairs


def _from_to(before: int, after: int) -> str:
    return f"{exact_size(before)} -> {exact_size(after)} ({after - before:+,} B)"


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one} -> {other}"
