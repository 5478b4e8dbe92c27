"""Two plans side by side: which collectives run on either, what memory and time they take, and whether it is one program."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from jshard.inspect.compiled.program_text import normalised
from jshard.inspect.ledger.diff import Change, counted, from_to, pairs
from jshard.inspect.plan.estimate import in_words
from jshard.table import Block, Rows, Shown
from jshard.units import exact_size

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
        """From what `Plan.to_json` wrote."""
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
            memory=memory["total"],
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
        parts = [
            (f"~ {name}", f"{after - before:+,} B", f"({before:,} B -> {after:,} B)")
            for name, before, after in self._parts()
            if before != after
        ]
        yield Rows([change.cells() for change in self.changes], (6,))
        yield Rows(parts, (1,))
        yield from self._totals()
        yield f"{self.summary()}, on {where}"

    def _parts(self) -> Iterator[tuple[str, int, int]]:
        if self.compiled:
            for name in dict.fromkeys((*self.old.parts, *self.new.parts)):
                yield name, self.old.parts.get(name, 0), self.new.parts.get(name, 0)

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
        parts = counted((each.kind, each.told.collective, each.wire) for each in self.changes)
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
                "old": _plain(self.old),
                "new": _plain(self.new),
                "changes": [
                    {"wire": each.wire, **dataclasses.asdict(each)} for each in self.changes
                ],
                "says": self.text().splitlines()[-1],
            },
            indent=2,
        )  # fmt: skip


def compare_plans(old: Outcome, new: Outcome, first: tuple[int, str, str] | None = None) -> PlanDifference:
    """Two plans' documents, collective by collective as they run."""
    return PlanDifference(old, new, tuple(_changes(old, new)), first)


def _changes(old: Outcome, new: Outcome) -> Iterator[Change[Runs]]:
    lost, found = list(old.runs), list(new.runs)
    for was, now in pairs(
        lost, found, lambda runs: (runs.signal, runs.phase, runs.collective, runs.mesh_axes, runs.via)
    ):
        if (was.times, was.wire) != (now.times, now.wire):
            yield Change("grown" if now.wire >= was.wire else "shrunk", was, now)
    for was, now in pairs(lost, found, lambda runs: (runs.signal, runs.phase, runs.collective, runs.mesh_axes)):
        yield Change("grown" if now.wire >= was.wire else "shrunk", was, now)
    for was, now in pairs(lost, found, lambda runs: (runs.collective, runs.times, runs.wire)):
        yield Change("moved", was, now)
    yield from (Change("gone", runs, None) for runs in lost)
    yield from (Change("added", None, runs) for runs in found)


def _plain(side: Outcome) -> dict[str, Any]:
    fields = dataclasses.asdict(side)
    return {**fields, "fits": None if side.capacity is None else side.fits == "fits"}


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one} -> {other}"
