"""The devices that a collective of a compiled program joins, from any of the spellings of its groups."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

DEVICES = 100_000  # by which a TPU's device numbers differ from one slice to the next


def members(rest: str, devices: int) -> tuple[int, ...]:
    """The devices that a collective joins in its first group, from any of the spellings of `replica_groups`."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest):
        return _ring([(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return tuple(map(int, listed[1].split(",")))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return tuple(_numbered(iota[2], iota[3]).ravel()[: int(iota[1])].tolist())
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", rest):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", meshed[1])}
        order = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", meshed[2])
        numbers = _numbered(order[1], order[2]) if order else np.arange(math.prod(sizes.values()))
        named = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", meshed[3])
        return tuple(_along(numbers.reshape(tuple(sizes.values())), list(sizes), named).ravel().tolist())
    assert "replica_groups={}" in rest, f"a spelling of replica_groups that jshard does not know: {rest}"
    return tuple(range(devices))


def slices(rest: str) -> tuple[int, ...]:
    """The slices, from 0, that a transfer between slices joins in its first group: of devices by their number, which begins
    with that of the slice, or of slices for devices of each."""
    found = re.search(r'_xla_megascale_target="?\{((?:\{[^}]*\},?)+|[\d,]+)\}', rest)
    assert found, f"a target of a transfer between slices that jshard does not know: {rest}"
    if not found[1].startswith("{"):
        return tuple(int(number) - 1 for number in found[1].split(","))
    pairs = [(int(a) // DEVICES - 1, int(b) // DEVICES - 1) for a, b in re.findall(r"\{(\d+)->(\d+)\}", found[1])]
    return _ring(pairs) if pairs else tuple(int(n) // DEVICES - 1 for n in found[1][1:].split("}")[0].split(","))


def _numbered(shape: str, order: str | None) -> np.ndarray:
    """Devices as `[2,4]T(1,0)` numbers them."""
    numbers = np.arange(math.prod(map(int, shape.split(",")))).reshape(tuple(map(int, shape.split(","))))
    return numbers.transpose(tuple(map(int, order.split(",")))) if order else numbers


def _along(devices: np.ndarray, axes: list[str], named: list[tuple[str, str, str]]) -> np.ndarray:
    """The devices of the first group over the named axes of a mesh: 'data', or a part of it: 'data':(1)2, two of its
    devices that lie as far apart as the devices of what follows in it."""
    index: list[Any] = [slice(0, 1)] * devices.ndim
    for axis, before, part in named:
        size = devices.shape[axes.index(axis)]
        step = size // (int(before) * int(part)) if part else 1
        index[axes.index(axis)] = slice(0, step * int(part) if part else size, step)
    return devices[tuple(index)]


def _ring(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """The devices that send to each other, directly or not: of several separate rings, those of the first."""
    moving = [pair for pair in pairs if pair[0] != pair[1]]
    joined = set(moving[0]) if moving else {0}
    while more := {device for pair in moving if joined & set(pair) for device in pair} - joined:
        joined |= more
    return tuple(sorted(joined))
