"""Arrays on disk, by orbax: the one place that knows its names, which still move from release to release."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jshard.layouts.put import raw


def prepare() -> None:
    """Import orbax, which takes a second, before the first step and not in front of the first save."""
    from orbax.checkpoint import v1  # noqa: F401  # the import is the work


def save(folder: Path, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Begin to write arrays, each process its own parts; return what waits for the end of it. When this returns the
    arrays have been copied and may be donated."""
    from orbax.checkpoint import v1

    logging.getLogger("absl").addFilter(_told_elsewhere)
    return v1.save_async(str(folder.absolute()), dict(arrays)).result


def load(folder: Path, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Read the arrays, each of the shape and dtype and in the place that `like` says, wherever they lay when they were saved.
    Shapes have been compared before."""
    from orbax.checkpoint import v1

    logging.getLogger("absl").addFilter(_told_elsewhere)
    return v1.load(str(folder.absolute()), dict(like))  # pyright: ignore[reportReturnType]


def _told_elsewhere(record: logging.LogRecord) -> bool:
    """Whether a line of the log is not orbax's: what goes wrong there is raised as well, and told as one sentence."""
    return "orbax" not in record.pathname


def like_raw(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of `raw(array)`."""
    numbers = raw(array)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=numbers.sharding)
