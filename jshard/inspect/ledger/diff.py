"""Two ledgers, collective by collective: what was added, what is gone, what moved, what grew, and where it is written."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, Literal, Protocol, TypeVar

from jshard.inspect.ledger.entries import Left, Line
from jshard.inspect.ledger.ledger import Ledger
from jshard.table import Block, Rows, Shown
from jshard.units import exact_size, in_large_units

SCHEMA = "jshard.diff/1"
Kind = Literal["added", "gone", "moved", "grown", "shrunk"]
SIGNS = {"added": "+", "gone": "-", "moved": "~", "grown": "~", "shrunk": "~"}


class Side(Protocol):
    """Collectives of one kind as one of two programs has them: a line of a ledger, or what a plan runs."""

    @property
    def collective(self) -> str: ...
    @property
    def via(self) -> str: ...
    @property
    def total(self) -> int: ...
    def cells(self) -> tuple[str, ...]: ...  # place, signal, phase, collective, axes, how many


Sided = TypeVar("Sided", bound=Side)


@dataclasses.dataclass(frozen=True)
class Change(Generic[Sided]):
    kind: Kind
    old: Sided | None
    new: Sided | None

    @property
    def wire(self) -> int:
        """Bytes on the wire per device that it adds; less than zero where it takes some away."""
        return (self.new.total if self.new else 0) - (self.old.total if self.old else 0)

    @property
    def told(self) -> Sided:
        """The side to speak of: the new one where it is there."""
        told = self.new or self.old
        assert told is not None
        return told

    def cells(self) -> tuple[str, ...]:
        places, *words = zip(*(side.cells()[:6] for side in (self.old, self.new) if side is not None), strict=True)
        return (
            f"{SIGNS[self.kind]} {' -> '.join(places)}",
            *(" -> ".join(dict.fromkeys(each)) for each in words),
            f"{self.wire:+,} B on the wire",
            f"({', '.join(filter(None, (self.kind, self.told.via)))})",
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Difference(Shown):
    """What lies between two training steps. It prints as what `jshard diff` prints."""

    old: str
    new: str
    before: Ledger
    after: Ledger
    changes: tuple[Change[Line], ...]
    memory: dict[str, tuple[int, int]]  # signal -> bytes at rest before and after, where they differ
    left: tuple[tuple[Literal["added", "gone"], Left], ...] = ()  # what the compiler decides, by one side only
    program: str = ""  # what the comparison of the compiled texts found
    proven_same: bool | None = None  # None: the compiled texts were not compared

    @property
    def same(self) -> bool:
        """Whether it is one program: by its compiled text where that was compared, else by collectives and memory."""
        return not (self.changes or self.memory or self.left) if self.proven_same is None else self.proven_same

    def blocks(self) -> Iterator[Block]:
        if self.same:
            yield self.program or "the same collectives and memory"
            return
        yield Rows([change.cells() for change in self.changes], (6,))
        yield Rows([_cells_of_left(kind, left) for kind, left in self.left])
        yield Rows([self._memory_cells(signal) for signal in self.memory], (3,))
        yield f"wire: {from_to(self.before.total, self.after.total)} per device"
        if self.before.memory or self.after.memory:
            yield f"memory: {from_to(self.before.held, self.after.held)} at rest per device"
        yield self.summary()

    def summary(self) -> str:
        parts = counted((each.kind, each.told.collective, each.wire) for each in self.changes)
        left = collections.Counter((left.primitive, kind) for kind, left in self.left)
        parts += [f"{times} {primitive} {kind} that the compiler decides" for (primitive, kind), times in left.items()]
        parts += ["memory changed"] if self.memory else []
        return f"differs: {', '.join(parts) or self.program}"

    def to_json(self) -> str:
        """One document, `"schema": "jshard.diff/1"`."""
        from jshard.inspect.ledger.serialize import caused_document, line_document

        return json.dumps(
            {
                "schema": SCHEMA,
                "same": self.same,
                "old": self.old,
                "new": self.new,
                "changes": [
                    {
                        "kind": change.kind,
                        "wire": change.wire,
                        "old": None if change.old is None else line_document(change.old),
                        "new": None if change.new is None else line_document(change.new),
                    }
                    for change in self.changes
                ],
                "left": [{"kind": kind, **caused_document(left)} for kind, left in self.left],
                "wire": {"before": self.before.total, "after": self.after.total},
                "memory": {
                    "before": self.before.held,
                    "after": self.after.held,
                    "signals": {name: {"before": b, "after": a} for name, (b, a) in self.memory.items()},
                },
                "program": {"same": self.proven_same, "says": self.program},
            },
            indent=2,
        )

    def _memory_cells(self, signal: str) -> tuple[str, ...]:
        before, after = self.memory[signal]
        places = [
            next((str(rest.place) for rest in side.memory if rest.signal == signal and rest.place), "-")
            for side in (self.before, self.after)
        ]
        sign = "+" if not before else "-" if not after else "~"
        where = " -> ".join(dict.fromkeys(place for place, held in zip(places, (before, after), strict=True) if held))
        return f"{sign} {where}", signal, "at rest", f"{after - before:+,} B", f"({before:,} B -> {after:,} B)"


def compare(before: Ledger, after: Ledger, old: str = "old", new: str = "new") -> Difference:
    """The collectives and the memory of two ledgers. Compiled texts are not compared."""
    return Difference(
        old, new, before, after, tuple(_changes(before, after)), _memory(before, after), _left(before, after)
    )


def might_be_one_program(before: Ledger, after: Ledger) -> bool:
    """Whether both move and hold the same, under whatever names: then only the compiled texts can tell."""

    def moved(ledger: Ledger) -> collections.Counter[Hashable]:
        counter: collections.Counter[Hashable] = collections.Counter()
        for line in ledger.lines:
            counter[line.collective, line.group, line.payload, line.dtype, line.declared] += line.count
        return counter

    return moved(before) == moved(after) and before.held == after.held


def _changes(before: Ledger, after: Ledger) -> Iterator[Change[Line]]:
    old, new = (_joined(ledger.lines) for ledger in (before, after))
    for key in [key for key in old if key in new]:
        was, now = old.pop(key), new.pop(key)
        if was.count != now.count:
            yield Change("grown" if now.total >= was.total else "shrunk", was, now)
    lost, found = list(old.values()), list(new.values())
    for was, now in pairs(lost, found, lambda line: (line.signal, line.phase, line.collective, line.mesh_axes)):
        yield Change("grown" if now.total >= was.total else "shrunk", was, now)
    for was, now in pairs(lost, found, lambda line: (line.collective, line.payload, line.dtype, line.count)):
        yield Change("moved", was, now)
    yield from (Change("gone", line, None) for line in lost)
    yield from (Change("added", None, line) for line in found)


def counted(changes: Iterable[tuple[str, str, int]]) -> list[str]:
    """`2 all_gather added (+5.0 GiB)`: how many of each kind and collective, and the bytes they add, where many."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for kind, collective, wire in changes:
        kinds.setdefault((kind, collective), []).append(wire)
    return [
        f"{len(wires)} {collective} {kind}{in_large_units(sum(wires), '+')}"
        for (kind, collective), wires in kinds.items()
    ]


Entry = TypeVar("Entry")
Listed = TypeVar("Listed", Line, Left)


def pairs(lost: list[Entry], found: list[Entry], key: Callable[[Entry], Hashable]) -> Iterator[tuple[Entry, Entry]]:
    """Those of both lists that are alike by `key`, which are taken out."""
    for was in list(lost):
        now = next((line for line in found if key(line) == key(was)), None)
        if now is not None:
            lost.remove(was)
            found.remove(now)
            yield was, now


def _left(before: Ledger, after: Ledger) -> tuple[tuple[Literal["added", "gone"], Left], ...]:
    old, new = (_left_by_kind(ledger) for ledger in (before, after))
    gone = [left for key, left in old.items() if key not in new]
    return (*(("gone", left) for left in gone), *(("added", left) for key, left in new.items() if key not in old))


def _left_by_kind(ledger: Ledger) -> dict[Left, Left]:
    """Those of one place, and how often: where they stand in a file does not matter."""
    return {dataclasses.replace(key, count=left.count): left for key, left in _joined(ledger.left).items()}


def _joined(entries: Iterable[Listed]) -> dict[Listed, Listed]:
    """Those that differ in nothing but where they stand and which key asked, as one with the count of all."""
    found: dict[Listed, Listed] = {}
    for each in entries:
        key = dataclasses.replace(each, cause=dataclasses.replace(each.cause, place=None, key=""), count=0)
        held = found.get(key)
        found[key] = each if held is None else dataclasses.replace(held, count=held.count + each.count)
    return found


def _cells_of_left(kind: Kind, left: Left) -> tuple[str, ...]:
    return (
        f"{SIGNS[kind]} {left.place or '-'}",
        left.signal,
        left.phase,
        left.words,
        f"({kind}, decided by the compiler)",
    )


def _memory(before: Ledger, after: Ledger) -> dict[str, tuple[int, int]]:
    sums: dict[str, list[int]] = {}
    for side, ledger in enumerate((before, after)):
        for rest in ledger.memory:
            sums.setdefault(rest.signal, [0, 0])[side] += rest.total
    return {signal: (was, now) for signal, (was, now) in sums.items() if was != now}


def from_to(before: int, after: int) -> str:
    return f"{exact_size(before)} -> {exact_size(after)} ({after - before:+,} B)"
