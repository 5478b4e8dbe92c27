"""The chip a program is traced for, without touching a device, and the interpretation of kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Literal, cast

import jax

from jshard.errors import JShardError, did_you_mean
from jshard.hardware.chips import CHIPS as CHIPS
from jshard.hardware.chips import Chip as Chip
from jshard.hardware.chips import Platform


def chip(name: str) -> Chip:
    """Return the chip called `name`: a name of `CHIPS`, or JAX's name for it."""
    low = name.lower()
    if low in CHIPS:
        return CHIPS[low]
    for known in CHIPS.values():
        if low in (known.kind.lower(), *known.others) or (known.platform == "gpu" and low.startswith(known.others)):
            return known
    hint = did_you_mean(low, CHIPS, f"use one of {', '.join(CHIPS)}")
    raise JShardError(f'jshard knows no chip "{name}"', hint=hint)


def present_chip() -> Chip:
    """Return the chip the surrounding program is traced for: the pretended chip, else the mesh's, else the backend's."""
    mode = interpretation()
    if mode is not None and mode.chip is not None:
        return CHIPS[mode.chip]
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        found = chip_called(jax.devices()[0].device_kind, jax.default_backend())
    else:
        found = chip_called(device.device_kind, device.platform)
    # Interpreted kernels are TPU kernels unless the caller names a GPU, also on a machine with a GPU.
    return CHIPS["cpu"] if mode is not None and found.platform == "gpu" else found


def chip_called(kind: str, platform: str) -> Chip:
    """Return the chip JAX calls `kind`; a chip not in `CHIPS` still has its platform."""
    try:
        return chip(kind)
    except JShardError:  # "auto" is XLA there
        return Chip(kind, cast(Platform, {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)))


def _chip_name(name: str) -> str:
    return chip(name).name


@dataclasses.dataclass(frozen=True)
class Interpretation:
    """Settings of interpreted kernels: a race detector or not, the time of copies, and the pretended chip."""

    races: bool = True
    copies: Literal["on_wait", "eager"] = "on_wait"
    chip: str | None = None


_interpretation = jax.make_user_context(None)  # part of JAX's trace cache key


@contextlib.contextmanager
def interpret(
    *, races: bool = True, copies: Literal["on_wait", "eager"] = "on_wait", chip: str | None = None
) -> Iterator[None]:
    """Interpret kernels named by the caller, on pretend TPUs of the CPU with a race detector: slow, for tests.

    `chip` names the chip to pretend. The time it takes says nothing about speed. A race
    raises nothing: JAX prints RACE DETECTED to stdout, where jshard's own tests look.
    """
    with (
        _interpretation(Interpretation(races, copies, None if chip is None else _chip_name(chip))),
        _allowed_in_checkpoint(),
    ):
        yield


@contextlib.contextmanager
def _allowed_in_checkpoint() -> Iterator[None]:
    """Let jax.checkpoint take interpreted kernels; JAX has no public name for this.

    It refuses effects, as they might happen twice, and the interpreter's callbacks have
    some. A kernel under checkpoint may run twice. Compiled kernels have no such effect.
    """
    from jax._src import callback, effects

    allowed = effects.remat_allowed_effects._effect_types
    new = {callback.OrderedIOEffect, callback.IOEffect} - allowed
    allowed |= new
    try:
        yield
    finally:
        allowed -= new


def interpretation() -> Interpretation | None:
    """Return the settings of interpreted kernels; None if kernels are compiled."""
    return _interpretation.value
