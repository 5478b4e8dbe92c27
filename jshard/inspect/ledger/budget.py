"""`jshard.budget: 16GiB`: what a device may hold, against what a training step holds."""

from __future__ import annotations

from jshard.inspect.ledger.ledger import Ledger
from jshard.signals.config import Configuration
from jshard.units import exact_size


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
