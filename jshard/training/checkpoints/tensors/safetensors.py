"""The safetensors format: 8 bytes with the header's length, the header in JSON, and the tensors' bytes.

{"__metadata__": {"format": "pt"}, "up.weight": {"dtype": "F32", "shape": [256, 784], "data_offsets": [0, 802816]}, ...}

A part of a tensor is read by `pread` of its runs of bytes only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jshard.errors import JShardError, quoted, refused

# In the order of the library, which writes tensors of the last dtype first.
DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I16": np.int16, "U16": np.uint16, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I32": np.int32, "U32": np.uint32,
    "F32": np.float32, "C64": np.complex64, "F64": np.float64, "I64": np.int64, "U64": np.uint64,
}  # fmt: skip
DTYPES = {word: np.dtype(dtype) for word, dtype in DTYPES.items()}
WORDS = {dtype: word for word, dtype in DTYPES.items()}
BLOCK = 2**20  # bytes of a read; larger blocks leave the cache, and permuting them is slower
SECTOR = 512  # bytes; smaller gaps are read too, because a disk reads whole sectors and a call costs more than a copy
LONGEST = 100_000_000  # bytes of a header, the library's limit


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor of a file; its bytes begin at `at`."""

    name: str
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def file(self) -> str:
        return str(self.path)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, out: np.ndarray, start: int, steps: Sequence[int]) -> int:
        """Fill `out` with the numbers from `start` on, `steps` apart; return the number of bytes read."""
        out, steps = self._falling(out, steps)
        at, count = self.at + start * self.dtype.itemsize, 0
        with refused(f"{self.path} can't be read", hint="make it readable"), open(self.path, "rb", buffering=0) as file:
            for run in runs(out.shape, steps, self.dtype.itemsize, gap=SECTOR):
                part = out[(*run.part, ...)]
                straight = part.dtype == self.dtype and part.flags.c_contiguous and run.span * run.count == part.nbytes
                block = part.reshape(-1).view(np.uint8) if straight else np.empty(run.span * run.count, np.uint8)
                for begin, piece in run.pieces(block):
                    read_at(file.fileno(), self.path, piece, at + begin)
                if not straight:
                    inner = steps[len(steps) - part.ndim :]
                    strides = [run.span, *inner[1:]] if run.step else inner
                    part[...] = np.ndarray(part.shape, self.dtype, block, strides=strides)
                count += block.nbytes
        return count

    def write(self, file: int, data: np.ndarray, start: int, steps: Sequence[int]) -> int:
        """Write `data` to the bytes read by `read`; return the number of bytes written."""
        data, steps = self._falling(data, steps)
        for run in runs(data.shape, steps, self.dtype.itemsize, gap=0):
            block = np.ascontiguousarray(data[(*run.part, ...)], self.dtype).reshape(-1).view(np.uint8)
            for begin, piece in run.pieces(block):
                write_at(file, piece, self.at + start * self.dtype.itemsize + begin)
        return data.size * self.dtype.itemsize

    def _falling(self, array: np.ndarray, steps: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """Transpose the axes from the longest step to the shortest; return the steps in bytes too."""
        order = sorted(range(array.ndim), key=lambda axis: -steps[axis])
        return array.transpose(order), [steps[axis] * self.dtype.itemsize for axis in order]


@dataclasses.dataclass(frozen=True)
class ByteSpan:
    """Runs of `span` contiguous bytes from `start` on, `count` of them, `step` apart; `part` is their index in the array."""

    part: tuple[Any, ...]
    start: int
    span: int
    count: int = 1
    step: int = 0

    def pieces(self, block: np.ndarray) -> Iterator[tuple[int, memoryview]]:
        """Yield the start of each run, and its part of `block`."""
        view = memoryview(block.data)
        for at in range(self.count):
            yield self.start + at * self.step, view[at * self.span : (at + 1) * self.span]


def runs(shape: Sequence[int], steps: Sequence[int], itemsize: int, *, gap: int) -> Iterator[ByteSpan]:
    """Yield the runs of a strided array, each of at most `BLOCK` bytes and without gaps above
    `gap`. `steps` are the strides in bytes, and fall from axis to axis."""
    if 0 in shape:
        return
    spans, dense = [itemsize], [True]  # of the last axis, of the last two, ...
    for size, step in zip(reversed(shape), reversed(steps), strict=True):
        dense.append(dense[-1] and (size == 1 or step - spans[-1] <= gap))
        spans.append(spans[-1] + (size - 1) * step)
    if not shape or dense[-1] and spans[-1] <= BLOCK:
        yield ByteSpan((), 0, spans[-1])
    elif dense[-2] and spans[-2] <= BLOCK:
        rows = max(1, BLOCK // (steps[0] if dense[-1] else spans[-2]))
        for begin in range(0, shape[0], rows):
            part, count = (slice(begin, begin + rows),), min(rows, shape[0] - begin)
            if dense[-1]:
                yield ByteSpan(part, begin * steps[0], spans[-2] + (count - 1) * steps[0])
            else:
                yield ByteSpan(part, begin * steps[0], spans[-2], count, steps[0])
    else:
        for at in range(shape[0]):
            for run in runs(shape[1:], steps[1:], itemsize, gap=gap):
                yield dataclasses.replace(run, part=(at, *run.part), start=run.start + at * steps[0])


def read_at(file: int, path: Path, memory: memoryview, at: int) -> None:
    """Fill memory with the bytes of a file from `at` on."""
    while memory:
        count = os.preadv(file, [memory], at)
        if not count:
            raise JShardError(f"{path} ends at byte {at:,}, in the middle of a tensor", hint=f"fetch {path.name} again")
        memory, at = memory[count:], at + count


def write_at(file: int, memory: memoryview | bytes, at: int) -> None:
    """Write memory to a file from `at` on."""
    while memory:
        count = os.pwrite(file, memory, at)
        memory, at = memory[count:], at + count


# -- headers --


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a file: `text` is its bytes with the length in front, `size` the size of the whole file."""

    path: Path
    text: bytes
    tensors: Mapping[str, FileTensor]
    size: int


def read_header(path: Path, cut_off: list[JShardError]) -> Header:
    """Read the header of a file, and raise all its faults in a single error. A file with a complete
    header and too few bytes after it adds a fault to `cut_off` instead."""
    again = f"fetch {path.name} again"
    with refused(f"{path} can't be read", hint=f"fetch {path.name}"), path.open("rb") as file:
        there = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if there < 8 or length > LONGEST:
            raise JShardError(
                f"{path} is no safetensors file: its first 8 bytes are not the length of a header",
                hint="name a file of safetensors",
            )
        if there < 8 + length:
            raise JShardError(
                f"{path} has {there:,} bytes and its header alone {8 + length:,}: it was cut off", hint=again
            )
        text = length.to_bytes(8, "little") + file.read(length)
    try:
        entries = json.loads(text[8:], object_pairs_hook=_Pairs)
        if not isinstance(entries, _Pairs):
            raise ValueError("it is no mapping")
    except (ValueError, RecursionError) as error:
        raise JShardError(f"the header of {path} is no JSON: {str(error)[:100]}", hint=again) from None
    faults, tensors = [], {}
    for name, entry in entries:
        if name == "__metadata__":
            continue
        try:
            if name in tensors:
                raise ValueError("is there twice")
            tensors[name] = _tensor(path, name, entry, 8 + length)
        except ValueError as error:
            faults.append(JShardError(f"{quoted(name)} in the header of {path} {error}", hint=again))
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.at, tensor.nbytes))
    size, before = 8 + length, ""
    for tensor in ordered if not faults else ():
        if tensor.at != size:
            fault = f"{before} and {quoted(tensor.name)} share bytes"
            if tensor.at > size:
                fault = f"{tensor.at - size:,} bytes before {quoted(tensor.name)} belong to no tensor"
            faults.append(JShardError(f"by the header of {path} {fault}", hint=again))
        size, before = max(size, tensor.at + tensor.nbytes), quoted(tensor.name)
    if faults:
        raise JShardError.of(faults)
    if there != size:
        cut = ": it was cut off" if there < size else ""
        cut_off.append(JShardError(f"{path} has {there:,} bytes and by its header {size:,}{cut}", hint=again))
    return Header(path, text, tensors, size)


class _Pairs(list[tuple[str, Any]]):
    """A JSON mapping as pairs, so that duplicate names are kept."""


def _tensor(path: Path, name: str, entry: object, start: int) -> FileTensor:
    fields = dict(entry) if isinstance(entry, _Pairs) else {}
    word, shape, offsets = fields.get("dtype"), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError("has no dtype, shape and data_offsets")
    if not isinstance(word, str) or word not in DTYPES:
        raise ValueError(f"has a dtype that jshard does not know, {quoted(str(word))}")
    tensor = FileTensor(name, path, DTYPES[word], shape, start + offsets[0])
    if offsets[1] - offsets[0] != tensor.nbytes:
        taken = f"{offsets[1] - offsets[0]:,} bytes by its offsets and {tensor.nbytes:,} by its shape"
        raise ValueError(f"takes {taken}, {tensor.dtype}{list(tensor.shape)}")
    return tensor


def _counts(value: Any) -> tuple[int, ...] | None:
    are_counts = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return tuple(value) if are_counts else None


def new_header(
    path: Path, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]], metadata: Mapping[str, str] | None
) -> Header:
    """Return the header of a new file, byte for byte equal to the library's: wide dtypes first, then by name."""
    words = list(DTYPES)
    order = sorted(arrays, key=lambda name: (-words.index(WORDS[arrays[name][1]]), name))
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    at = 0
    for name in order:
        shape, dtype = arrays[name]
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": WORDS[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    tensors = {
        name: FileTensor(name, path, arrays[name][1], tuple(arrays[name][0]), start + entries[name]["data_offsets"][0])
        for name in order
    }
    return Header(path, len(text).to_bytes(8, "little") + text, tensors, start + at)


def read_headers(path: Path, cut_off: list[JShardError]) -> list[Header]:
    """Read the header of a file, or of all files in a folder, by its index if it has one. All
    faults are raised in a single error; faults of cut-off files are added to `cut_off`."""
    index = index_of(path)
    named = None if index is None else _weight_map(index)
    parts = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if named is not None:
        parts = [path / name for name in sorted(set(named.values()))]
    if not parts:
        raise JShardError(f"{path} holds no safetensors", hint="name the folder with model.safetensors in it")
    faults: list[JShardError] = []
    headers: list[Header] = []
    home: dict[str, Path] = {}
    for part in parts:
        try:
            headers.append(header := read_header(part, cut_off))
        except JShardError as error:
            faults.append(error)
            continue
        for name in sorted(home.keys() & header.tensors.keys()):
            fault = f"{quoted(name)} is in {home[name].name} and in {part.name} of {path}"
            faults.append(JShardError(fault, hint="remove one of the files"))
        home |= dict.fromkeys(header.tensors, part)
    for name in sorted(named.keys() ^ home.keys()) if named and not faults else ():
        has = (
            f"does not name {quoted(name)}, which is there"
            if name in home
            else f"has {quoted(name)}, which no part has"
        )
        faults.append(JShardError(f"{index} {has}", hint="fetch them again"))
    if faults:
        raise JShardError.of([*faults, *cut_off])
    return headers


def index_of(path: Path) -> Path | None:
    """Return the index of a folder of safetensors, the file that maps tensors to files; None if it has none."""
    return next(iter(sorted(path.glob("*.safetensors.index.json"))), None)


def by_name(headers: Sequence[Header]) -> dict[str, FileTensor]:
    return {name: tensor for header in headers for name, tensor in header.tensors.items()}


def _weight_map(index: Path) -> dict[str, str]:
    with refused(f"{index} can't be read", hint="make it readable"):
        text = index.read_bytes()
    try:
        weight_map = json.loads(text)["weight_map"]
        if not all(isinstance(part, str) and Path(part).name == part for part in weight_map.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise JShardError(
            f'{index} is no index of safetensors: it has no "weight_map" of names and files', hint="fetch it again"
        ) from None
    return weight_map
