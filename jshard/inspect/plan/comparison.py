"""The ledger's collectives against the compiled ones: every difference by name."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from jshard.errors import Location
from jshard.inspect.compiled.collective import CompiledCollective, itemsize
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.plan.match import Ask, Pair, Pairs, RunArray, paired
from jshard.printing.units import size

DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "pred": "bool", "s32": "int32", "u32": "uint32",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Deviation:
    """A difference between the asked and the running collectives: `times` of a row's collectives."""

    kind: str  # dropped, merged, split, rewritten, recast, added, lock-step; declared by a kernel alone
    times: int
    words: str

    def __str__(self) -> str:
        return self.words


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of a kind for a signal in a phase, as asked and as run. `asked` and `got` count runs; `wire_asked` and
    `wire_got` are their bytes on the wire per device, `hidden` the bytes sent while the device works, by the schedule."""

    place: Location | None
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
    differences: tuple[Deviation, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All asked and all running collectives, in the order of the ledger; unasked ones come last."""

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
        """Bytes sent while the device works."""
        return sum(row.hidden for row in self.rows)

    @property
    def differences(self) -> list[tuple[Row, Deviation]]:
        return [(row, each) for row in self.rows for each in row.differences]


def compare(ledger: Ledger, found: Iterable[CompiledCollective], sizes: Mapping[str, int]) -> Comparison:
    """Pair the two sides. `sizes` are the sizes of the mesh."""
    every, got, pairs = paired(ledger, found, sizes)
    return Comparison((*_rows(every, pairs), *_added(got)))


# -- the rows --


Key = tuple[Location | None, str, str, str, tuple[str, ...], str]  # place, signal, phase, collective, mesh axes, via


def _rows(asked: list[Ask], pairs: Pairs) -> Iterator[Row]:
    found: dict[Key, list[Ask]] = {}
    for ask in asked:
        line = ask.line
        key = (line.place, line.signal, line.phase, line.collective, line.mesh_axes, line.via)
        found.setdefault(key, []).append(ask)
    for key, several in found.items():
        mine = [pair for ask in several for pair in pairs if pair.ask is ask]
        runs = [(pair.run, pair.times, pair.wire, pair.hidden) for pair in mine]
        yield _row(key, several, runs, _differences(several, mine))


def _row(key: Key, asked: list[Ask], runs: list[tuple[RunArray, int, int, float]], differences: list[Deviation]) -> Row:
    """Return the sums of asked and running collectives. A run is (array, times, bytes on the wire, hidden share)."""
    own = [ask.line for ask in asked if ask.line.declared is not None]
    return Row(
        *key,
        asked=sum(ask.line.runs for ask in asked),
        got=sum(times for _, times, _, _ in runs) + sum(line.count for line in own),
        wire_asked=sum(ask.line.total for ask in asked),
        wire_got=sum(times * wire for _, times, wire, _ in runs) + sum(line.total for line in own),
        hidden=round(sum(times * wire * hidden for _, times, wire, hidden in runs)),
        differences=tuple(differences),
    )


def _differences(asked: list[Ask], pairs: list[Pair]) -> list[Deviation]:
    """Return every difference between the asked and the running collectives."""
    found: list[tuple[str, str, int]] = []  # kind, words, times
    own = [ask.line for ask in asked if ask.line.declared is not None]  # a kernel moves its bytes itself, unseen by XLA
    found += [("declared", "inside a kernel, as it declares", line.count) for line in own]
    found += [("dropped", "dropped", ask.left) for ask in asked if ask.line.declared is None]
    rewritten = [pair for pair in pairs if pair.how == "rewritten"]
    found += [("rewritten", f"run as {pair.run.got.collective}", pair.times) for pair in rewritten]
    found += [("rewritten", f"run {pair.how}", pair.times) for pair in pairs if pair.how.startswith("by")]
    found += [("recast", f"in {dtypes}", pair.times) for pair in pairs if (dtypes := _recast(pair))]
    besides = [pair for pair in pairs if pair.how == "lock-step"]
    moved = size(sum(pair.times * pair.wire for pair in besides))
    found += [("lock-step", f"in ticks in which a stage has none to send ({moved})", pair.times) for pair in besides]
    joined = [pair for pair in pairs if pair.run.is_joined or pair.how == "merged"]
    times = sum(pair.times for pair in joined)
    into = sum({id(pair.run.got): pair.run.got.count for pair in joined}.values())  # runs of their instructions
    found.append(("merged", f"merged into {into:,}" if into < times else "merged with others", times))
    split = [pair for pair in pairs if pair.how == "split"]
    parts = collections.Counter(id(pair.ask) for pair in split)
    found += [("split", f"split into {parts[id(pair.ask)]} parts", pair.times) for pair in split]
    sums: dict[tuple[str, str], int] = {}
    for kind, words, times in found:
        sums[kind, words] = sums.get((kind, words), 0) + times
    return [Deviation(kind, times, f"{times:,} {words}") for (kind, words), times in sums.items() if times]


def _recast(pair: Pair) -> str:
    """Return the dtype of an array on the wire if it is not the asked dtype."""
    if pair.how.startswith("by"):
        return ""
    ran = itemsize(pair.run.dtype)
    asked = pair.ask.line.payload // max(1, pair.ask.elements)
    return "" if ran == asked else f"{DTYPES.get(pair.run.dtype, pair.run.dtype)} instead of {pair.ask.line.dtype}"


def _added(got: list[RunArray]) -> Iterator[Row]:
    """Yield rows for running collectives without a ledger line."""
    found: dict[Key, list[RunArray]] = {}
    for run in got:
        if run.left and run.got.group > 1:
            key = (None, run.cause.signal, run.cause.phase, run.got.collective, run.axes, "")
            found.setdefault(key, []).append(run)
    for key, runs in found.items():
        times = sum(run.left for run in runs)
        words = f"{times:,} that nobody asked for"
        left = [(run, run.left, run.wire, run.got.hidden) for run in runs]
        yield _row(key, [], left, [Deviation("added", times, words)])
