"""Two plans side by side: which collectives run on either, what memory and time they take, and whether it is one program."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from jshard.inspect.compiled.program_text import normalised
from jshard.inspect.ledger.diff import Change, Key, change_in_bytes, changes, counted, from_to
from jshard.inspect.ledger.serialize import document_of
from jshard.inspect.plan.estimate import in_words
from jshard.printing.table import Block, Rows, Shown
from jshard.printing.units import exact_size

SCHEMA = "jshard.diff-plan/1"


def digest(text: str) -> dict[str, Any] | None:
    """What a plan's document says of the compiled text: enough to tell whether two are the same but for names."""
    if not text:
        return None
    bare = normalised(text)
    return {"lines": len(bare.splitlines()), "sha256": hashlib.sha256(bare.encode()).hexdigest()}


@dataclasses.dataclass(frozen=True)
class Runs:
    """Collectives of one kind that run for one signal in one phase: how many, and their bytes on the wire per device."""

    place: str
    signal: str
    phase: str
    collective: str
    mesh_axes: tuple[str, ...]
    via: str
    times: int
    wire: int

    @property
    def total(self) -> int:
        return self.wire

    def cells(self) -> tuple[str, ...]:
        axes = ", ".join(self.mesh_axes) or "?"
        return self.place, self.signal, self.phase, self.collective, f"over {axes}", f"runs {self.times:,}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a plan's document tells of one side."""

    label: str
    topology: str
    runs: tuple[Runs, ...]
    wire: int
    parts: Mapping[str, int]  # of memory, bytes on each device
    memory: int
    capacity: int | None
    seconds: float | None  # of a step, by the model
    program: Mapping[str, Any] | None  # lines and sha256 of the text; None when it was not compiled to its end

    @classmethod
    def of(cls, text: str, label: str) -> Outcome:
        """Read what `Plan.to_json` wrote."""
        document = json.loads(text)
        runs: dict[Hashable, Runs] = {}
        for row in document["wire"]["rows"]:
            if row["got"]:
                names = row["signal"], row["phase"], row["collective"], tuple(row["mesh_axes"]), row["via"]
                place, held = row["place"] or "-", runs.get(names)
                times, wire = (held.times, held.wire) if held else (0, 0)
                runs[names] = Runs(held.place if held else place, *names, times + row["got"], wire + row["wire_got"])
        memory = document["memory"]
        return cls(
            label=label,
            topology=document["topology"]["name"],
            runs=tuple(runs.values()),
            wire=document["wire"]["got"] or 0,
            parts=memory["parts"],
            memory=memory["needed"],
            capacity=memory["capacity"],
            seconds=document["time"] and document["time"]["seconds"],
            program=document["program"],
        )

    @property
    def fits(self) -> str:
        return "" if self.capacity is None else "fits" if self.memory <= self.capacity else "does not fit"


@dataclasses.dataclass(frozen=True, repr=False)
class PlanDifference(Shown):
    """What lies between two compiled programs. It prints as what `jshard diff --topology` prints."""

    old: Outcome
    new: Outcome
    changes: tuple[Change[Runs], ...]
    first: tuple[int, str, str] | None = None  # lines of the text that differ, and the first of them on both sides

    @property
    def compiled(self) -> bool:
        """Whether both were compiled to their end."""
        return self.old.program is not None and self.new.program is not None

    @property
    def same(self) -> bool:
        """Whether it is one program, by its compiled text."""
        return self.compiled and self.old.topology == self.new.topology and self.old.program == self.new.program

    @property
    def only_text(self) -> bool:
        """Whether nothing but the compiled text tells them apart."""
        return self.compiled and not (self.same or self.changes or self.old.memory != self.new.memory)

    def blocks(self) -> Iterator[Block]:
        where = _both(self.old.topology, self.new.topology)
        if self.same:
            assert self.new.program is not None
            lines = f"{self.new.program['lines']:,} lines"
            yield f"same program on {where}: the compiled text is the same, {lines}"
            return
        names = dict.fromkeys((*self.old.parts, *self.new.parts)) if self.compiled else ()
        parts = [(name, self.old.parts.get(name, 0), self.new.parts.get(name, 0)) for name in names]
        yield Rows([change.cells() for change in self.changes], (6,))
        yield Rows([(f"~ {name}", *change_in_bytes(was, now)) for name, was, now in parts if was != now], (1,))
        yield from self._totals()
        yield f"{self.summary()}, on {where}"

    def _totals(self) -> Iterator[str]:
        if self.compiled:
            yield f"wire: {from_to(self.old.wire, self.new.wire)} per device run"
        capacity = self.new.capacity
        of = f", of {exact_size(capacity)}: {_both(self.old.fits, self.new.fits)}" if capacity is not None else ""
        yield f"memory: {from_to(self.old.memory, self.new.memory)} per device{of}"
        if self.old.seconds is not None and self.new.seconds is not None:
            before, after = in_words(self.old.seconds), in_words(self.new.seconds)
            yield f"time: {before} -> {after} a step (a model, nothing was measured)"

    def summary(self) -> str:
        """The last line: what differs, in few words."""
        if not self.compiled:
            sides = [side.label for side in (self.old, self.new) if side.program is None]
            are = "is too large and was" if len(sides) == 1 else "are too large and were"
            return f"differs or not: {' and '.join(sides)} {are} not compiled to the end"
        parts = counted(self.changes)
        parts += ["memory changed"] if self.old.memory != self.new.memory else []
        if not parts and self.first is not None:
            count, one, other = self.first
            parts = [f"{count:,} lines of the compiled text, first {one!r} -> {other!r}"]
        return f"differs: {', '.join(parts) or 'the compiled text'}"

    def to_json(self) -> str:
        """One document, `"schema": "jshard.diff-plan/1"`."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "same": self.same,
                "old": _side(self.old),
                "new": _side(self.new),
                "changes": [{"wire": each.wire, **document_of(each)} for each in self.changes],
                "says": str(self).splitlines()[-1],
            },
            indent=2,
        )


def compare_plans(old: Outcome, new: Outcome, first: tuple[int, str, str] | None = None) -> PlanDifference:
    """Two plans' documents, collective by collective as they run."""
    where: Key = lambda runs: (runs.signal, runs.phase, runs.collective, runs.mesh_axes)
    found = changes(
        old.runs,
        new.runs,
        same=lambda runs: dataclasses.replace(runs, place=""),
        alike=(lambda runs: (*where(runs), runs.via), where),
        moved=lambda runs: (runs.collective, runs.times, runs.wire),
    )
    return PlanDifference(old, new, tuple(found), first)


def _side(outcome: Outcome) -> dict[str, Any]:
    return {**document_of(outcome), "fits": None if outcome.capacity is None else outcome.fits == "fits"}


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one} -> {other}"
