"""The facts of a page, without HTML: the mesh, the layout of every array, the ledger, the configuration's text."""

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

PARAMETER, GRADIENT, OPTIMIZER, OTHER = AT_REST = tuple(KINDS)  # the kinds of arrays held between steps
ACTIVATION = "activation"
BATCH = "batch"
Index = tuple[int, ...]  # of a shard, along each axis of its array


@dataclasses.dataclass(frozen=True)
class Laid:
    """An array and its layout. `axes` are the mesh axes of each of its axes; `mesh` is None for an array without a mesh."""

    kind: str
    path: tuple[str, ...]
    signal: str  # "-" outside every signal
    place: Location | None
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    axes: tuple[tuple[str, ...], ...]
    mesh: Any
    note: str = ""
    device: Any = None  # its only device

    @property
    def ways(self) -> tuple[int, ...]:
        """The number of shards along each axis."""
        if self.mesh is None:
            return (1,) * len(self.shape)
        return tuple(math.prod(self.mesh.shape[name] for name in names) for names in self.axes)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of a shard."""
        return tuple(size // ways for size, ways in zip(self.shape, self.ways, strict=True))

    @property
    def bytes_each(self) -> int:
        """Bytes on each device with a shard."""
        return math.prod(self.local) * self.itemsize

    def is_everywhere(self, full_mesh: Mesh) -> bool:
        """Return True if every device of the whole mesh holds a shard."""
        if self.mesh is None or full_mesh is None:
            return self.device is None or not isinstance(full_mesh, Mesh)
        return dict(self.mesh.shape) == dict(full_mesh.shape)

    def tiles(self, full_mesh: Mesh) -> list[Index | None]:
        """Return the index of each device's shard along each axis, in the order of the whole mesh;
        None without a shard. An array without a placement counts as on every device, as under jit."""
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
        """Return the index of the shard of each device in the array's own mesh."""
        sizes = self.mesh.shape
        places = dict(zip(sizes, np.indices([*sizes.values()]).reshape(len(sizes), -1), strict=True))
        found = np.zeros((self.mesh.size, len(self.axes)), int)
        for axis, names in enumerate(self.axes):
            for name in names:
                found[:, axis] = found[:, axis] * sizes[name] + places[name]
        return list(map(tuple, found.tolist()))


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of a page."""

    title: str
    about: tuple[str, ...]  # short phrases under the title
    mesh: Any  # of devices, or an abstract mesh; None: a single device
    arrays: tuple[Laid, ...]
    ledger: Ledger
    texts: Mapping[str, Sequence[str]]  # the lines of each file of the configuration
    settings: frozenset[Location] = frozenset()  # lines about the experiment: their words are no mesh axes

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
        elsewhere: list[Laid] = []
        for array in self.of(*AT_REST):
            if array.is_everywhere(self.mesh):
                everywhere[array.kind] += array.bytes_each
            else:
                elsewhere.append(array)
        sums = [dict(everywhere) for _ in range(self.devices)]
        for array in elsewhere:
            for device, tile in zip(sums, array.tiles(self.mesh), strict=True):
                device[array.kind] += array.bytes_each if tile is not None else 0
        return sums
