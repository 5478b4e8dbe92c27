"""Promises about a ledger: `expect` of a signal's collectives, `jshard.budget` of a device's memory,
and the baseline. `expect: {all_reduce: 1, bytes: 64MiB}` and `budget: 16GiB` are keys of YAML. The
baseline is a small text file with the collectives and memory of a training step, as last accepted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from jshard.errors import JShardError, Location
from jshard.inspect.ledger.entries import Left, Line
from jshard.inspect.ledger.ledger import Ledger
from jshard.printing.table import table
from jshard.printing.units import exact_size
from jshard.signals.config import Configuration
from jshard.signals.signal import Signal

VERSION = 1
Key = tuple[str, str, str, str]  # signal, phase, collective, mesh axes


def check_promises(ledger: Ledger, configuration: Configuration) -> int:
    """Return the number of kept promises; raise a single error for all broken ones. A promise covers the
    forward and backward pass, at each place that looks the signal up: at every block for `block*`."""
    broken: list[JShardError] = []
    kept = 0
    for signal in configuration.signals.values():
        for name, lines in _places(signal, ledger, configuration).items():
            left = [each for each in ledger.left if each.signal == name]
            if left and signal.expect:
                broken.append(_unknown(signal, name, left))
                continue
            for what, promised in signal.expect:
                found = _found(what, lines)
                if found <= promised if what == "bytes" else found == promised:
                    kept += 1
                else:
                    broken.append(_broken(signal, name, what, promised, found))
    if broken:
        raise JShardError.of(broken)
    return kept


def _places(signal: Signal, ledger: Ledger, configuration: Configuration) -> dict[str, list[Line]]:
    """Return the ledger lines of a signal, by place in the program; none where the compiler decides."""
    found: dict[str, list[Line]] = {}
    for line in (*ledger.lines, *ledger.left):
        if line.signal == "-":
            continue
        asked = configuration.lookup(tuple(line.signal.split("/")))
        if asked.places is signal.places:  # the same one, under the name of its place
            found.setdefault(line.signal, []).extend([line] if isinstance(line, Line) else [])
    return found or {signal.name: []}


def _found(what: str, lines: list[Line]) -> int:
    if what == "bytes":
        return sum(line.total for line in lines)
    return sum(line.count for line in lines if line.collective == what)


def _unknown(signal: Signal, name: str, left: list[Left]) -> JShardError:
    """Return the error for a promise about collectives left to the compiler."""
    first = left[0]
    more = f" and {len(left) - 1} more" if len(left) >= 2 else ""
    return JShardError(
        f'signal "{name}" ({signal.at("expect")}) expects a count, but only the compiler decides '
        f"what {first.words}{more} moves",
        hint="do it inside jax.shard_map, or place its array by jshard.place first",
    )


def _broken(signal: Signal, name: str, what: str, promised: int, found: int) -> JShardError:
    who = f'signal "{name}" ({signal.at(f"expect.{what}")})'
    hint = f"write {what}: {found}, or see jshard explain"
    if what == "bytes":
        fault = f"{who} expects at most {promised:,} bytes on the wire per device, and {found:,} are asked for"
    else:
        fault = f"{who} expects {promised} {what}, and {found} {'is' if found == 1 else 'are'} asked for"
    return JShardError(fault, hint=hint)


def over_budget(ledger: Ledger, configuration: Configuration) -> str | None:
    """Return the error sentence if more bytes are at rest on a device than `jshard.budget` allows."""
    budget = configuration.budget
    if budget is None or ledger.held <= budget:
        return None
    biggest = max(ledger.memory, key=lambda rest: rest.total)
    who = "outside every signal" if biggest.signal == "-" else f'under signal "{biggest.signal}" ({biggest.place})'
    return (
        f"jshard.budget ({configuration.budget_place}) is {exact_size(budget)}, and {exact_size(ledger.held)} are at rest on "
        f"each device, {exact_size(biggest.total)} of it {who}; write budget: {ledger.held}, or split more of it: store: data"
    )


# -- the baseline --


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Collectives as (runs, bytes on the wire of all runs) and bytes at rest, per device.
    Keys are names without line numbers, so that moving a line changes nothing."""

    mesh: str
    collectives: dict[Key, tuple[int, int]]
    memory: dict[str, int]

    @classmethod
    def of(cls, ledger: Ledger, mesh: str) -> Baseline:
        """Return the baseline of a ledger."""
        collectives: dict[Key, tuple[int, int]] = {}
        for entry in (*ledger.lines, *ledger.left):
            times, wire = collectives.get(_key(entry), (0, 0))
            more = entry.total if isinstance(entry, Line) else 0  # the compiler's bytes are unknown
            collectives[_key(entry)] = times + entry.count, wire + more
        return cls(mesh, collectives, {rest.signal: rest.total for rest in ledger.memory})

    def text(self, command: str) -> str:
        """Return the text of the file to commit. `command` checks it, and `command --update` rewrites it."""
        rows = [
            (signal, phase, collective, f"over {axes}", f"x {times:,}", f"{wire:,} B")
            for (signal, phase, collective, axes), (times, wire) in sorted(self.collectives.items())
        ]
        held = [(signal, "at rest", f"{bytes_:,} B") for signal, bytes_ in sorted(self.memory.items())]
        return "\n".join(
            [
                f"# What each device sends and holds in one training step. Held by: {command}",
                f"# A change is accepted by: {command} --update",
                f"baseline {VERSION}",
                f"mesh {self.mesh}",
                *table(rows, right=(4, 5)),
                *table(held, right=(2,)),
                "",
            ]
        )

    @classmethod
    def read(cls, text: str, name: str, command: str) -> Baseline:
        """Read the text of a baseline from the file `name`."""
        hint = f"type: {command} --update"
        mesh, collectives, memory = "", dict[Key, tuple[int, int]](), dict[str, int]()
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
        if not lines or lines[0][1].strip() != f"baseline {VERSION}":
            raise JShardError(f'{name} does not begin with "baseline {VERSION}", as this jshard writes it', hint=hint)
        for number, line in lines[1:]:
            if found := re.fullmatch(r"mesh (.+)", line):
                mesh = found[1]
            elif found := re.fullmatch(r"(\S+) +(\w+) +(\w+) +over (.+?) +x +([\d,]+) +([\d,]+) B", line):
                collectives[found[1], found[2], found[3], found[4]] = _number(found[5]), _number(found[6])
            elif found := re.fullmatch(r"(\S+) +at rest +([\d,]+) B", line):
                memory[found[1]] = _number(found[2])
            else:
                raise JShardError(f'{name}:{number} is "{line.strip()}", not a line of a baseline', hint=hint)
        return cls(mesh, collectives, memory)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def added(was: Baseline, ledger: Ledger, mesh: str, *, name: str, command: str) -> Iterator[str]:
    """Yield a sentence for each collective or memory beyond the baseline, with the line to blame."""
    hint = f"accept it: {command} --update"
    now = Baseline.of(ledger, mesh)
    if now.mesh != was.mesh:
        yield f"{name} was written for mesh {was.mesh}, but the mesh is now {now.mesh}; {hint}"
        return
    for key, (times, wire) in now.collectives.items():
        signal, phase, collective, axes = key
        before, wire_before = was.collectives.get(key, (0, 0))
        line = next(entry for entry in (*ledger.lines, *ledger.left) if _key(entry) == key)
        who, where = _who(signal, line.place, line.source), f"over {axes} in {phase}"
        if isinstance(line, Left) and times > before:
            more = f"{times - before:,} more {line.primitive} {where}"
            yield f"{who} leaves {more} to the compiler than {name}, bytes unknown; {hint}"
        elif times > before:
            more = f"{times - before:,} more {collective} {where}"
            yield f"{who} asks for {more} than {name}, {wire - wire_before:,} B on the wire; {hint}"
        elif wire > wire_before:
            more = f"{wire - wire_before:,} B more on the wire by {collective} {where}"
            yield f"{who} asks for {more} than {name}; {hint}"
    places = {rest.signal: rest.place for rest in ledger.memory}
    for signal, bytes_ in now.memory.items():
        if bytes_ > (before := was.memory.get(signal, 0)):
            who = _who(signal, places[signal], "")
            yield f"{who} holds {bytes_ - before:,} B more at rest than {name}; {hint}"


def _key(entry: Line | Left) -> Key:
    name = entry.collective if isinstance(entry, Line) else f"compiler_decides_{entry.primitive}"
    return entry.signal, entry.phase, name.replace("-", "_"), entry.axis


def _who(signal: str, place: Location | None, source: str) -> str:
    if signal == "-":
        return f"the program{f' ({source})' if source else ''}, under no signal,"
    return f'signal "{signal}" ({place})'
