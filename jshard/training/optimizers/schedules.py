"""Learning rates over a run, by short words: optax's schedules after a warmup, to the run's last step unless said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

Schedule = Callable[[Any], Any]


def constant(peak: float) -> Schedule:
    """Stay at `peak`."""
    return optax.constant_schedule(peak)


def linear(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Fall from `peak` to `end` in a line."""
    return optax.linear_schedule(peak, end, steps)


def cosine(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Fall from `peak` to `end` along a half cosine."""
    return optax.cosine_decay_schedule(peak, steps, end / peak)


def warmup_constant(peak: float, warmup: int) -> Schedule:
    """Rise from 0 to `peak` in `warmup` steps, and stay."""
    return optax.linear_schedule(0.0, peak, warmup)


def warmup_linear(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """Rise from 0 to `peak` in `warmup` of `steps` steps, and fall to `end` in a line."""
    return optax.join_schedules([warmup_constant(peak, warmup), linear(peak, steps - warmup, end)], [warmup])


def warmup_cosine(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """Rise from 0 to `peak` in `warmup` of `steps` steps, and fall to `end` along a half cosine."""
    return optax.join_schedules([warmup_constant(peak, warmup), cosine(peak, steps - warmup, end)], [warmup])


def warmup_stable_decay(peak: float, warmup: int, decay: int, steps: int, end: float = 0.0) -> Schedule:
    """Rise from 0 to `peak` in `warmup` of `steps` steps, stay, and fall to `end` in a line in the last `decay`."""
    parts = [warmup_constant(peak, warmup), constant(peak), linear(peak, decay, end)]
    return optax.join_schedules(parts, [warmup, steps - decay])


WORDS: dict[str, Callable[..., Schedule]] = {
    each.__name__: each
    for each in (constant, linear, cosine, warmup_constant, warmup_linear, warmup_cosine, warmup_stable_decay)
}
