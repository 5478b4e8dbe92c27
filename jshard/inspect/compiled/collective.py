"""A collective of a compiled program."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from jshard.kernels.collectives import COLLECTIVES
from jshard.printing.units import size
from jshard.programs.provenance import Cause


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """A collective instruction, run `count` times. A combined instruction carries several arrays: `payloads` in bytes."""

    collective: str  # a name in COLLECTIVES
    opcode: str
    group: int
    payloads: tuple[int, ...]
    dtypes: tuple[str, ...]
    count: int
    count_known: bool  # False inside a loop without a known number of trips: `count` is of one trip
    causes: tuple[Cause, ...]  # of each payload, as far as XLA kept its name stack
    asynchronous: bool = False  # started here, and waited for later
    hidden: float = 0.0  # share of its bytes sent while the device works; 0 before a walk
    members: tuple[int, ...] = ()  # the devices of its first group, by their number in the mesh
    operations: tuple[str, ...] = ()  # the origin of each payload: dot_general, psum; "" where XLA lost it

    @property
    def total(self) -> int:
        """Bytes on the wire per device, all runs."""
        return self.count * sum(COLLECTIVES[self.collective].wire(payload, self.group) for payload in self.payloads)

    def mesh_axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the axes of its group in a mesh of these sizes; () if the group is not made of whole axes."""
        return axes_of(self.collective, self.members, sizes)


@dataclasses.dataclass(frozen=True)
class Large:
    """One of the largest arrays of a running program."""

    size: int
    shape: str  # f32[8,4]
    signal: str

    def __str__(self) -> str:
        under = f", under {self.signal}" if self.signal != "-" else ""
        return f"{size(self.size)}, {self.shape}{under}"


def itemsize(dtype: str) -> int:
    """Return the bytes of a number on a device: `pred` and types narrower than a byte take a byte."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return max(1, int(digits[1]) // 8) if digits else 1


def axes_of(collective: str, members: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a mesh of these sizes along which a group varies; () if the group is not made of
    whole axes. A permute may also cover part of an axis: one row of a torus whose rows form a mesh axis."""
    if not members or max(members) >= math.prod(sizes.values()):
        return ()
    places = [np.unravel_index(member, tuple(sizes.values())) for member in members]
    axes = tuple(name for axis, name in enumerate(sizes) if len({place[axis] for place in places}) > 1)
    return axes if collective == "permute" or math.prod(sizes[name] for name in axes) == len(members) else ()
