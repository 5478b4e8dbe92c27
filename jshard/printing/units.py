"""Bytes and other numbers with units, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size(count: float) -> str:
    """Return `516 B`, `16.6 KiB`, `1.25 GiB`: three digits."""
    return three_digits(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def operations(count: float) -> str:
    """Return `516 FLOP`, `16.6 GFLOP`: three digits."""
    return three_digits(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def three_digits(value: float, base: int, units: Sequence[str]) -> str:
    """Return `value`, in the first of `units`, in the largest unit with a number of at least 1."""
    power = 0
    while value >= base - 0.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    if not power:
        return f"{value:,.0f} {units[0]}"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[power]}"


def exact_size(count: int) -> str:
    """Return `1,280 B`, with larger units beside a large number: `2,097,152 B (2.0 MiB)`."""
    return f"{count:,} B{in_large_units(count)}"


def in_large_units(count: int, sign: str = "") -> str:
    """Return ` (5.0 GiB)` for at least a MiB, else "". `sign="+"` shows the sign of a positive number too."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if abs(count) >= 2**power:
            return f" ({count / 2**power:{sign},.1f} {unit})"
    return ""


def perplexity(loss: float) -> float:
    """Return e to the power of a mean negative log-likelihood."""
    return math.exp(min(loss, 700.0))  # a larger power overflows


def duration(seconds: float) -> str:
    """Return `45 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
