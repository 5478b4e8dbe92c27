"""Which chip a program is being traced for, known without touching a device, and whether kernels are interpreted."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Literal, cast

import jax

from jshard.chips import CHIPS as CHIPS
from jshard.chips import Chip as Chip
from jshard.chips import Platform
from jshard.errors import JShardError, nearest


def chip(name: str) -> Chip:
    """The chip called `name`, a name of ours or what JAX calls it."""
    low = name.lower()
    if low in CHIPS:
        return CHIPS[low]
    for known in CHIPS.values():
        if low in (known.kind.lower(), *known.others) or (known.platform == "gpu" and low.startswith(known.others)):
            return known
    close = nearest(low, CHIPS)
    raise JShardError(
        f'jshard knows no chip "{name}"', mend=f'did you mean "{close}"?' if close else f"use one of {', '.join(CHIPS)}"
    )


def present_chip() -> Chip:
    """The chip that the surrounding program is traced for: the pretended one, that of the mesh if it says, else of the
    default backend."""
    how = interpretation()
    if how is not None and how.chip is not None:
        return CHIPS[how.chip]
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        there = chip_called(jax.devices()[0].device_kind, jax.default_backend())
    else:
        there = chip_called(device.device_kind, device.platform)
    return CHIPS["cpu"] if how is not None and there.platform == "gpu" else there  # pretend TPUs, whatever is at hand


def chip_called(kind: str, platform: str) -> Chip:
    """The chip that JAX calls so."""
    try:
        return chip(kind)
    except JShardError:  # a chip without a row still has a platform, and "auto" is plain XLA there
        known = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
        return Chip(kind, cast(Platform, known))  # or another, of which no row of a table speaks


def _named(name: str) -> str:
    return chip(name).name


@dataclasses.dataclass(frozen=True)
class Interpretation:
    """How interpreted kernels run: with a race detector or without, when copies happen, and on which pretended chip."""

    races: bool = True
    copies: Literal["on_wait", "eager"] = "on_wait"
    chip: str | None = None


_interpretation = jax.make_user_context(None)  # part of JAX's trace cache key


@contextlib.contextmanager
def interpret(
    *, races: bool = True, copies: Literal["on_wait", "eager"] = "on_wait", chip: str | None = None
) -> Iterator[None]:
    """Within it a kernel asked for by name runs on pretend TPUs of the CPU, slowly and with a race detector: for tests.

    `chip` names the one to pretend: of GPUs "h100", "h200" or "b200", whose collectives are not interpreted. What it takes
    says nothing about speed. A race raises nothing by itself: `jshard bench kernels --self-test` looks.
    """
    with _interpretation(Interpretation(races, copies, None if chip is None else _named(chip))), _under_checkpoint():
        yield


@contextlib.contextmanager
def _under_checkpoint() -> Iterator[None]:
    """Lets jax.checkpoint take interpreted kernels. The interpreter's callbacks are effects, which it refuses as they might
    happen twice; twice is what a kernel is computed there. Compiled kernels have none, and JAX no public name for this."""
    from jax._src import callback, effects

    allowed = effects.remat_allowed_effects._effect_types
    added = {callback.OrderedIOEffect, callback.IOEffect} - allowed
    allowed |= added
    try:
        yield
    finally:
        allowed -= added


def interpretation() -> Interpretation | None:
    """How kernels are interpreted here; None where they are compiled."""
    return _interpretation.value
