"""What has been moved outside a program, as an event: called only where somebody listens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jshard import events
from jshard.layouts.layout import Layout


def moved(
    deed: str,
    shape: Sequence[int],
    dtype: Any,
    source: str,
    target: str,
    *,
    by: str = "",
    moves: Sequence[str] = (),
) -> None:
    """`bytes` are those of the whole array; `moves` the collectives and slices, where it takes any."""
    if events.tell is not None:
        size = math.prod(shape) * dtype.itemsize
        fields = {"shape": list(shape), "dtype": str(dtype), "bytes": size, "from": source, "to": target}
        events.tell("moved", deed=deed, by=by, moves=list(moves), **fields)


def where(x: Any) -> str:
    """Where an array lies, in words."""
    if not isinstance(x, jax.Array):
        return "the host"
    layout = Layout.of(x)
    return in_words(x.sharding) if layout is None else lying(layout)


def lying(layout: Layout) -> str:
    """`[data, whole] on {data: 2, tensor: 4}`"""
    return repr(layout).removeprefix("Layout(").removesuffix(")")


def in_words(sharding: jax.sharding.Sharding) -> str:
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    return f"{devices[0]}" if len(devices) == 1 else f"{len(devices)} devices from {devices[0]}"


def dtype_of(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
