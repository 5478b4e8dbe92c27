"""The result of `verify`: a line for each compared array, the first divergence, and the verdict."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jshard.inspect.verify.first_divergence import FirstDivergence
from jshard.inspect.verify.own_derivatives import OwnDerivative
from jshard.printing.table import Block, Rows, Shown
from jshard.programs.provenance import Cause
from jshard.signals.globs import repeats

ROUNDING = 1e-9  # the allowed error of 64 bits after any sums


@dataclasses.dataclass(frozen=True)
class Finding:
    """A compared array. `off` is the largest difference, relative to the largest magnitude."""

    mesh: Mapping[str, int]
    name: str
    verdict: str  # bitwise, within, unproven, differs, dropped
    off: float
    tolerance: float  # 0 for bitwise
    because: str  # the reason why it is not bitwise
    zero: bool  # all zeros, so the comparison shows nothing
    cause: Cause
    stand_ins: tuple[str, ...] = ()  # the operations before it that ran by exact stand-ins
    kind: str = ""  # optimizer state, or "" if its name tells
    hidden: Cause | None = None  # a collective whose fault no result would show

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("differs", "dropped")

    @property
    def is_proven(self) -> bool:
        return self.verdict in ("bitwise", "within")

    @property
    def words(self) -> str:
        if self.verdict == "within":
            return f"within {self.tolerance:.2g} (because: {self.because}; a larger deviation would have been caught)"
        if self.verdict == "unproven":
            where = (
                self.hidden and f'a collective of "{self.hidden.signal}" ({self.hidden.place or self.hidden.source})'
            )
            hides = f"which hides a factor of 1.001 in {where or 'a collective'}"
            return f"not proven: within {self.tolerance:.2g}, {hides} (because: {self.because})"
        if self.verdict == "dropped":
            return "changes in a plain call, but not in this one"
        if self.verdict == "differs":
            return f"differs by {self.off:.2g}"
        words = "bitwise, but zero all over" if self.zero else "bitwise"
        return f"{words} (stand-ins: {', '.join(self.stand_ins)})" if self.stand_ins else words


@dataclasses.dataclass(frozen=True)
class PlainSteps:
    """The deviation of two steps from two steps by plain Flax and optax in 64 bits, or the reason why
    it is unknown. `rounding` is the deviation of an array when the inputs are moved by a last bit."""

    offs: Mapping[str, float]
    rounding: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unknown: str = ""

    @property
    def wrong(self) -> dict[str, float]:
        within = lambda name: max(ROUNDING, 8 * self.rounding.get(name, 0.0))
        return {name: off for name, off in self.offs.items() if not off <= within(name)}

    def __str__(self) -> str:
        how = "two steps by plain Flax and optax in 64 bits"
        if self.unknown:
            return f"{how}: not compared (because: {self.unknown})"
        if not self.wrong:
            rest = sum(self.rounding.get(name, 0.0) > ROUNDING for name in self.offs)
            more = f"; {rest} more {'holds' if rest == 1 else 'hold'} rounding alone" if rest else ""
            return f"{how}: {len(self.offs) - rest} arrays equal within {ROUNDING:.0e}{more}"
        first = ", ".join(f"{name} by {off:.2g}" for name, off in itertools.islice(self.wrong.items(), 4))
        more = f" and {len(self.wrong) - 4} more" if len(self.wrong) > 4 else ""
        return f"{how}: these are off: {first}{more}"


@dataclasses.dataclass(frozen=True, repr=False)
class Verification(Shown):
    """The result of `verify`: true if sharded equals unsharded. It prints the verdict, the faults, and a table."""

    findings: tuple[Finding, ...]
    beginnings: tuple[FirstDivergence, ...]
    probes: str
    unheld: str = ""  # the reason why the changes of a plain call are unknown
    own: tuple[OwnDerivative, ...] = ()
    plain: PlainSteps | None = None  # for an experiment
    short: str = ""  # the sentence about a large model made shorter

    @property
    def ok(self) -> bool:
        return all(finding.is_proven for finding in self.findings) and not (self.plain and self.plain.wrong)

    def __bool__(self) -> bool:
        return self.ok

    def blocks(self) -> Iterator[Block]:
        yield self.verdict
        if self.short:
            yield self.short
        yield from (f"on {in_words(each.mesh)} the difference begins in {each}" for each in self.beginnings)
        if self.unheld:
            yield f"the changes of a plain call are unknown (because: {self.unheld})"
        if self.plain:
            yield f"{self.plain}"
        yield from map(str, self.own)
        yield Rows(list(self._rows()))
        yield self.probes

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a row for each finding, faults first. It merges equal rows of repeated blocks, and right arrays of a kind."""
        findings = sorted(self.findings, key=lambda finding: finding.is_proven)
        rows = [
            (in_words(f.mesh), str(f.cause.place or "-"), f.cause.signal, f.kind * f.is_proven, f.words)
            for f in findings
        ]
        several, counts = len({row[0] for row in rows}) > 1, collections.Counter(rows)
        names = [
            f"{row[3]} after" if row[3] and counts[row] > 1 else f.name for row, f in zip(rows, findings, strict=True)
        ]
        for (*where, _, words), name, count in repeats(zip(rows, names, strict=True)):
            yield *where[not several :], name if count == 1 else f"{name}, {count} arrays", words

    @property
    def verdict(self) -> str:
        """The verdict in a line: equal, with its certainty, or not equal."""
        meshes = list(dict.fromkeys(in_words(finding.mesh) for finding in self.findings))
        on = f"on {', '.join(meshes)} and on one device"
        count = len(self.findings)
        arrays = f"{count} array" + "s" * (count != 1)
        if wrong := sum(finding.is_wrong for finding in self.findings):
            return f"NOT EQUAL: {wrong} of {arrays} {'differ' if wrong != 1 else 'differs'} {on}"
        if self.plain and self.plain.wrong:
            count = f"{len(self.plain.wrong)} of {len(self.plain.offs)} arrays"
            return f"NOT EQUAL: {count} differ from plain Flax and optax after two steps on {meshes[0]}"
        if not self.ok:
            unproven = sum(finding.verdict == "unproven" for finding in self.findings)
            return f"NOT PROVEN: {unproven} of {arrays} held only within a tolerance that hides a factor of 1.001 {on}"
        exact = sum(finding.verdict == "bitwise" for finding in self.findings)
        if exact == count:
            return f"EQUAL {on}: {arrays}, all bitwise"
        return f"EQUAL {on}: {arrays}, {exact} bitwise, {count - exact} within a tolerance"

    def to_json(self) -> str:
        """Return a JSON document of `"schema": "jshard.verify/1"`."""
        findings = [{**_plain(each), "signal": "/".join(each.cause.path) or None} for each in self.findings]
        begins = [
            {
                **_plain(each), "cause": each.looks, "path": each.cause.signal, "phase": each.cause.phase,
                "source": each.cause.source,
            }
            for each in self.beginnings
        ]  # fmt: skip
        return json.dumps(
            {
                "schema": "jshard.verify/1",
                "ok": self.ok,
                "verdict": self.verdict,
                "probes": self.probes,
                "findings": findings,
                "beginnings": begins,
                "unheld": self.unheld,
                "own_derivatives": [dataclasses.asdict(each) for each in self.own],
                "short": self.short,
                "plain": self.plain and dataclasses.asdict(self.plain),
            },
            indent=2,
        )


def _plain(entry: Finding | FirstDivergence) -> dict[str, Any]:
    fields = {name: value for name, value in vars(entry).items() if name not in ("cause", "hidden", "looks")}
    return {**fields, "place": entry.cause.place and str(entry.cause.place)}


def in_words(mesh: Mapping[str, int]) -> str:
    """Return a mesh in words: {data: 2, tensor: 4}."""
    return "{" + ", ".join(f"{name}: {size}" for name, size in mesh.items()) + "}"
