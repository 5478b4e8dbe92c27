"""The assignment of a file's tensors to a model's parameters, with all faults in a single error."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from jshard.errors import JShardError, did_you_mean, kind_of, nearest, quoted
from jshard.layouts.index_ranges import Box, boxes_of, index, lengths, overlap
from jshard.layouts.paths import slashed, words_of
from jshard.training.checkpoints.tensors.rename import ParameterRegion, RenameLine, Renaming
from jshard.training.checkpoints.tensors.view import Impossible, Tensor, View


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of the model, or its shape. A leaf not `required`, such as a cache, may stay unfilled."""

    path: str
    value: Any
    required: bool = True
    variable: nnx.Variable[Any] | None = None

    def __str__(self) -> str:
        return f"{self.path} ({_kind(self.value)})"

    @property
    def is_free(self) -> bool:
        """True if the leaf has no sharding, so that JAX chooses the device."""
        if isinstance(self.value, jax.Array):
            return not self.value.committed
        return getattr(self.value, "sharding", None) is None

    @property
    def boxes(self) -> dict[Box, list[Any]]:
        """The distinct shards of this process, with the devices of each; None stands for JAX's choice."""
        if self.is_free:
            return {tuple((0, size) for size in self.value.shape): [None]}
        devices: dict[Box, list[Any]] = {}
        for device, box in boxes_of(self.value.sharding, self.value.shape).items():
            if device.process_index == jax.process_index():
                devices.setdefault(box, []).append(device)
        return devices

    @property
    def bytes_here(self) -> int:
        return sum(math.prod(lengths(box)) for box in self.boxes) * self.value.dtype.itemsize

    def misplaced(self) -> Iterator[JShardError]:
        """Yield an error if the sharding names no devices of this run."""
        sharding = getattr(self.value, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            yield JShardError(
                f"{self} is sharded over an abstract mesh, without devices", hint="give it a mesh of devices"
            )
        elif self.is_free and jax.process_count() > 1 and self.required:
            fault = f"{self} has no sharding, and there are {jax.process_count()} processes"
            yield JShardError(fault, hint="give it one: jax.ShapeDtypeStruct(shape, dtype, sharding=...)")


def leaves_of(model: object) -> list[Leaf]:
    """List the variables of an NNX module, in its state's order, or the arrays and numbers of a tree."""
    if not isinstance(model, nnx.Module):
        flat = jax.tree_util.tree_flatten_with_path(model)[0]
        numbers = [(path, jnp.asarray(x) if isinstance(x, int | float | complex) else x) for path, x in flat]
        return [Leaf(path_in_tree(path), x) for path, x in numbers if hasattr(x, "dtype")]
    leaves, faults = [], []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        name, value = slashed(path), variable.get_value()
        if isinstance(variable, nnx.RngState):
            if isinstance(value, jax.ShapeDtypeStruct):
                fault = f"{name} is random state without numbers, and a file of weights has none"
                faults.append(JShardError(fault, hint=f"type nnx.reseed(model, {variable.tag}=0) before"))
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            leaves.append(Leaf(name, value, isinstance(variable, (nnx.Param, nnx.BatchStat)), variable))
        elif isinstance(variable, nnx.Param):
            faults.append(JShardError(f"{name} holds {kind_of(value)}", hint="give each nnx.Param one array"))
    if faults:
        raise joined(faults)
    return leaves


def path_in_tree(path: Sequence[Any]) -> str:
    """Return the path of a leaf with slashes; Linen's parameters lose `params`, as in claims."""
    words = words_of(path)
    return slashed(words[words[:1] == ["params"] :])


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A view of a tensor, and the box of the parameter filled by it. `kept` is False for the axes
    of the box missing in the tensor: a row of a stack has no stack axis."""

    tensor: Any
    line: RenameLine
    target: ParameterRegion
    view: View
    box: Box
    kept: tuple[bool, ...]

    def __str__(self) -> str:
        return f"{quoted(self.tensor.name)}{_by(self.line)}"

    def within(self, box: Box, part: np.ndarray) -> tuple[np.ndarray, Box] | None:
        """Return the overlap with `part`, a `box` of the parameter: an array view of `part`, and a box of the tensor."""
        both = overlap(self.box, box)
        if both is None:
            return None
        seen = [(a - c, b - c) for (a, b), (c, _), kept in zip(both, self.box, self.kept, strict=True) if kept]
        view = part[(*index(both, box), ...)]  # the ellipsis makes a view of a scalar too: part[()] is a copy
        return view[(*(slice(None) if kept else 0 for kept in self.kept), ...)], tuple(seen)


def assign(
    tensors: Mapping[str, Any], leaves: Sequence[Leaf], renaming: Renaming, file: str, *, converts: bool,
    faults: Sequence[JShardError], writes: bool = False,
) -> dict[str, list[Fragment]]:  # fmt: skip
    """Return the fragments for each parameter; raise all faults together with `faults`. If
    `writes`, two parameters must not share a number of a tensor."""
    by_path = {leaf.path: leaf for leaf in leaves}
    faults = [*faults, *(fault for leaf in leaves for fault in leaf.misplaced())]
    filled: dict[str, list[Fragment]] = {}
    unlike: dict[tuple[np.dtype, Any], list[Fragment]] = {}
    for line, name, taker in renaming.shadowed(tensors):
        fault = f"{line.place} matches no tensor that is left: {taker.place} takes all of them, such as {quoted(name)}"
        faults.append(JShardError(fault, hint=f"write it before {taker.place}"))
    for name, tensor in tensors.items():
        if not (lines := renaming.lines_of(name)):
            faults.append(_unclaimed(tensor, renaming, by_path))
            continue
        views = []
        for line in lines:
            if not line.skips:
                filled.setdefault(line.target_of(name).path, [])
            try:
                views.append((line, line.view(tensor.shape)))
            except Impossible as error:
                fault = f"{line.place} {error}, from {_of(tensor)}"
                faults.append(JShardError(fault, hint="write the steps for this shape"))
        for line, view in views:
            if line.skips:
                continue
            target = line.target_of(name)
            try:
                filled[target.path].append(piece := _piece(tensor, line, view, target, by_path))
            except JShardError as error:
                faults.append(error)
                continue
            dtypes = tensor.dtype, by_path[target.path].value.dtype
            if dtypes[0] != dtypes[1] and not converts:
                unlike.setdefault(dtypes, []).append(piece)
        if len(views) == len(lines):
            faults += _not_once(tensor, views, writes=writes)
    for (_, dtype), (first, *others) in unlike.items():
        also = f" and {len(others)} more" if others else ""
        fault = f"{_of(first.tensor)}{also} would become {dtype} in the model, as {first.target}{_by(first.line)}"
        faults.append(JShardError(fault, hint='give dtype="convert"'))
    for leaf in leaves:
        if leaf.path in filled or leaf.required:
            faults += _not_filled(leaf, filled.get(leaf.path), renaming, tensors, file)
    if faults:
        raise joined(faults)
    return filled


def _piece(
    tensor: Tensor, line: RenameLine, view: View, target: ParameterRegion, by_path: Mapping[str, Leaf]
) -> Fragment:
    leaf = by_path.get(target.path)
    if leaf is None:
        hint = did_you_mean(target.path, by_path, f"write {line.pattern.pattern}: - if it is not wanted")
        fault = f"{line.place} makes {_of(tensor)} the parameter {quoted(target.path)}, which the model does not have"
        raise JShardError(fault, hint=hint)
    try:
        box, kept = target.within(leaf.value.shape)
    except Impossible as error:
        raise JShardError(f"{line.place} {error}, by {_of(tensor)}", hint="count its axes from 0") from None
    wanted = tuple(end - begin for (begin, end), is_kept in zip(box, kept, strict=True) if is_kept)
    faults = []
    if view.shape != wanted:
        seen = f" {list(view.shape)}{_by(line)}" if line.steps else _by(line)
        fault = f"{_of(tensor)}{seen} does not fit {target}, {leaf.value.dtype}{list(wanted)}"
        faults.append(JShardError(fault, hint=_mend(view, wanted, line)))
    there, here = tensor.dtype, leaf.value.dtype
    if not np.can_cast(there, here) and not all(jnp.issubdtype(each, jnp.inexact) for each in (there, here)):
        fault = f"{_of(tensor)}{_by(line)} can't become {here} in the model, as {target}"
        faults.append(JShardError(fault, hint=f"make {target.path} of {there}, or skip this tensor"))
    if faults:
        raise JShardError.of(faults)
    return Fragment(tensor, line, target, view, box, tuple(kept))


# -- faults --


def _mend(view: View, wanted: Sequence[int], line: RenameLine) -> str:
    """Return a hint with the step to make the shape fit."""
    where = f"add to {line.place}" if line.place else "give rename=, a file with a line for it, and add there"
    if sorted(view.shape) == sorted(wanted) and len(set(wanted)) == len(wanted):
        return f"{where}: | permute {' '.join(str(view.shape.index(size)) for size in wanted)}"
    if math.prod(view.shape) == math.prod(wanted):
        return f"{where}: | reshape {' '.join(map(str, wanted))}, and | permute where axes change places"
    return "use the model that this file is of"


def _unclaimed(tensor: Tensor, renaming: Renaming, by_path: Mapping[str, Leaf]) -> JShardError:
    name = re.escape(tensor.name)
    if renaming.source:
        return JShardError(
            f"{renaming.source} has no line for {_of(tensor)}", hint=f"write one, or {name}: - if not wanted"
        )
    close = nearest(tensor.name.replace(".", "/"), by_path) or "-"
    hint = f"give rename=, a file with the line {name}: {close}"
    return JShardError(f"the model has no parameter for {_of(tensor)}", hint=hint)


def _not_once(tensor: Tensor, views: Sequence[tuple[RenameLine, View]], *, writes: bool) -> Iterator[JShardError]:
    """Yield an error if lines omit or share numbers; a line may read a whole shared tensor."""
    size = math.prod(tensor.shape)
    for (one, its), (other, own) in itertools.combinations(views, 2):
        if (writes or size not in (its.size, own.size)) and own.meets(its):
            fault = f"{one.place} and {other.place} both take some numbers of {_of(tensor)}"
            yield JShardError(fault, hint="remove one of them, or end its slice where the other begins")
            return
    last, sizes = views[-1][0], [view.size for _, view in views]
    if size not in sizes and sum(sizes) < size:
        fault = f"{last.place} takes {sum(sizes):,} of the {size:,} numbers of {_of(tensor)}"
        yield JShardError(
            fault, hint=f"write lines for the others, or {last.pattern.pattern}: - | slice ... if not wanted"
        )


def _not_filled(
    leaf: Leaf, pieces: Sequence[Fragment] | None, renaming: Renaming, tensors: Mapping[str, Tensor], file: str
) -> Iterator[JShardError]:
    """Yield an error if a parameter is not filled, or filled twice; empty `pieces` are faulty."""
    if pieces is None:
        close = nearest(leaf.path.replace("/", "."), tensors)
        where = f"write in {renaming.source}" if renaming.source else "give rename=, a file with the line"
        line = f"{re.escape(close) if close else 'regex'}: {leaf.path}"
        yield JShardError(f"{leaf} gets no tensor from {file}", hint=f"{where} {line}")
        return
    ordered = sorted(pieces, key=lambda piece: piece.box)
    for at, one in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if one.box and other.box[0][0] >= one.box[0][1]:
                break
            if overlap(one.box, other.box) is not None:
                yield JShardError(f"{leaf} is filled by {one} and by {other}", hint="remove one of them by: -")
                return
    count, size = sum(math.prod(lengths(piece.box)) for piece in pieces), math.prod(leaf.value.shape)
    if pieces and count < size:
        fault = f"{leaf} gets {count:,} of its {size:,} numbers from {file}"
        yield JShardError(fault, hint=f"write lines for the others, as regex: {leaf.path}[0]")


def _of(tensor: Tensor) -> str:
    return f"{quoted(tensor.name)} ({_kind(tensor)} in {tensor.file})"


def _kind(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _by(line: RenameLine) -> str:
    return f" by {line.place}" if line.place else ""


def joined(faults: Sequence[JShardError]) -> JShardError:
    """Return an error with all faults; sentences different only in numbers, as of many layers, are counted."""
    alike: dict[str, list[str]] = {}
    for text in dict.fromkeys(text for fault in faults for text in fault.faults):
        alike.setdefault(re.sub(r"\d+", "0", text), []).append(text)
    more = lambda count: f" (and {count} more with other numbers)" if count else ""
    return JShardError.saying(*(first + more(len(others)) for first, *others in alike.values()))
