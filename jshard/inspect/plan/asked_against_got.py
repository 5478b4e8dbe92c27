"""What the program asked of the wire against what the compiler made of it: every difference by name."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jshard.chips import CHIPS, Chip
from jshard.errors import Place
from jshard.inspect.hlo import Got
from jshard.inspect.ledger import Ledger, Line
from jshard.kernels.collectives import COLLECTIVES

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


def compare(ledger: Ledger, found: Iterable[Got], sizes: Mapping[str, int], chip: Chip = CHIPS["cpu"]) -> Comparison:
    """The two sides paired: by collective, mesh axes, bytes and the signal that XLA's name stack tells, then with one of
    these let go after the other. `sizes` are those of the mesh. `chip` says how much of a kernel's wire its own products
    are long enough to hide: XLA's asynchronous collectives get the benefit of the doubt, kernels of ours don't."""
    every = [_Asked(line) for line in ledger.lines]
    asked = [ask for ask in every if ask.line.declared is None]
    got = [_Run(one, number, sizes) for one in found for number in range(len(one.payloads))]
    pairs = _Pairs()
    for same, how in PASSES:
        for ask, run in itertools.product(asked, got):
            if ask.left and run.left and same(ask, run):
                pairs.add(ask, run, how)
    for run in got:
        if run.left:
            _joined(run, asked, pairs)
    for ask in asked:
        if ask.left:
            _split(ask, got, pairs)
    for ask in asked:
        if ask.left:
            _in_other_words(ask, got, pairs)
    return Comparison((*_rows(every, pairs, chip), *_added(got)))


class _Asked:
    """A line of the ledger, and how many of its runs are not yet accounted for."""

    def __init__(self, line: Line):
        self.line = line
        self.left = line.count
        self.path = () if line.signal == "-" else tuple(line.signal.split("/"))
        self.backward = line.phase == "backward"
        self.elements = math.prod(line.shape)
        self.remat = "remat" in line.via.split(", ")

    @property
    def axes(self) -> tuple[str, ...]:
        return self.line.mesh_axes


class _Run:
    """One array of a collective that runs, and how many of its runs are not yet accounted for."""

    def __init__(self, got: Got, number: int, sizes: Mapping[str, int]):
        self.got = got
        self.left = got.count
        self.payload, self.dtype = got.payloads[number], got.dtypes[min(number, len(got.dtypes) - 1)]
        name = got.op_names[number] if number < len(got.op_names) else got.op_name
        self.path, self.backward, self.remat = path_of(name)
        self.is_named = "/" in name
        self.is_joined = len(got.payloads) > 1
        self.elements = self.payload // _itemsize(self.dtype)
        self.axes = tuple(axis for axis in got.mesh_axes(sizes))
        self.wire = COLLECTIVES[got.collective].wire(self.payload, got.group)


def path_of(op_name: str) -> tuple[tuple[str, ...], bool, bool]:
    """The signals that a name stack is nested in, whether it is of a backward pass, and whether of one that computes the
    forward anew."""
    stacks = re.split(r"(?<=\))/", op_name)
    path: list[str] = []
    for part in stacks:
        names = re.findall(r"signal:([^/()]+)", part)
        if names and names != path[-len(names) :]:  # a transposed remat repeats the stack it was called under
            path += names
    return tuple(path), "transpose(" in op_name, "rematted_computation" in op_name


def _itemsize(dtype: str) -> int:
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return max(1, int(digits[1]) // 8) if digits else 1


# -- the pairing --

Same = Callable[[_Asked, _Run], bool]


def _axes(ask: _Asked, run: _Run) -> bool:
    return set(ask.axes) == set(run.axes) if run.axes else ask.line.group == run.got.group


def _kind(ask: _Asked, run: _Run) -> bool:
    return ask.line.collective == run.got.collective and _axes(ask, run)


def _bytes(ask: _Asked, run: _Run) -> bool:
    return ask.line.payload == run.payload


def _numbers(ask: _Asked, run: _Run) -> bool:
    return ask.elements == run.elements


def _signal(ask: _Asked, run: _Run) -> bool:
    return ask.path == run.path and ask.backward == run.backward


def _unsigned(ask: _Asked, run: _Run) -> bool:
    """XLA has lost the name, or kept one of several."""
    return not run.is_named or run.is_joined or not run.path


def _remat(ask: _Asked, run: _Run) -> bool:
    return ask.remat == run.remat


REWRITTEN = {("reduce_scatter", "all_reduce"), ("all_gather", "all_reduce"), ("all_reduce", "reduce_scatter")}


def _rewritten(ask: _Asked, run: _Run) -> bool:
    return (ask.line.collective, run.got.collective) in REWRITTEN and _axes(ask, run)


def _all(*tests: Same) -> Same:
    return lambda ask, run: all(test(ask, run) for test in tests)


PASSES: list[tuple[Same, str]] = [
    (_all(_kind, _bytes, _signal, _remat), ""),
    (_all(_kind, _bytes, _signal), ""),
    (_all(_kind, _bytes, _unsigned), ""),
    (_all(_kind, _numbers, _signal, _remat), "recast"),
    (_all(_kind, _numbers, _signal), "recast"),
    (_all(_kind, _numbers, _unsigned), "recast"),
    (_all(_rewritten, _numbers, _signal), "rewritten"),
    (_all(_rewritten, _numbers, _unsigned), "rewritten"),
    (_all(_kind, _bytes), ""),
]


@dataclasses.dataclass(frozen=True)
class _Pair:
    ask: _Asked
    run: _Run
    times: int
    how: str
    wire: int  # bytes of once that are this line's


class _Pairs(list[_Pair]):
    def add(self, ask: _Asked, run: _Run, how: str) -> None:
        times = min(ask.left, run.left)
        ask.left -= times
        run.left -= times
        self.append(_Pair(ask, run, times, how, run.wire))


def _joined(run: _Run, asked: list[_Asked], pairs: _Pairs) -> None:
    """An array that carries several that were asked for, one behind the other."""
    smaller = [ask for ask in asked if _kind(ask, run) and ask.elements < run.elements]
    open_ = [ask for ask in smaller for _ in range(min(ask.left // run.left, run.elements // max(1, ask.elements)))]
    several = _sum(open_, run.elements)
    times = run.left
    for ask in several:
        ask.left -= times
        run.left = 0
        pairs.append(_Pair(ask, run, times, "merged", run.wire * ask.elements // run.elements))


def _sum(asked: list[_Asked], elements: int, limit: int = 4096) -> list[_Asked]:
    """Some of them whose sizes add up to `elements`, those that come first in the program; [] when none do."""
    sums: dict[int, list[_Asked]] = {0: []}
    for ask in asked:
        for total, chosen in list(sums.items()):
            more = total + ask.elements
            if more <= elements and more not in sums and len(sums) < limit:
                sums[more] = [*chosen, ask]
        if elements in sums:
            return sums[elements]
    return []


def _split(ask: _Asked, got: list[_Run], pairs: _Pairs) -> None:
    """One that runs as several smaller ones of its kind."""
    parts = [run for run in got if run.left and _kind(ask, run) and _signal(ask, run) and run.elements < ask.elements]
    times = min((run.left for run in parts), default=0)
    if times and sum(run.elements for run in parts) == ask.elements:
        times = min(times, ask.left)
        ask.left -= times
        for number, run in enumerate(parts):
            run.left -= times
            pairs.append(_Pair(ask, run, times if number == 0 else 0, "split", sum(each.wire for each in parts)))


def _in_other_words(ask: _Asked, got: list[_Run], pairs: _Pairs) -> None:
    """One that the compiler does by others of another kind under the same signal: a gather by permutes around a ring."""
    others = [run for run in got if run.left and _signal(ask, run) and _axes(ask, run) and run.path]
    if others:
        kinds = sorted({run.got.collective for run in others})
        wire = sum(run.left * run.wire for run in others)
        pairs.append(_Pair(ask, others[0], ask.left, f"by {', '.join(kinds)}", wire // ask.left))
        ask.left = 0
        for run in others:
            run.left = 0


# -- the rows --


def _rows(asked: list[_Asked], pairs: _Pairs, chip: Chip) -> list[Row]:
    found: dict[Any, list[_Asked]] = {}
    for ask in asked:
        line = ask.line
        key = (line.place, line.signal, line.phase, line.collective, line.mesh_axes, line.via)
        found.setdefault(key, []).append(ask)
    mine: dict[int, list[_Pair]] = {}
    for pair in pairs:
        mine.setdefault(id(pair.ask), []).append(pair)
    return [
        _row(key, several, [pair for ask in several for pair in mine.get(id(ask), [])], chip)
        for key, several in found.items()
    ]


def _row(key: Any, asked: list[_Asked], pairs: list[_Pair], chip: Chip) -> Row:
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


def _runs(pairs: list[_Pair]) -> int:
    """How often the instructions run that these are part of."""
    return sum({id(pair.run.got): pair.run.got.count for pair in pairs}.values())


def _kind_of(pair: _Pair) -> str:
    return pair.how.removeprefix("by ") if pair.how.startswith("by") else pair.run.got.collective


def _parts(pair: _Pair, pairs: list[_Pair]) -> str:
    return f"{sum(other.how == 'split' and other.ask is pair.ask for other in pairs)} parts"


def _recast(pair: _Pair) -> str:
    """The dtype that an array travels in, when it is not the one asked for."""
    if pair.how.startswith("by"):
        return ""
    ran = _itemsize(pair.run.dtype)
    asked = pair.ask.line.payload // max(1, pair.ask.elements)
    return "" if ran == asked else f"{DTYPES.get(pair.run.dtype, pair.run.dtype)} instead of {pair.ask.line.dtype}"


def _counted(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    for word, times in pairs:
        sums[word] = sums.get(word, 0) + times
    return list(sums.items())


def _added(got: list[_Run]) -> list[Row]:
    """What runs and nobody asked for."""
    found: dict[Any, list[_Run]] = {}
    for run in got:
        if run.left and run.got.group > 1:
            key = ("/".join(run.path) or "-", "backward" if run.backward else "forward", run.got.collective, run.axes)
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
