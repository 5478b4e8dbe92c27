"""What a page tells, without a word of HTML: the mesh, where every array lies, the ledger, the text that it is about."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jshard.errors import Place
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.plan.result import Plan
from jshard.inspect.report.array_placement import AT_REST, Laid


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that one page tells."""

    title: str
    about: tuple[str, ...]  # short phrases under the title
    mesh: Any  # of devices, or an abstract one where they need not be here; None: one device
    arrays: tuple[Laid, ...]
    ledger: Ledger
    texts: Mapping[str, Sequence[str]]  # the lines of each file of the configuration
    settings: frozenset[Place] = frozenset()  # lines about the experiment, where no word means a mesh axis
    plan: Plan | None = None

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

    def memory_by_signal(self) -> dict[str, dict[str, int]]:
        """Bytes at rest on a device that holds a part of everything, by signal and kind."""
        sums: dict[str, dict[str, int]] = {}
        for array in self.of(*AT_REST):
            kinds = sums.setdefault(array.signal, dict.fromkeys(AT_REST, 0))
            kinds[array.kind] += array.bytes_each
        return sums
