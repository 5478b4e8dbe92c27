"""What the program asked of the wire against what the compiler made of it: every difference by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jshard.chips import CHIPS, Chip
from jshard.errors import Place
from jshard.inspect.compiled.traffic import CompiledCollective
from jshard.inspect.ledger.entries import Line
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.plan.match import Ask, Pair, Pairs, Run, itemsize, paired

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "pred": "bool"}


@dataclasses.dataclass(frozen=True)
class Difference:
    """One way in which what runs is not what was asked: `times` of a row's collectives."""

    kind: str  # dropped, merged, split, rewritten, recast, added; declared, where a kernel's word is all there is
    times: int
    words: str

    def __str__(self) -> str:
        return self.words


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one kind that one signal asked for in one phase, and what runs for them. `asked` and `got` count runs;
    `wire_asked` and `wire_got` are bytes on the wire per device of all of them, `hidden` those that run asynchronously, or in
    a kernel under its own products."""

    place: Place | None
    signal: str
    phase: str
    collective: str
    mesh_axes: tuple[str, ...]
    via: str
    asked: int
    got: int
    wire_asked: int
    wire_got: int
    hidden: int
    asynchronous: int  # how many of `got`
    differences: tuple[Difference, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that was asked and everything that runs, in the order of the ledger; what nobody asked for comes last."""

    rows: tuple[Row, ...]

    @property
    def asked(self) -> int:
        """Bytes on the wire per device, as asked."""
        return sum(row.wire_asked for row in self.rows)

    @property
    def got(self) -> int:
        """Bytes on the wire per device, as they run."""
        return sum(row.wire_got for row in self.rows)

    @property
    def hidden(self) -> int:
        """Of the bytes that run, those that something else can run beside."""
        return sum(row.hidden for row in self.rows)

    @property
    def differences(self) -> list[tuple[Row, Difference]]:
        return [(row, each) for row in self.rows for each in row.differences]

    def by_signal(self) -> dict[str, tuple[int, int]]:
        """Bytes on the wire asked and got, by signal."""
        sums: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            asked, got = sums.get(row.signal, (0, 0))
            sums[row.signal] = (asked + row.wire_asked, got + row.wire_got)
        return sums


def compare(
    ledger: Ledger, found: Iterable[CompiledCollective], sizes: Mapping[str, int], chip: Chip = CHIPS["cpu"]
) -> Comparison:
    """The two sides paired. `sizes` are those of the mesh. `chip` says how much of a kernel's wire its own products are long
    enough to hide: XLA's asynchronous collectives get the benefit of the doubt, kernels of ours don't."""
    every, got, pairs = paired(ledger, found, sizes)
    return Comparison((*_rows(every, pairs, chip), *_added(got)))


# -- the rows --


def _rows(asked: list[Ask], pairs: Pairs, chip: Chip) -> list[Row]:
    found: dict[Any, list[Ask]] = {}
    for ask in asked:
        line = ask.line
        key = (line.place, line.signal, line.phase, line.collective, line.mesh_axes, line.via)
        found.setdefault(key, []).append(ask)
    mine: dict[int, list[Pair]] = {}
    for pair in pairs:
        mine.setdefault(id(pair.ask), []).append(pair)
    return [
        _row(key, several, [pair for ask in several for pair in mine.get(id(ask), [])], chip)
        for key, several in found.items()
    ]


def _row(key: Any, asked: list[Ask], pairs: list[Pair], chip: Chip) -> Row:
    place, signal, phase, collective, mesh_axes, via = key
    differences = []
    own = [ask for ask in asked if ask.line.declared is not None]  # a kernel moves its bytes itself, unseen by XLA
    declared = sum(ask.line.count for ask in own)
    under = {id(ask): hidden_in_kernel(ask.line, chip) for ask in own}
    if declared:
        words = f"{declared:,} inside a kernel, by its own word"
        if any(ask.line.schedule for ask in own):
            words += f", {100 * sum(under.values()) // sum(ask.line.total for ask in own)} % of it under its products"
        differences.append(Difference("declared", declared, words))
    dropped = sum(ask.left for ask in asked if ask.line.declared is None)
    if dropped:
        differences.append(Difference("dropped", dropped, f"{dropped:,} dropped"))
    for how, word in (("rewritten", "run as"), ("by", "run by")):
        for kind, times in _counted((_kind_of(pair), pair.times) for pair in pairs if pair.how.startswith(how)):
            differences.append(Difference("rewritten", times, f"{times:,} {word} {kind}"))
    for dtypes, times in _counted((_recast(pair), pair.times) for pair in pairs):
        if dtypes:
            differences.append(Difference("recast", times, f"{times:,} in {dtypes}"))
    joined = [pair for pair in pairs if pair.run.is_joined or pair.how == "merged"]
    if joined:
        times, into = sum(pair.times for pair in joined), _runs(joined)
        words = f"{times:,} merged into {into:,}" if into < times else f"{times:,} merged with others"
        differences.append(Difference("merged", times, words))
    for parts, times in _counted(
        (_parts(pair, pairs), pair.times) for pair in pairs if pair.how == "split" and pair.times
    ):
        differences.append(Difference("split", times, f"{times:,} split into {parts}"))
    waiting = [pair for pair in pairs if pair.run.got.asynchronous]
    return Row(
        place, signal, phase, collective, mesh_axes, via,
        asked=sum(ask.line.count for ask in asked),
        got=sum(pair.times for pair in pairs) + declared,
        wire_asked=sum(ask.line.total for ask in asked),
        wire_got=sum(pair.times * pair.wire for pair in pairs) + sum(ask.line.total for ask in own),
        hidden=sum(pair.times * pair.wire for pair in waiting) + sum(under.values()),
        asynchronous=sum(pair.times for pair in waiting) + sum(ask.line.count for ask in own if under[id(ask)]),
        differences=tuple(differences),
    )  # fmt: skip


def hidden_in_kernel(line: Line, chip: Chip) -> int:
    """Of the bytes that a kernel sends, those that its own products are long enough to hide."""
    return 0 if line.schedule is None else line.count * line.schedule.hidden(line.wire, chip)


def _runs(pairs: list[Pair]) -> int:
    """How often the instructions run that these are part of."""
    return sum({id(pair.run.got): pair.run.got.count for pair in pairs}.values())


def _kind_of(pair: Pair) -> str:
    return pair.how.removeprefix("by ") if pair.how.startswith("by") else pair.run.got.collective


def _parts(pair: Pair, pairs: list[Pair]) -> str:
    return f"{sum(other.how == 'split' and other.ask is pair.ask for other in pairs)} parts"


def _recast(pair: Pair) -> str:
    """The dtype that an array travels in, when it is not the one asked for."""
    if pair.how.startswith("by"):
        return ""
    ran = itemsize(pair.run.dtype)
    asked = pair.ask.line.payload // max(1, pair.ask.elements)
    return "" if ran == asked else f"{DTYPES.get(pair.run.dtype, pair.run.dtype)} instead of {pair.ask.line.dtype}"


def _counted(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    for word, times in pairs:
        sums[word] = sums.get(word, 0) + times
    return list(sums.items())


def _added(got: list[Run]) -> list[Row]:
    """What runs and nobody asked for."""
    found: dict[Any, list[Run]] = {}
    for run in got:
        if run.left and run.got.group > 1:
            key = (run.cause.signal, run.cause.phase, run.got.collective, run.axes)
            found.setdefault(key, []).append(run)
    rows = []
    for (signal, phase, collective, axes), runs in found.items():
        times, waiting = sum(run.left for run in runs), [run for run in runs if run.got.asynchronous]
        rows.append(
            Row(
                None, signal, phase, collective, axes, "",
                asked=0,
                got=times,
                wire_asked=0,
                wire_got=sum(run.left * run.wire for run in runs),
                hidden=sum(run.left * run.wire for run in waiting),
                asynchronous=sum(run.left for run in waiting),
                differences=(Difference("added", times, f"{times:,} that nobody asked for"),),
            )
        )  # fmt: skip
    return rows
