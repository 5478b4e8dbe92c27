"""What the name stacks around an equation say: the signals, the phase, and what jshard itself marked on the way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jshard.signals.scope import BACKWARD, UPDATE


@dataclasses.dataclass(frozen=True)
class Said:
    """What one name stack says."""

    path: tuple[str, ...] = ()
    backward: bool = False
    update: bool = False
    via: tuple[str, ...] = ()
    chosen: str = ""


@functools.lru_cache(maxsize=65536)
def said_by(stack: tuple[Any, ...]) -> Said:
    backward, update, via, chosen = False, False, [], ""
    segment: list[str] = []  # the signals since the last transformation
    own: list[str] = []  # all signals of this stack

    def close() -> None:
        if segment != own:  # a transposed remat repeats the whole stack it was called under
            own.extend(segment)
        segment.clear()

    for part in stack:
        if type(part).__name__ == "Transform":
            close()
            backward |= part.name == "transpose"
        elif part.name.startswith("signal:"):
            segment.append(part.name.removeprefix("signal:"))
        elif part.name.startswith("chosen:"):
            chosen = part.name.removeprefix("chosen:")
            via.append(f"chosen {chosen.partition(',')[0]}")
        elif part.name in ("redistribute", "rematted_computation"):
            via.append({"rematted_computation": "remat"}.get(part.name, part.name))
        backward |= part.name == BACKWARD
        update |= part.name == UPDATE
    close()
    return Said(tuple(own), backward, update, tuple(via), chosen)


@dataclasses.dataclass(frozen=True)
class Around:
    """What holds at one equation by all that it is nested in."""

    path: tuple[str, ...] = ()
    backward: bool = False
    update: bool = False
    via: tuple[str, ...] = ()
    count: int = 1
    count_known: bool = True
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of the mesh axes of the shard_maps around
    chosen: str = ""
    named: Any = None  # the outermost equation that stands in a signal: its line is the user's, inner ones are shared

    @property
    def phase(self) -> str:
        return "update" if self.update else "backward" if self.backward else "forward"

    def entering(self, eqn: Any) -> Around:
        """With what the equation's own name stack adds."""
        stack = eqn.source_info.name_stack.stack
        if not stack:
            return self
        said = said_by(stack)
        return dataclasses.replace(
            self,
            path=(*self.path, *said.path),
            backward=self.backward or said.backward,
            update=self.update or said.update,
            via=tuple(dict.fromkeys((*self.via, *said.via))),
            chosen=said.chosen or self.chosen,
            named=eqn if said.path and self.named is None else self.named,
        )

    def within(self, **changes: Any) -> Around:
        return dataclasses.replace(self, **changes)
