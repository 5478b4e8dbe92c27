"""What each claim of a model says of its parameters, beside what the partition did with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from flax import nnx

from jshard.errors import Place
from jshard.layers.layer import parameters_by_path
from jshard.layers.roles import Placed
from jshard.layers.sharded_call import placements
from jshard.layouts.layout import Layout
from jshard.layouts.redistribution import Axes
from jshard.provenance import source_of
from jshard.signals.active_config import configuration
from jshard.signals.globs import numberless
from jshard.signals.signal import Signal

WORDS = (
    "column",
    "reduction",
    "expert",
    "store",
    "store.optimizer",
)  # of a signal, that split parameters or what belongs to them


@dataclasses.dataclass(frozen=True)
class Claimed:
    """Parameters that are claimed and lie alike, as `blocks/*/up/kernel`. Each axis is said by the mesh axes that split it."""

    place: Place | None
    signal: str
    says: str  # column: tensor, store: data
    parameter: str
    count: int
    array: str  # float32[32,128]
    in_use: tuple[str, ...]
    at_rest: tuple[str, ...]
    part: tuple[int, ...]  # the shape of one device's part at rest
    told_by: str  # the operation that told which axis a word means: dot_general (model.py:12)
    differs: str  # what of the words was not done

    def cells(self) -> tuple[str, ...]:
        """The row of a table."""
        times = f"{self.parameter} x {self.count}" if self.count >= 2 else self.parameter
        rest = "" if self.at_rest == self.in_use else f"at rest {_in_brackets(self.at_rest)}"
        part = f"{list(self.part)} each" if any(self.at_rest) else ""
        in_use = _in_brackets(self.in_use)
        lies = times, self.array, in_use, rest, part
        return str(self.place or "-"), self.signal, self.says, *lies, self.told_by, self.differs


def _in_brackets(axes: tuple[str, ...]) -> str:
    return f"[{', '.join(names or '-' for names in axes)}]" if any(axes) else "whole"


def claimed(models: Iterable[nnx.Module]) -> tuple[Claimed, ...]:
    """List the claimed parameters of models that a program of `jshard.shard` was traced for, in the order of the file."""
    present, found = configuration(), placements()
    if present is None:
        return ()
    alike: dict[Claimed, list[str]] = {}
    for model in models if found else ():
        for path, leaf in parameters_by_path(model).items():
            placed = found.get(path)
            if placed is not None and placed.use.shape == tuple(leaf.shape) and (claim := placed.use.claim).glob:
                signal = present.signals[claim.signal.name]  # its lines may be others than when the program was traced
                alike.setdefault(_entry(placed, signal, numberless(path), leaf), []).append(path)
    rows = [
        dataclasses.replace(each, count=len(paths), parameter=each.parameter if len(paths) >= 2 else paths[0])
        for each, paths in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.place.source, row.place.line or 0) if row.place else ("",)))


def _entry(placed: Placed, signal: Signal, path: str, leaf: Any) -> Claimed:
    use, lies, eqn = placed.use, placed.lies, placed.told_by
    told_by = "" if eqn is None else ", ".join(filter(None, (eqn.primitive.name, source_of(eqn))))
    return Claimed(
        place=signal.at(f"match.{use.claim.glob}"),
        signal=signal.name,
        says=declared(signal),
        parameter=path,
        count=1,
        array=f"{leaf.dtype}[{','.join(map(str, use.shape))}]",
        in_use=_words(lies.in_use.axes),
        at_rest=_words(lies.at_rest.axes),
        part=lies.at_rest.shard_shape(use.shape),
        told_by=told_by,
        differs="; ".join(_differences(placed, signal, leaf)),
    )


def declared(signal: Signal) -> str:
    """The words of a signal that say where parameters lie."""
    if signal.shard is not None and signal.shard.axis is not None:
        return f"shard: axis {signal.shard.axis} over {' x '.join(signal.shard.mesh) or 'workers'}"
    said = {key: signal.axes(key) for key in WORDS}
    return ", ".join(f"{key}: {' x '.join(names)}" for key, names in said.items() if names) or "whole"


def _words(axes: Axes) -> tuple[str, ...]:
    return tuple("+".join(names) for names in axes)


def _differences(placed: Placed, signal: Signal, leaf: Any) -> Iterator[str]:
    lies = placed.lies
    if placed.told_by is None and signal.shard is None:
        yield "not used by this program"
    else:
        for word in ("column", "reduction") if signal.shard is None else ():
            if (names := signal.axes(word)) and names not in lies.in_use.axes:
                yield f"no axis for {word}"
        if not set(signal.store) <= set(lies.at_rest.mesh_axes):
            yield "no axis for store"
    now = Layout.of(leaf)
    if now is not None and now.axes != lies.at_rest.axes:
        yield "not there yet: its next call moves it"
