"""Two ledgers, collective by collective: what was added, what is gone, what moved, what grew, and where it is written."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from jshard.inspect.ledger.entries import Left, Line, joined
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.ledger.memory import Resident
from jshard.inspect.ledger.serialize import caused_document, line_document
from jshard.printing.table import Block, Rows, Shown
from jshard.printing.units import exact_size, in_large_units, size
from jshard.schedules import Cost, Table
from jshard.schedules.cost import compared

SCHEMA = "jshard.diff/1"
Kind = Literal["added", "gone", "moved", "grown", "shrunk"]
SIGNS = {"added": "+", "gone": "-", "moved": "~", "grown": "~", "shrunk": "~"}


class ComparedCollectives(Protocol):
    """Collectives of one kind as one of two programs has them: a line of a ledger, or what a plan runs."""

    @property
    def collective(self) -> str: ...
    @property
    def via(self) -> str: ...
    @property
    def total(self) -> int: ...
    def cells(self) -> tuple[str, ...]: ...  # place, signal, phase, collective, axes, how many


Sided = TypeVar("Sided", bound=ComparedCollectives)


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
    def side(self) -> Sided:
        """The side to speak of: the new one where it is there."""
        side = self.new or self.old
        assert side is not None
        return side

    def cells(self) -> tuple[str, ...]:
        places, *words = zip(*(side.cells()[:6] for side in (self.old, self.new) if side is not None), strict=True)
        return (
            f"{SIGNS[self.kind]} {' -> '.join(places)}",
            *(" -> ".join(dict.fromkeys(each)) for each in words),
            f"{self.wire:+,} B on the wire",
            f"({', '.join(filter(None, (self.kind, self.side.via)))})",
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Difference(Shown):
    """What lies between two training steps. It prints as what `jshard diff` prints."""

    old: str
    new: str
    before: Ledger
    after: Ledger
    changes: tuple[Change[Line], ...]
    memory: dict[str, tuple[Resident, Resident]]  # what a signal holds before and after, where that differs
    left: tuple[tuple[Literal["added", "gone"], Left], ...] = ()  # what the compiler decides, by one side only
    program: str = ""  # what the comparison of the compiled texts found
    proven_same: bool | None = None  # None: the compiled texts were not compared

    @property
    def same(self) -> bool:
        """Whether it is one program: by its compiled text where that was compared, else by collectives and memory."""
        if self.proven_same is not None:
            return self.proven_same
        return not (self.changes or self.memory or self.left) and self.before.stages == self.after.stages

    def blocks(self) -> Iterator[Block]:
        is_left = self.before.compiler != self.after.compiler  # one side to XLA: both are shown in full
        if self.same and not is_left:
            yield self.program or "the same collectives and memory"
            return
        if is_left:
            yield Rows(list(_side_by_side(self.before, self.after)), (5, 6, 7, 8))
        else:
            yield Rows([change.cells() for change in self.changes], (6,))
        yield Rows(_schedules(self.before, self.after), (1, 2))
        yield Rows([_cells_of_left(kind, left) for kind, left in self.left])
        yield Rows([self._memory_cells(signal) for signal in self.memory], (3,))
        yield f"wire: {from_to(self.before.total, self.after.total)} per device"
        if self.before.memory or self.after.memory:
            yield f"memory: {from_to(self.before.held, self.after.held)} at rest per device"
        yield self.summary()

    def summary(self) -> str:
        parts = counted(self.changes)
        left = collections.Counter((left.primitive, kind) for kind, left in self.left)
        parts += [f"{times} {primitive} {kind} that the compiler decides" for (primitive, kind), times in left.items()]
        parts += ["memory changed"] if self.memory else []
        if self.before.stages != self.after.stages:
            parts += ["another schedule" if _tables(self.before) != _tables(self.after) else "other activations kept"]
        return "the same collectives and memory" if self.same else f"differs: {', '.join(parts) or self.program}"

    def to_json(self) -> str:
        """One document, `"schema": "jshard.diff/1"`."""
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
                "stages": {
                    "before": [each.document() for each in self.before.stages],
                    "after": [each.document() for each in self.after.stages],
                },
                "wire": {"before": self.before.total, "after": self.after.total},
                "memory": {
                    "before": self.before.held,
                    "after": self.after.held,
                    "signals": {
                        name: {"before": was.total, "after": now.total} for name, (was, now) in self.memory.items()
                    },
                },
                "program": {"same": self.proven_same, "says": self.program},
            },
            indent=2,
        )

    def _memory_cells(self, signal: str) -> tuple[str, ...]:
        sides = self.memory[signal]
        before, after = (rest.total for rest in sides)
        sign = "+" if not before else "-" if not after else "~"
        where = " -> ".join(dict.fromkeys(str(rest.place or "-") for rest in sides if rest.total))
        return f"{sign} {where}", signal, "at rest", *change_in_bytes(before, after)


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

    return moved(before) == moved(after) and before.held == after.held and before.stages == after.stages


def _changes(before: Ledger, after: Ledger) -> Iterator[Change[Line]]:
    kind: Key = (
        _unplaced_once if before.compiler == after.compiler else lambda line: (_where(line), line.payload, line.dtype)
    )
    return changes(
        *(joined(ledger.lines, kind) for ledger in (before, after)),
        same=lambda line: (kind(line), line.count),
        alike=(kind, _where),
        moved=lambda line: (line.collective, line.payload, line.dtype, line.count),
    )


def _where(line: Line) -> Hashable:
    return line.signal, line.phase, line.collective, line.mesh_axes


def _side_by_side(before: Ledger, after: Ledger) -> Iterator[tuple[str, ...]]:
    """What either side puts on the wire, of each signal, phase, collective and mesh axes; of these only one adds."""
    rows: dict[Hashable, tuple[list[Line], list[Line]]] = {}
    for number, ledger in enumerate((before, after)):
        for line in ledger:
            rows.setdefault(_where(line), ([], []))[number].append(line)
    for sides in rows.values():
        places = dict.fromkeys(line.line for lines in sides for line in lines)
        words = (*sides[0], *sides[1])[0].cells()[1:5]
        yield (f"  {' -> '.join(places)}", *words, *(cell for lines in sides for cell in _in_sum(lines)))


def _in_sum(lines: Sequence[Line]) -> tuple[str, str]:
    by = dict.fromkeys(f"added by {line.compiler}" if line.compiler else "asked" for line in lines)
    total = f"{sum(line.total for line in lines):,} B on the wire"
    return (f"{sum(line.count for line in lines):,} {' and '.join(by)}", total) if lines else ("none", "")


def _tables(ledger: Ledger) -> list[Table]:
    return [each.table for each in ledger.stages]


def _schedules(before: Ledger, after: Ledger) -> list[tuple[str, ...]]:
    """The figures in which two schedules differ, side by side; a schedule that one side alone has, in a line."""
    old, new = ([Cost(table) for table in _tables(ledger)] for ledger in (before, after))
    if before.stages == after.stages:
        return []
    if len(old) == len(new) == 1:
        head, *figures = compared((*old, *new))
        figures.append(["kept of a microbatch", *(size(ledger.stages[0].kept) for ledger in (before, after))])
        return [("schedule", *head[1:]), *(tuple(row) for row in figures if row[1] != row[2])]
    return [*((f"- {cost}",) for cost in old), *((f"+ {cost}",) for cost in new)]


Key = Callable[[Any], Hashable]


def changes(
    old: Iterable[Sided], new: Iterable[Sided], same: Key, alike: Iterable[Key], moved: Key
) -> Iterator[Change[Sided]]:
    """Pair the collectives of two programs: those that are the `same`, those that are `alike` in all but their size, those
    that only `moved`; the rest is gone, or added."""
    lost, found = list(old), list(new)
    _pairs(lost, found, same)
    for key in alike:
        for was, now in _pairs(lost, found, key):
            yield Change("grown" if now.total >= was.total else "shrunk", was, now)
    yield from (Change("moved", was, now) for was, now in _pairs(lost, found, moved))
    yield from (Change("gone", each, None) for each in lost)
    yield from (Change("added", None, each) for each in found)


def _pairs(lost: list[Sided], found: list[Sided], key: Key) -> list[tuple[Sided, Sided]]:
    """Take those out of both lists that are equal by `key`."""
    waiting: dict[Hashable, list[Sided]] = {}
    for each in found:
        waiting.setdefault(key(each), []).append(each)
    pairs = [(was, same.pop(0)) for was in lost if (same := waiting.get(key(was)))]
    for was, now in pairs:
        lost.remove(was)
        found.remove(now)
    return pairs


def counted(changes: Iterable[Change[Any]]) -> list[str]:
    """`2 all_gather added (+5.0 GiB)`: how many of each kind and collective, and the bytes they add, where many."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for change in changes:
        kinds.setdefault((change.kind, change.side.collective), []).append(change.wire)
    return [
        f"{len(wires)} {collective} {kind}{in_large_units(sum(wires), '+')}"
        for (kind, collective), wires in kinds.items()
    ]


def _left(before: Ledger, after: Ledger) -> tuple[tuple[Literal["added", "gone"], Left], ...]:
    old, new = ({_unplaced(e): e for e in joined(ledger.left, _unplaced_once)} for ledger in (before, after))
    gone = [left for key, left in old.items() if key not in new]
    return (*(("gone", left) for left in gone), *(("added", left) for key, left in new.items() if key not in old))


def _unplaced(entry: Any) -> Any:
    """The entry without the line that asks: where it stands in a file is no difference."""
    return dataclasses.replace(entry, cause=dataclasses.replace(entry.cause, place=None, key=""))


def _unplaced_once(entry: object) -> Any:
    return _unplaced(entry).once()


def _cells_of_left(kind: Kind, left: Left) -> tuple[str, ...]:
    return (
        f"{SIGNS[kind]} {left.place or '-'}",
        left.signal,
        left.phase,
        left.words,
        f"({kind}, decided by the compiler)",
    )


def _memory(before: Ledger, after: Ledger) -> dict[str, tuple[Resident, Resident]]:
    old, new = ({rest.signal: rest for rest in ledger.memory} for ledger in (before, after))
    pairs = {
        name: (old.get(name, Resident(None, name)), new.get(name, Resident(None, name))) for name in {**old, **new}
    }
    return {name: (was, now) for name, (was, now) in pairs.items() if was.total != now.total}


def change_in_bytes(before: int, after: int) -> tuple[str, str]:
    """The last columns of a row."""
    return f"{after - before:+,} B", f"({before:,} B -> {after:,} B)"


def from_to(before: int, after: int) -> str:
    return f"{exact_size(before)} -> {exact_size(after)} ({after - before:+,} B)"
