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
