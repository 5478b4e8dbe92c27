"""What a configuration promises of a ledger: `expect: {all_reduce: 1, bytes: 64MiB}` of a signal's collectives, and
`jshard.budget: 16GiB` of what a device holds."""

from __future__ import annotations

from jshard.errors import JShardError
from jshard.inspect.ledger.entries import Left, Line
from jshard.inspect.ledger.ledger import Ledger
from jshard.printing.units import exact_size
from jshard.signals.config import Configuration
from jshard.signals.signal import Signal


def check_promises(ledger: Ledger, configuration: Configuration) -> int:
    """How many promises the ledger keeps; one error for all that it breaks. A promise is about all of the ledger,
    forward and backward, at each place that the signal is looked up for: at every block for `block*`."""
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
    """The lines of the ledger that a signal asked for, by the place in the program; none where the compiler decides."""
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
    """Make the error of a promise about collectives that only the compiler decides."""
    first = left[0]
    more = f" and {len(left) - 1} more" if len(left) >= 2 else ""
    return JShardError(
        f'signal "{name}" ({signal.at("expect")}) expects, and only the compiler decides what {first.words}{more} moves',
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
    """The sentence when more is at rest on a device than `jshard.budget` allows."""
    budget = configuration.budget
    if budget is None or ledger.held <= budget:
        return None
    biggest = max(ledger.memory, key=lambda rest: rest.total)
    who = "outside every signal" if biggest.signal == "-" else f'under signal "{biggest.signal}" ({biggest.place})'
    return (
        f"jshard.budget ({configuration.budget_place}) is {exact_size(budget)}, and {exact_size(ledger.held)} are at rest on "
        f"each device, {exact_size(biggest.total)} of it {who}; write budget: {ledger.held}, or split more of it: store: data"
    )
