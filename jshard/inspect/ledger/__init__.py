"""The ledger of a program: each collective, its price and the YAML line that asks for it."""

from __future__ import annotations

from jshard.inspect.ledger.entries import Line as Line
from jshard.inspect.ledger.ledger import Ledger as Ledger
from jshard.inspect.ledger.ledger import read as read
from jshard.inspect.ledger.tracing import Traced as Traced
from jshard.inspect.ledger.tracing import ledger_of as ledger_of
