"""Weight files, read straight into a model's shards on this process's devices, and written from them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from jshard.errors import JShardError, did_you_mean, quoted, reason
from jshard.layouts.index_ranges import boxes_of, lengths
from jshard.layouts.p2p import doors_of, tell, without_mesh
from jshard.runs import events
from jshard.runs.names import MANIFEST
from jshard.training.checkpoints.arrays import not_finite, stored, warn_of_not_finite
from jshard.training.checkpoints.manifest import flush
from jshard.training.checkpoints.tensors.assign import Fragment, Leaf, assign, joined, leaves_of, path_in_tree
from jshard.training.checkpoints.tensors.rename import Renaming, Same
from jshard.training.checkpoints.tensors.safetensors import (
    BLOCK,
    WORDS,
    FileTensor,
    Header,
    by_name,
    index_of,
    new_header,
    read_at,
    read_headers,
    write_at,
)
from jshard.training.telemetry.progress import byte_bar, silent

Model = TypeVar("Model")
PathLike = str | os.PathLike[str]
DTYPE_CHOICES = ("same", "convert")


def load_weights(model: Model, path: PathLike, *, rename: PathLike | None = None, dtype: str = "same") -> Model:
    """Read a file of weights into a model, each process only the bytes of its own shards.

        model = nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0)))  # only shapes and shardings
        model = jshard.load_weights(model, "Qwen3-0.6B", rename="qwen3.txt")

    `path` is a file of safetensors, a folder of such files, or a checkpoint by orbax or by `jshard train`. A folder is read
    by its index, if it has one. `model` is an NNX module, changed in place and returned, or a tree such as Linen's
    variables, and a new tree is returned. The shardings of its leaves, `jax.ShapeDtypeStruct`s or arrays, decide where each
    parameter is placed. A sharded parameter of a model of shapes is never whole on a device or host.

    `rename` is a file of lines `regex: path | permute 1 0 | ...` (docs/weights.md); without it, the names in the file are
    the parameters' paths. A dtype different from the model's is an error unless `dtype="convert"`.

    Raises a `JShardError` with all faults before the first number is read. Moves nothing between processes.
    """
    begin, converts = time.perf_counter(), _converts(dtype)
    leaves, renaming, (tensors, faults) = _all_or_faults(
        lambda: leaves_of(model), lambda: _renaming(rename, model), lambda: _tensors(Path(path), model)
    )
    filled = assign(tensors, leaves, renaming, str(path), converts=converts, faults=faults)
    wanted = [leaf for leaf in leaves if leaf.path in filled]
    read: dict[str, jax.Array] = {}
    count, not_finite_by_leaf = 0, dict[str, int]()
    with byte_bar(f"reading {path}", sum(leaf.bytes_here for leaf in wanted), _console()) as show:
        for leaf in wanted:
            array, more, not_finite_by_leaf[str(leaf)] = _read(leaf, filled[leaf.path])
            count += more
            if leaf.variable is not None:
                leaf.variable.set_value(array)
            else:
                read[leaf.path] = array
            show(leaf.bytes_here)
    of = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    seconds = time.perf_counter() - begin
    events.tell("weights_read", file=str(path), parameters=len(wanted), read=count, of=of, seconds=seconds)
    warn_of_not_finite(str(path), not_finite_by_leaf)
    if isinstance(model, nnx.Module):
        return model
    return jax.tree_util.tree_map_with_path(lambda path, x: read.get(path_in_tree(path), x), model)


def save_weights(
    model: object, path: PathLike, *, rename: PathLike | None = None, like: PathLike | None = None, dtype: str = "same",
    metadata: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write a model's parameters to a file of safetensors, each process its own shards; all processes must call it.

    `like` is the file the weights were read from. With it, the names, their order, the metadata and the tensors skipped by
    `rename` are kept, so unchanged weights give the same bytes; a folder gives a folder. Without `like`, the names are the
    parameters' paths, in the library's order. The text is written to `FILE.partial`, and renamed once complete.
    """
    path, begin, converts = Path(path), time.perf_counter(), _converts(dtype)
    if rename is not None and like is None:
        raise JShardError(
            f"{rename} has no order and no dtypes of tensors", hint='give like="FILE", a file of these names'
        )
    leaves, renaming = _all_or_faults(lambda: leaves_of(model), lambda: _renaming(rename, model))
    if abstract := [leaf for leaf in leaves if leaf.required and not isinstance(leaf.value, jax.Array)]:
        hint = f"read them first: jshard.load_weights(model, {quoted(str(like or 'FILE'))})"
        raise joined([JShardError(f"{leaf} is a shape without numbers", hint=hint) for leaf in abstract])
    faults: list[JShardError] = []
    headers = [_laid_out(path, leaves, metadata)] if like is None else read_headers(Path(like), faults)
    source = str(path if like is None else like)
    filled = assign(by_name(headers), leaves, renaming, source, converts=converts, faults=faults, writes=True)
    index = None if like is None else index_of(Path(like))
    in_folder = like is not None and Path(like).is_dir()
    places = {header.path: path / header.path.name if in_folder else path for header in headers}
    partial = {source: place.with_name(f"{place.name}.partial") for source, place in places.items()}
    leads, wanted = jax.process_index() == 0, [leaf for leaf in leaves if leaf.path in filled]

    def make() -> None:
        if in_folder:
            path.mkdir(exist_ok=True)
        for header in headers:
            with partial[header.path].open("wb") as file:
                write_at(file.fileno(), header.text, 0)
                _allocate(file.fileno(), header.size)
                for tensor in () if like is None else _kept(header, filled):
                    _copy(tensor, file.fileno())

    def place() -> None:
        for source, unfinished in partial.items():
            unfinished.replace(places[source])
        if index is not None and index.parent.resolve() != path.resolve():
            shutil.copyfile(index, path / index.name)
        flush(path if in_folder else path.parent)

    try:
        for deed, by_all in ((make, False), (lambda: _fill(path, wanted, filled, partial), True), (place, False)):
            _together(deed if by_all or leads else lambda: None, path)
    except JShardError:
        for unfinished in partial.values() if leads else ():
            unfinished.unlink(missing_ok=True)
        raise
    of, seconds = sum(header.size for header in headers), time.perf_counter() - begin
    events.tell("weights_written", file=str(path), parameters=len(wanted), of=of, seconds=seconds)


def _all_or_faults(*deeds: Callable[[], Any]) -> list[Any]:
    """Call all functions and return their results, or raise an error with all their faults."""
    done, faults = [], []
    for deed in deeds:
        try:
            done.append(deed())
        except JShardError as error:
            faults.append(error)
    if faults:
        raise joined(faults)
    return done


def _renaming(rename: PathLike | None, model: object) -> Renaming:
    return Same([leaf.path for leaf in leaves_of(model)]) if rename is None else Renaming.read(Path(rename))


def _converts(dtype: str) -> bool:
    if dtype not in DTYPE_CHOICES:
        hint = did_you_mean(dtype, DTYPE_CHOICES, 'use "same" or "convert"')
        raise JShardError(f"dtype is {quoted(str(dtype))}, which is neither same nor convert", hint=hint)
    return dtype == "convert"


def _console() -> Console | None:
    """Return a silent console on all processes except the first."""
    return silent() if jax.process_index() else None


# -- reading --


def _tensors(path: Path, model: object) -> tuple[Mapping[str, Any], list[JShardError]]:
    """Open the tensors of a path by name, without reading, and return them with the faults of cut-off files."""
    faults: list[JShardError] = []
    if (path / MANIFEST).is_file():  # of jshard train: only the model, without optimizer and random state
        arrays = [array for array in (stored(path / "arrays") or {}).values() if array.name.startswith("model.")]
        named = [dataclasses.replace(array, name=array.name.removeprefix("model.")) for array in arrays]
        random = nnx.to_flat_state(nnx.state(model, nnx.RngState)) if isinstance(model, nnx.Module) else ()
        drawn = {".".join(map(str, path)) for path, _ in random}
        return {array.name: array for array in named if array.name not in drawn}, faults
    if path.is_dir():
        if (arrays := stored(path)) is not None:
            return arrays, faults
    elif not path.exists():
        near = [sibling.name for sibling in path.parent.glob("*")]
        raise JShardError(f"there is no {path}", hint=did_you_mean(path.name, near, "name a file or folder of weights"))
    return by_name(read_headers(path, faults)), faults


def _read(leaf: Leaf, pieces: Sequence[Fragment]) -> tuple[jax.Array, int, int]:
    """Read this process's shards of a parameter; return the array, the bytes read, and the count of non-finite numbers."""
    where, dtype = getattr(leaf.value, "sharding", None), np.dtype(leaf.value.dtype)
    arrays, count, faulty = [], 0, 0
    for box, devices in leaf.boxes.items():
        part = _aligned(lengths(box), dtype)
        for piece in pieces:
            if (target := piece.within(box, part)) is not None:
                count += piece.view.read(piece.tensor, *target)
        faulty += not_finite(part) if leaf.required else 0  # a mask may hold infinities
        if where is None or leaf.is_free:
            return jax.device_put(part), count, faulty
        places = [SingleDeviceSharding(device, memory_kind=where.memory_kind) for device in devices]
        arrays += jax.device_put([part] * len(places), places)
        jax.block_until_ready(arrays)  # so that the host holds one part at a time
    assert where is not None
    return jax.make_array_from_single_device_arrays(leaf.value.shape, where, arrays, dtype=dtype), count, faulty


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocate an array aligned to 64 bytes, so that a CPU device uses its memory without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


# -- writing --


def _laid_out(path: Path, leaves: Sequence[Leaf], metadata: Mapping[str, str] | None) -> Header:
    """Return the header of a new file for these parameters, named by their paths."""
    arrays = {leaf.path: (leaf.value.shape, np.dtype(leaf.value.dtype)) for leaf in leaves if leaf.required}
    if unknown := [leaf for leaf in leaves if leaf.required and arrays[leaf.path][1] not in WORDS]:
        fault = "has a dtype that safetensors does not support"
        raise joined([JShardError(f"{leaf} {fault}", hint="convert it first") for leaf in unknown])
    return new_header(path, arrays, metadata)


def _kept(header: Header, filled: Mapping[str, Sequence[Fragment]]) -> list[FileTensor]:
    """List the tensors not completely filled from the model, to copy from the original file."""
    taken: dict[str, int] = {}
    for piece in (piece for pieces in filled.values() for piece in pieces):
        taken[piece.tensor.name] = taken.get(piece.tensor.name, 0) + math.prod(piece.view.shape)
    return [tensor for name, tensor in header.tensors.items() if taken.get(name, 0) < math.prod(tensor.shape)]


def _copy(tensor: FileTensor, file: int) -> None:
    with tensor.path.open("rb", buffering=0) as source:
        for start in range(0, tensor.nbytes, BLOCK):
            block = memoryview(bytearray(min(BLOCK, tensor.nbytes - start)))
            read_at(source.fileno(), tensor.path, block, tensor.at + start)
            write_at(file, block, tensor.at + start)


def _allocate(file: int, size: int) -> None:
    """Reserve the disk space in advance, so that a full disk is an error before anything is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _fill(
    path: Path, leaves: Sequence[Leaf], filled: Mapping[str, Sequence[Fragment]], partial: Mapping[Path, Path]
) -> None:
    """Write this process's shards into the partial files, given by the paths of the original files."""
    total = sum(leaf.bytes_here for leaf in leaves)
    with contextlib.ExitStack() as stack, byte_bar(f"writing {path}", total, _console()) as show:
        files = {source: stack.enter_context(path.open("r+b")).fileno() for source, path in partial.items()}
        for leaf in leaves:
            _write(leaf, filled[leaf.path], files)
            show(leaf.bytes_here)
        for file in files.values():
            os.fsync(file)


def _write(leaf: Leaf, pieces: Sequence[Fragment], files: Mapping[Path, int]) -> None:
    boxes = boxes_of(leaf.value.sharding, leaf.value.shape)
    for shard in leaf.value.addressable_shards:
        if shard.replica_id:
            continue
        part = np.asarray(shard.data)
        for piece in pieces:
            if (source := piece.within(boxes[shard.device], part)) is not None:
                data, box = source
                piece.tensor.write(files[piece.tensor.path], data, piece.view.at(box), piece.view.steps)


def _together(deed: Callable[[], None], path: Path) -> None:
    """Call `deed` on every process; a failure of any process is raised on all."""
    fault = None
    try:
        deed()
    except JShardError as error:
        fault = str(error)[:1000]
    except OSError as error:
        fault = f"{path} can't be written to: {reason(error)}; make room, or name another file"
    with without_mesh():
        faults = [report["fault"] for report in tell(doors_of(jax.devices()[0].platform), {"fault": fault})]
    for first in filter(None, faults):
        raise JShardError.saying(first)
