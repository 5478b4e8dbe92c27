"""Arrays on disk, by orbax. All uses of orbax are here, because its names change between releases."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard.errors import JShardError, printable
from jshard.layouts.gathering import raw
from jshard.training.checkpoints.tensors.view import View

BLOCK = 2**18  # numbers checked at a time
SHOWN = 3  # parameters named in a warning


def prepare() -> None:
    """Import orbax before the first step: it takes a second, which would delay the first save."""
    from orbax.checkpoint import v1  # noqa: F401  # the import is the work


def save(folder: Path, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Start to write arrays, each process its own shards; return a function that waits for the end.
    On return the arrays have been copied and may be donated."""
    from orbax.checkpoint import v1

    logging.getLogger("absl").addFilter(_is_not_orbax)
    return v1.save_async(str(folder.absolute()), dict(arrays)).result


def load(folder: Path, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read the arrays, of checked shapes, with the dtypes and shardings of `like`."""
    from orbax.checkpoint import v1

    logging.getLogger("absl").addFilter(_is_not_orbax)
    return v1.load(str(folder.absolute()), dict(like))  # pyright: ignore[reportReturnType]


def _is_not_orbax(record: logging.LogRecord) -> bool:
    """Drop orbax's log lines: its faults are raised too, and reported as one sentence."""
    return "orbax" not in record.pathname


def like_raw(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of `raw(array)`."""
    numbers = raw(array)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=numbers.sharding)


def not_finite(part: np.ndarray) -> int:
    """Count the NaNs and infinities in an array on the host, a block at a time."""
    numbers = part.reshape(-1) if jnp.issubdtype(part.dtype, jnp.inexact) else np.empty(0)
    blocks = (numbers[start : start + BLOCK] for start in range(0, numbers.size, BLOCK))
    return sum(block.size - int(np.count_nonzero(np.isfinite(block))) for block in blocks)


def warn_of_not_finite(source: str, counts: Mapping[str, int]) -> None:
    """Warn of parameters read with NaNs or infinities, given the counts by name."""
    if faults := [f"{count:,} in {name}" for name, count in counts.items() if count]:
        more = f" and in {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        text = f"{source} holds numbers that are NaN or infinite: {', '.join(faults[:SHOWN])}{more}"
        warnings.warn(printable(f"{text}; fetch it again, or train from another"), stacklevel=3)


TREE = "_METADATA"  # orbax's list of the arrays in a folder


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a checkpoint by orbax. Its chunks are the shards it was saved in. A read fetches,
    whole, only the chunks that overlap the requested part."""

    name: str
    file: str
    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype.numpy_dtype

    def read(self, out: np.ndarray, start: int, steps: Sequence[int]) -> int:
        """Fill `out` with the numbers from `start` on, `steps` apart. Returns the number of bytes spanned."""
        rows, corner = View.of(self.shape).steps, np.unravel_index(start, self.shape)
        along = [next(axis for axis, row in enumerate(rows) if row <= step) for step in steps]
        ends = [int(begin) + 1 for begin in corner]
        for axis, size, step in zip(along, out.shape, steps, strict=True):
            ends[axis] += (size - 1) * (step // rows[axis])
        if any(end > size for end, size in zip(ends, self.shape, strict=True)):  # a reshape joined axes
            last = start + sum((size - 1) * step for size, step in zip(out.shape, steps, strict=True))
            block = self.array[start // rows[0] : last // rows[0] + 1].read().result().reshape(-1)
            part, strides = block[start % rows[0] :], [step * block.itemsize for step in steps]
        else:
            part = block = self.array[tuple(map(slice, corner, ends))].read().result()
            strides = [block.strides[axis] * (step // rows[axis]) for axis, step in zip(along, steps, strict=True)]
        out[...] = np.lib.stride_tricks.as_strided(part, out.shape, strides)
        return block.nbytes


def stored(folder: Path) -> dict[str, StoredArray] | None:
    """Open the arrays of a checkpoint by orbax, by their paths, without reading; None if the folder is no checkpoint."""
    import tensorstore

    roots = [path for path in (folder, *sorted(folder.glob("*/"))) if (path / TREE).is_file()]
    if not roots:
        return None
    if len(roots) > 1:
        names = ", ".join(path.name for path in roots)
        raise JShardError(f"{folder} holds several trees, {names}", hint=f"name one: {roots[0]}")
    root = roots[0].absolute()
    try:
        tree = json.loads((root / TREE).read_bytes())
        paths = [[str(key["key"]) for key in entry["key_metadata"]] for entry in tree["tree_metadata"].values()]
        driver, stores = "zarr3" if tree["use_zarr3"] else "zarr", {"base": root.as_uri() + "/"}
        opening = {}
        for path in paths:
            name = "/".join(path[:-1] if path[-1:] == ["value"] and len(path) > 1 else path)
            if tree["use_ocdbt"]:
                store = {"driver": "ocdbt", **stores, "path": ".".join(path) + "/"}
            else:
                store = {"driver": "file", "path": str(root / ".".join(path)) + "/"}
            opening[name] = tensorstore.open({"driver": driver, "kvstore": store}, open=True, read=True)
        return {name: StoredArray(name, str(folder), array.result()) for name, array in opening.items()}
    except (KeyError, TypeError, ValueError, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise JShardError(f"{folder} is no whole checkpoint by orbax: {why}", hint="fetch it again") from error
