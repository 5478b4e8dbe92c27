"""The match between lines of the ledger and collectives of a compiled program."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping

from jshard.inspect.compiled.collective import CompiledCollective, itemsize
from jshard.inspect.ledger.entries import Line
from jshard.inspect.ledger.ledger import Ledger
from jshard.kernels.collectives import COLLECTIVES


def paired(
    ledger: Ledger, found: Iterable[CompiledCollective], sizes: Mapping[str, int]
) -> tuple[list[Ask], list[RunArray], Pairs]:
    """Return all ledger lines, all running arrays, and their pairs. A pair agrees in
    collective, mesh axes, bytes and the signal in XLA's name stack; later passes drop these
    conditions in turn. Traffic inside kernels is invisible to XLA and is left out."""
    every = [Ask(line) for line in ledger.lines]
    asked = [ask for ask in every if ask.line.declared is None]
    got = [RunArray(one, number, sizes) for one in found for number in range(len(one.payloads))]
    pairs = Pairs()
    for tests, how in PASSES:
        for ask, run in itertools.product(asked, got):
            if ask.left and run.left and all(test(ask, run) for test in tests):
                pairs.add(ask, run, how)
    for pair in list(pairs):
        if pair.ask.line.each is not None and pair.run.left:
            pairs.append(dataclasses.replace(pair, times=pair.run.left, how="lock-step"))
            pair.run.left = 0
    for run in got:
        if run.left:
            _across(run, asked, pairs)
        if run.left:
            _joined(run, asked, pairs)
    for match, ask in itertools.product((_split, _in_other_words), asked):
        if ask.left:
            match(ask, got, pairs)
    return every, got, pairs


class Ask:
    """A line of the ledger, with the number of its runs not yet matched."""

    def __init__(self, line: Line):
        self.line = line
        self.left = line.runs
        self.axes = line.mesh_axes
        self.elements = math.prod(line.shape)


class RunArray:
    """An array of a running collective, with the number of its runs not yet matched."""

    def __init__(self, got: CompiledCollective, number: int, sizes: Mapping[str, int]):
        self.got, self.number = got, number
        self.left = got.count
        self.payload, self.dtype = got.payloads[number], got.dtypes[min(number, len(got.dtypes) - 1)]
        self.cause = got.causes[number]
        self.is_joined = len(got.payloads) > 1
        self.elements = self.payload // itemsize(self.dtype)
        self.axes = got.mesh_axes(sizes)
        self.wire = COLLECTIVES[got.collective].wire(self.payload, got.group)


# -- conditions of a pair --


Test = Callable[[Ask, RunArray], bool]


def _axes(ask: Ask, run: RunArray) -> bool:
    if not run.axes:
        return ask.line.group == run.got.group
    is_along = set(run.axes) < set(ask.axes) and run.got.collective == "permute"  # a ring along some axes
    return is_along or set(ask.axes) == set(run.axes)


REWRITTEN = {("reduce_scatter", "all_reduce"), ("all_gather", "all_reduce"), ("all_reduce", "reduce_scatter")}
_kind: Test = lambda ask, run: ask.line.collective == run.got.collective and _axes(ask, run)
_rewritten: Test = lambda ask, run: (ask.line.collective, run.got.collective) in REWRITTEN and _axes(ask, run)
_bytes: Test = lambda ask, run: ask.line.payload == run.payload
_numbers: Test = lambda ask, run: ask.elements == run.elements
_signal: Test = lambda ask, run: ask.line.cause.is_like(run.cause)
_unsigned: Test = lambda ask, run: run.is_joined or not run.cause.path  # XLA has lost the name, or kept part of several
_remat: Test = lambda ask, run: ask.line.cause.remat == run.cause.remat

PASSES: list[tuple[tuple[Test, ...], str]] = [
    ((_kind, _bytes, _signal, _remat), ""),
    ((_kind, _bytes, _signal), ""),
    ((_kind, _bytes, _unsigned), ""),
    ((_kind, _numbers, _signal, _remat), "recast"),
    ((_kind, _numbers, _signal), "recast"),
    ((_kind, _numbers, _unsigned), "recast"),
    ((_rewritten, _numbers, _signal), "rewritten"),
    ((_rewritten, _numbers, _unsigned), "rewritten"),
    ((_kind, _bytes), ""),
]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A ledger line and its running array."""

    ask: Ask
    run: RunArray
    times: int
    how: str
    wire: int  # this line's bytes in one run
    hidden: float  # the hidden share of them


class Pairs(list[Pair]):
    """The pairs of ledger lines and running arrays."""

    def add(self, ask: Ask, run: RunArray, how: str) -> None:
        """Pair as many runs as both sides have left."""
        times = min(ask.left, run.left)
        ask.left -= times
        run.left -= times
        self.append(Pair(ask, run, times, how, run.wire, run.got.hidden))


def _across(run: RunArray, asked: list[Ask], pairs: Pairs) -> None:
    """Pair an all-reduce over several mesh axes with ledger lines along each axis: a sum of sums."""
    parts: list[Ask] = []
    missing = set(run.axes)
    for ask in asked:
        alike = ask.line.collective == run.got.collective == "all_reduce" and ask.elements == run.elements
        if alike and ask.left and set(ask.axes) <= missing and (_unsigned(ask, run) or _signal(ask, run)):
            parts.append(ask)
            missing -= set(ask.axes)
    if missing or not parts:
        return
    times = min(run.left, *(part.left for part in parts))
    run.left -= times
    asked_wire, rest = sum(part.line.wire for part in parts), run.wire
    for part in parts:
        part.left -= times
        share = rest if part is parts[-1] else run.wire * part.line.wire // max(1, asked_wire)
        rest -= share
        pairs.append(Pair(part, run, times, "merged", share, run.got.hidden))


def _joined(run: RunArray, asked: list[Ask], pairs: Pairs) -> None:
    """Pair an array with the ledger lines of the arrays concatenated in it."""
    smaller = [ask for ask in asked if _kind(ask, run) and ask.elements < run.elements]
    open_ = [ask for ask in smaller for _ in range(min(ask.left // run.left, run.elements // max(1, ask.elements)))]
    several = _sum(open_, run.elements)
    times = run.left
    for ask in several:
        ask.left -= times
        run.left = 0
        wire = run.wire * ask.elements // run.elements
        pairs.append(Pair(ask, run, times, "merged", wire, run.got.hidden))


def _sum(asked: list[Ask], elements: int, limit: int = 4096) -> list[Ask]:
    """Return the first lines in program order with sizes that add up to `elements`; [] if there are none."""
    sums: dict[int, list[Ask]] = {0: []}
    for ask in asked:
        for total, chosen in list(sums.items()):
            more = total + ask.elements
            if more <= elements and more not in sums and len(sums) < limit:
                sums[more] = [*chosen, ask]
        if elements in sums:
            return sums[elements]
    return []


def _split(ask: Ask, got: list[RunArray], pairs: Pairs) -> None:
    """Pair a line with several runs of its kind: smaller arrays, or sums along its mesh axes in turn."""
    parts = [run for run in got if run.left and _kind(ask, run) and _signal(ask, run) and run.elements < ask.elements]
    if sum(run.elements for run in parts) != ask.elements:
        parts = _along_each(ask, got)
    times = min((run.left for run in parts), default=0)
    if times:
        times = min(times, ask.left)
        ask.left -= times
        wire = sum(run.wire for run in parts)
        hidden = sum(run.wire * run.got.hidden for run in parts) / max(1, wire)
        for number, run in enumerate(parts):
            run.left -= times
            pairs.append(Pair(ask, run, times if number == 0 else 0, "split", wire, hidden))


def _along_each(ask: Ask, got: list[RunArray]) -> list[RunArray]:
    """Return the sums inside and between slices for a sum over all mesh axes of a line. A TPU fills up 128 lanes."""
    parts: list[RunArray] = []
    missing = set(ask.axes)
    for run in got:
        alike = run.got.collective == ask.line.collective == "all_reduce" and (_unsigned(ask, run) or _signal(ask, run))
        full = run.elements in (ask.elements, -(-ask.elements // 128) * 128)
        if run.left and alike and full and run.axes and set(run.axes) <= missing:
            parts.append(run)
            missing -= set(run.axes)
    return parts if len(parts) > 1 and not missing else []


def _in_other_words(ask: Ask, got: list[RunArray], pairs: Pairs) -> None:
    """Pair a line with collectives of another kind under its signal: a gather by permutes around a ring."""
    others = [run for run in got if run.left and _signal(ask, run) and _axes(ask, run) and run.cause.path]
    if others:
        kinds = sorted({run.got.collective for run in others})
        wire = sum(run.left * run.wire for run in others)
        hidden = sum(run.left * run.wire * run.got.hidden for run in others) / max(1, wire)
        pairs.append(Pair(ask, others[0], ask.left, f"by {', '.join(kinds)}", wire // ask.left, hidden))
        ask.left = 0
        for run in others:
            run.left = 0
