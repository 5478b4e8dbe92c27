"""Numbers of bytes in words."""

from __future__ import annotations


def size(count: float) -> str:
    """`516 B`, `16.6 KiB`, `1.25 GiB`: three digits."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1023.5 or unit == "PiB":
            break
        value /= 1024
    if unit == "B":
        return f"{count:,.0f} B"
    return f"{value:.2f} {unit}" if value < 9.995 else f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def exact_size(count: int) -> str:
    """`1,280 B`, and in larger units beside it where it is large: `2,097,152 B (2.0 MiB)`."""
    return f"{count:,} B{in_large_units(count)}"


def in_large_units(count: int, sign: str = "") -> str:
    """` (5.0 GiB)`, from a MiB on; nothing below. With `sign="+"` the sign is told of a number above zero too."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if abs(count) >= 2**power:
            return f" ({count / 2**power:{sign},.1f} {unit})"
    return ""
