"""What a page tells, without a word of HTML: the mesh, where every array lies, the ledger, the text that it is about."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jshard.errors import Location
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.ledger.memory import KINDS

PARAMETER, GRADIENT, OPTIMIZER, OTHER = AT_REST = tuple(KINDS)  # of what is held between steps
ACTIVATION = "activation"
BATCH = "batch"
Index = tuple[int, ...]  # of a part, along each axis of its array


@dataclasses.dataclass(frozen=True)
class Laid:
    """One array and how it lies. `axes` are the mesh axes of each of its axes; `mesh` is None when no mesh tells."""

    kind: str
    path: tuple[str, ...]
    signal: str  # "-" when no signal was around
    place: Location | None
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    axes: tuple[tuple[str, ...], ...]
    mesh: Any
    note: str = ""
    device: Any = None  # the only one that holds it

    @property
    def ways(self) -> tuple[int, ...]:
        """Into how many parts each axis is split."""
        if self.mesh is None:
            return (1,) * len(self.shape)
        return tuple(math.prod(self.mesh.shape[name] for name in names) for names in self.axes)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of one device's part."""
        return tuple(size // ways for size, ways in zip(self.shape, self.ways, strict=True))

    @property
    def bytes_each(self) -> int:
        """Bytes on each device that holds a part."""
        return math.prod(self.local) * self.itemsize

    def is_everywhere(self, full_mesh: Mesh) -> bool:
        """Whether every device of the whole mesh holds a part."""
        if self.mesh is None or full_mesh is None:
            return self.device is None or not isinstance(full_mesh, Mesh)
        return dict(self.mesh.shape) == dict(full_mesh.shape)

    def tiles(self, full_mesh: Mesh) -> list[Index | None]:
        """For each device of the whole mesh, in its order, the index of its part along each axis; None: holds nothing.
        An array that nobody has placed is taken to be on every device, as jit takes it."""
        whole: Index = (0,) * len(self.shape)
        if self.is_everywhere(full_mesh):
            if self.mesh is None or full_mesh is None:
                return [whole] * (1 if full_mesh is None else full_mesh.size)
            return [*self._parts()]
        assert isinstance(full_mesh, Mesh), "a slice of a mesh names its devices"
        held = {self.device: whole}
        if self.mesh is not None:
            held = dict(zip(self.mesh.devices.flat, self._parts(), strict=True))
        return [held.get(device) for device in full_mesh.devices.flat]

    def _parts(self) -> list[Index]:
        """For each device of the array's own mesh."""
        sizes = self.mesh.shape
        places = dict(zip(sizes, np.indices([*sizes.values()]).reshape(len(sizes), -1), strict=True))
        found = np.zeros((self.mesh.size, len(self.axes)), int)
        for axis, names in enumerate(self.axes):
            for name in names:
                found[:, axis] = found[:, axis] * sizes[name] + places[name]
        return list(map(tuple, found.tolist()))


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that one page tells."""

    title: str
    about: tuple[str, ...]  # short phrases under the title
    mesh: Any  # of devices, or an abstract one where they need not be here; None: one device
    arrays: tuple[Laid, ...]
    ledger: Ledger
    texts: Mapping[str, Sequence[str]]  # the lines of each file of the configuration
    settings: frozenset[Location] = frozenset()  # lines about the experiment, where no word means a mesh axis

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.texts)

    def of(self, *kinds: str) -> list[Laid]:
        return [array for array in self.arrays if array.kind in kinds]

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        return () if self.mesh is None else tuple(self.mesh.axis_names)

    @functools.cached_property
    def memory(self) -> list[dict[str, int]]:
        """Bytes at rest on each device, by kind."""
        everywhere: dict[str, int] = dict.fromkeys(AT_REST, 0)
        some: list[Laid] = []
        for array in self.of(*AT_REST):
            if array.is_everywhere(self.mesh):
                everywhere[array.kind] += array.bytes_each
            else:
                some.append(array)
        sums = [dict(everywhere) for _ in range(self.devices)]
        for array in some:
            for device, tile in zip(sums, array.tiles(self.mesh), strict=True):
                device[array.kind] += array.bytes_each if tile is not None else 0
        return sums
