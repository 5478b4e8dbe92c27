"""Which process the others wait for in every step: one rule, for what the launcher says and for `jshard top`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

SLOW = 2.0  # times as late as the one in the middle
MATTERS = 0.25  # part of a step that the others must wait for it


def is_slow(late: float, others: Sequence[float], took: float) -> bool:
    """Whether who is `late` seconds in each step of `took` holds up the others, which are so late."""
    middle = statistics.median(others)
    return late > 0 and late >= SLOW * middle and late - middle >= MATTERS * took
