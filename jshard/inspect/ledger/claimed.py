"""The claims of a model beside the layouts of its parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jshard.errors import Location
from jshard.layers.roles import Placed, Roles, not_stored
from jshard.layouts.layout import Layout
from jshard.layouts.paths import slashed
from jshard.layouts.redistribution import Axes, replicated
from jshard.programs.jaxprs import Shaped
from jshard.programs.provenance import source_of
from jshard.signals.active_config import configuration, mesh
from jshard.signals.globs import below, repeats
from jshard.signals.signal import Signal

# the keys of a signal that split parameters, their optimizer state or their results
WORDS = "column", "reduction", "sequence", "expert", "store", "store.optimizer"


@dataclasses.dataclass(frozen=True)
class Claimed:
    """Claimed parameters of equal layout, as `blocks/*/up/kernel`. An axis is described by the mesh axes that split it."""

    place: Location | None
    signal: str
    says: str  # column: tensor, store: data
    parameter: str
    count: int
    array: str  # float32[32,128]
    in_use: tuple[str, ...]
    at_rest: tuple[str, ...]
    part: tuple[int, ...]  # the shape of one device's part at rest
    told_by: str  # the first use, which tells the axis that a word means: dot_general (model.py:12)
    differs: str  # the words that were not carried out, and why
    annotation: str = ""  # the mesh axes in the model's own annotation; jshard ignores them

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table."""
        times = f"{self.parameter} x {self.count}" if self.count >= 2 else self.parameter
        rest = "" if self.at_rest == self.in_use else f"at rest {_in_brackets(self.at_rest)}"
        part = f"{list(self.part)} each" if any(self.at_rest) else ""
        lies = times, self.array, _in_brackets(self.in_use), rest, part
        annotated = f"annotated {self.annotation} in the model" if self.annotation else ""
        why = "; ".join(filter(None, (self.differs, annotated)))
        return str(self.place or "-"), self.signal, self.says, *lies, self.told_by, why


def _in_brackets(axes: tuple[str, ...]) -> str:
    return f"[{', '.join(names or '-' for names in axes)}]" if any(axes) else "whole"


def claimed(arrays: Iterable[tuple[str, Sequence[str], Any, str]], found: Mapping[str, Placed]) -> tuple[Claimed, ...]:
    """List the parameters among arrays with an entry in `found`, in the order of the YAML file. Each array comes
    as the name of its argument, the keys that lead to it there, the array, and its annotation in the model."""
    present = configuration()
    if present is None:
        return ()
    entries: list[tuple[Claimed, str]] = []
    by_end: dict[str, list[str]] = {}
    for path in found:
        by_end.setdefault(below(path), []).append(path)
    seen: set[str] = set()
    for argument, words, leaf, annotation in arrays if found else ():
        ends = (slashed(words[start:]) for start in range(max(len(words), 1)))
        fits = next((by_end[end] for end in ends if end in by_end), [])
        own = [each for each in fits if getattr(each, "argument", "") == argument] or fits
        path = own[0] if len(own) == 1 else None  # two, if an inner function names its arguments otherwise
        if path is None or path in seen or found[path].use.shape != tuple(leaf.shape):
            continue
        seen.add(path)  # an optimizer's state has arrays of the same paths
        signal = present.signals.get(found[path].use.claim.signal.name)  # its lines may have moved since the trace
        entries.append((_entry(found[path], signal or found[path].use.claim.signal, leaf, annotation), path))
    rows = [dataclasses.replace(row, count=count, parameter=path) for row, path, count in repeats(entries)]
    return tuple(sorted(rows, key=lambda row: (row.place.source, row.place.line or 0) if row.place else ("",)))


def _entry(placed: Placed, signal: Signal, leaf: Shaped, annotation: str) -> Claimed:
    use, lies, eqn = placed.use, placed.lies, placed.told_by
    now = _layout_now(leaf) or lies.at_rest
    told_by = "" if eqn is None else ", ".join(filter(None, (eqn.primitive.name, source_of(eqn))))
    return Claimed(
        place=signal.at(f"match.{use.claim.glob}") if use.claim.glob else signal.place,
        signal=signal.name,
        says=declared(signal),
        parameter="",
        count=1,
        array=f"{leaf.dtype}[{','.join(map(str, use.shape))}]",
        in_use=_words(lies.in_use.axes),
        at_rest=_words(now.axes),
        part=now.shard_shape(use.shape),
        told_by=told_by,
        differs="; ".join(_differences(placed, signal, leaf)),
        annotation=annotation,
    )


def declared(signal: Signal) -> str:
    """Return the words of a signal about the layout of parameters."""
    if signal.shard is not None and signal.shard.axis is not None:
        return f"shard: axis {signal.shard.axis} over {' x '.join(signal.shard.mesh) or 'workers'}"
    said = {key: signal.axes(key) for key in WORDS}
    return ", ".join(f"{key}: {' x '.join(names)}" for key, names in said.items() if names) or "whole"


def _words(axes: Axes) -> tuple[str, ...]:
    return tuple("+".join(names) for names in axes)


def _differences(placed: Placed, signal: Signal, leaf: Shaped) -> Iterator[str]:
    """Yield the words of a signal not carried out, and the reasons."""
    use, lies, eqn = placed.use, placed.lies, placed.told_by
    if eqn is None and signal.shard is None:
        yield "not used by this program"
    elif signal.shard is None:
        for word in ("column", "reduction", "expert"):
            if (names := signal.axes(word)) and names not in lies.in_use.axes:
                yield _why_whole(word, use.roles, "its use" if eqn is None else eqn.primitive.name)
        if placed.unscattered:
            yield f"sequence: {placed.unscattered}"
    if why := not_stored(use, lies):
        part = math.prod(lies.at_rest.shard_shape(use.shape)) * leaf.dtype.itemsize
        yield f"{why}; {part:,} B on each device"
    now = _layout_now(leaf)
    if now is not None and now.axes != lies.at_rest.axes:
        yield "not yet in place: its next call moves it"


def _layout_now(leaf: object) -> Layout | None:
    """Return the current layout of an array: whole on a single device, None for a description without a layout."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return Layout.of(leaf)
    return Layout.of(leaf) or replicated(mesh(), leaf.ndim)


def _why_whole(word: str, roles: Roles, operation: str) -> str:
    """Return the reason why a word splits no axis of a parameter, from the operation of its first use."""
    if word == "reduction" and operation == "add":
        return "replicated, as a bias of a reduction must be"
    if not any(roles):
        is_added = "it is added to an array that no word splits"
        return f"{word}: {is_added if operation == 'add' else f'its first use, {operation}, is no product'}"
    has = {"column": "keeps no axis of it", "reduction": "sums over no axis of it", "expert": "has no axis of experts"}
    return f"{word}: {operation} {has[word]}"
