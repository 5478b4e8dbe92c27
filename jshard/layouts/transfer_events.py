"""What has been moved outside a program, as an event: told only where somebody listens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from jshard.layouts.layout import Layout
from jshard.layouts.p2p import listed, numbers_of
from jshard.runs import events

Where = Sharding | str  # words for what is no device: the host of process 0


def moved(
    op_name: str, shape: Sequence[int], dtype: Any, source: Where, target: Where, *, by: str = "", moves: Sequence[str] = ()
) -> None:  # fmt: skip
    """`by` is the signal that asked, `moves` the collectives and slices, where it takes any; `bytes` are the whole array's."""
    if events.listeners:
        events.tell(
            "moved", op_name=op_name, by=by, moves=list(moves), shape=list(shape), dtype=str(dtype),
            bytes=math.prod(shape) * dtype.itemsize,
            **{"from": _words(source, len(shape)), "to": _words(target, len(shape))},
            from_devices=_numbers(source), to_devices=_numbers(target),
        )  # fmt: skip


def where(x: object) -> Where:
    """The sharding of an array on devices."""
    return x.sharding if isinstance(x, jax.Array) else "the host"


def _words(where: Where, rank: int) -> str:
    """`[data, whole] on {data: 2, tensor: 4}`, and the devices by number unless they are all of their platform."""
    if isinstance(where, str):
        return where
    devices = listed(where.device_set)
    if not isinstance(where, NamedSharding):
        return devices
    words = repr(Layout.from_sharding(where, rank)).removeprefix("Layout(").removesuffix(")")
    others = {*jax.devices(next(iter(where.device_set)).platform)} - where.device_set
    return f"{words}, {devices}" if others else words


def _numbers(where: Where) -> list[int] | None:
    return None if isinstance(where, str) else numbers_of(where.device_set)
