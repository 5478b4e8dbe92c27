"""A function of the user's that fails while it is traced: an error with its own line and signal, and not JAX's frames."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import flax
import jax

from jshard.errors import JShardError
from jshard.signals.active_config import configuration
from jshard.signals.scope import failed_under

# Frames of these are not the user's.
INSIDE = tuple(
    f"{folder}/" for folder in (Path(__file__).parents[1], Path(jax.__file__).parent, Path(flax.__file__).parent)
)
LONGEST = 300


@contextlib.contextmanager
def as_user_error(doing: str) -> Iterator[None]:
    """Raise what goes wrong inside as one sentence; the original error stays behind it, as its cause."""
    try:
        yield
    except JShardError:
        raise
    except Exception as error:
        raise _sentence(doing, error) from error


def _sentence(doing: str, error: Exception) -> JShardError:
    frame = _own_frame(error)
    place = f"{_shown(frame.filename)}:{frame.lineno}" if frame is not None else ""
    where = f"{place} (in {frame.name}{_signal(error)})" if frame is not None else f"the program{_signal(error)}"
    message = " ".join(str(error).split()).rstrip(".;:")
    message = message if len(message) <= LONGEST else message[:LONGEST].rsplit(" ", 1)[0] + " ..."
    fault = f"{where} fails while {doing}: {type(error).__name__}" + (f": {message}" if message else "")
    hint = f"fix {place}" if place else "call it by itself to see all of Python's frames"
    if type(error).__name__ == "ShardingTypeError" and configuration() is not None:  # JAX keeps the class to itself
        name = "that function" if frame is None else frame.name
        hint = (
            f"give {name} to jshard.shard, write output: gather for the signal of the product before it, or axis_types: auto "
            "under jshard"
        )
    return JShardError(fault, hint=hint)


def _own_frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost frame that is neither jshard's, JAX's nor Flax's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        inside = "/site-packages/" in frame.filename or "/lib/python" in frame.filename
        if not inside and not frame.filename.startswith((*INSIDE, "<")):
            return frame
    return None


def _signal(error: Exception) -> str:
    path = failed_under(error)
    if not path:
        return ""
    present = configuration()
    place = f" ({present.lookup(path).place})" if present is not None else ""
    return f', under signal "{"/".join(path)}"{place}'


def _shown(filename: str) -> str:
    """Shorten a path that is inside this folder."""
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename
