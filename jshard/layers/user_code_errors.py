"""Errors in a user's function, as a sentence with the user's line and signal, without frames of JAX or Flax."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer

from jshard.errors import JShardError, shown_path
from jshard.layers.partition.calls import own_devices
from jshard.layouts.mesh import is_explicit
from jshard.signals.active_config import configuration, mesh
from jshard.signals.device_sets import program_of
from jshard.signals.scope import failed_under

# Frames in these folders are not the user's.
FOREIGN = tuple(f"{Path(str(module.__file__)).parent}/" for module in (jax, flax, optax, np))
INSIDE = (f"{Path(__file__).parents[1]}/", *FOREIGN)
LONGEST = 300
# JAX functions that set an array's sharding.
PLACING = {
    "with_sharding_constraint": "with_sharding_constraint",
    "reshard": "reshard",
    "canonicalize_sharding": "out_sharding",
}
# JAX's errors for code that needs the numbers of a traced array.
UNKNOWN_YET = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError
)  # fmt: skip


@contextlib.contextmanager
def as_user_error(doing: str) -> Iterator[None]:
    """Convert an error inside to a `JShardError`, with the original error as its cause."""
    try:
        yield
    except JShardError:
        raise
    except Exception as error:
        raise _sentence(doing, error) from error


def in_own_words(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with errors of JAX or Flax in its trace converted to a `JShardError`."""

    @functools.wraps(f)
    def call(*args: object, **kwargs: object) -> Any:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            if (sentence := _translated(error, f, sys._getframe())) is None:
                raise
            raise sentence from None

    return call


def boundary(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, a public function, without frames of JAX or Flax in the traceback of a `JShardError`."""

    @functools.wraps(call)
    def bounded(*args: object, **kwargs: object) -> Any:
        try:
            return call(*args, **kwargs)
        except JShardError as error:
            raise error.with_traceback(_own_frames(error.__traceback__)) from None

    return bounded


def _translated(error: Exception, f: Callable[..., Any], caller: types.FrameType) -> JShardError | None:
    """Return a `JShardError` for an error of JAX or Flax in `f`, called by `caller`; None for the
    user's errors. The type of the error and the functions in its traceback decide."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_foreign = [frame.f_code.co_filename.startswith(FOREIGN) for frame in frames]
    is_called_wrong = isinstance(error, TypeError) and frames[-1] is caller
    if isinstance(error, JShardError) or not (is_called_wrong or is_foreign[-1]):
        return None
    codes = [frame.f_code for frame in frames[len(frames) - is_foreign[::-1].index(False) :]]
    frame, name = _own_frame(error), name_of(f)
    line, present = "the program" if frame is None else f"{shown_path(frame.filename)}:{frame.lineno}", configuration()
    source = "the configuration" if present is None else present.source
    called = [code.co_name for code in codes if code.co_name != "reraise_with_filtered_traceback"]
    placing = next((PLACING[word] for word in called if word in PLACING), None)
    if is_called_wrong:
        sentence = JShardError(str(error), hint=f"call it as {name}{inspect.signature(f)}")
    elif isinstance(error, NameError):
        fault = f"{line} calls {called[0]} over a mesh axis, and {name} is given whole arrays"
        sentence = JShardError(fault, hint=f"remove {called[0]}: {source} says what is summed over devices")
    elif "shard_value" in called:  # of Flax, for an annotated variable
        fault = f"{line} annotates a parameter, and Flax looks for mesh axes of these names when it is built"
        sentence = JShardError(fault, hint="write nnx.with_partitioning(..., eager_sharding=False): claims place it")
    elif any(Path(code.co_filename).stem == "shard_map" for code in codes):
        sentence = own_devices(line, "shard_map")
    elif placing is not None:
        fault = f"{line} shards an array by {placing}, and {source} shards all arrays of {name}"
        sentence = JShardError(fault, hint=f"remove {placing}")
    elif isinstance(error, UNKNOWN_YET):
        fault = f"{line} needs the numbers of an array while {name} is traced for arrays of any numbers"
        sentence = JShardError(fault, hint="return the array, or use jnp.where or jax.lax.cond for if, and jnp for np")
    elif _is_ambiguous(error) and "update_fn" in called:
        fault = f"{line} updates split parameters by an optimizer that multiplies whole parameters"
        sentence = JShardError(fault, hint="use one that treats each element by itself, such as optax.adamw")
    elif _is_ambiguous(error):
        fault = f"{line} computes in global view with a split array, and JAX can't derive the sharding of the result"
        sentence = JShardError(fault, hint=_view_hint(frame))
    else:
        sentence = _sentence("it is traced", error)
    return sentence.with_traceback(_own_frames(error.__traceback__))


def check_numbers(x: object) -> None:
    """Raise an error for a numpy array of a dtype unknown to JAX."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "OSUmM":
        raise JShardError(
            f"an array of shape {x.shape} has the dtype {x.dtype}, and JAX holds numbers",
            hint="give it as numbers: x.astype(np.float32)",
        )


def check_mesh_is_known(leaves: Sequence[Any], name: str) -> None:
    """Raise an error for a gradient of the function `name` outside `jax.jit` without a mesh: JAX can't start it."""
    is_set = not jax.sharding.get_abstract_mesh().empty
    tracers = [x for x in leaves if isinstance(x, Tracer) and x.to_concrete_value() is not None and not _is_forward(x)]
    if is_explicit(mesh()) and not is_set and any(program_of(x) is None for x in tracers):
        raise JShardError(
            f"{name} is differentiated outside jax.jit, where JAX does not know the mesh",
            hint="write @nnx.jit above the step, or `with jax.set_mesh(jshard.mesh()):` around it",
        )


def of_transformation(error: Exception, leaves: Sequence[Any], name: str) -> JShardError | None:
    """Return a `JShardError` for an error of a JAX transformation around a call of `name`; None for other errors."""
    if isinstance(error, TraceContextError):
        return JShardError(
            f"{name} changes variables of its model inside a JAX transformation that does not take the model",
            hint="place the model by jshard.shard(model, x), and give it to nnx.vmap or nnx.grad as an argument",
        )
    if not any(map(_is_forward, leaves)):
        return None
    return JShardError(
        f"{name} moves arrays between devices, which jshard differentiates backwards, and jax.jvp forwards",
        hint="use jax.vjp, jax.grad or jax.jacrev",
    )


def _is_forward(x: object) -> bool:
    """Return True if `jax.jvp` differentiates `x`. JAX does not export the class."""
    return type(x).__name__ == "JVPTracer"


def name_of(f: Callable[..., Any]) -> str:
    """Return a function's name with its class, as `Net.__call__`, without an enclosing function."""
    return getattr(f, "__qualname__", type(f).__name__).rpartition("<locals>.")[2]


def _own_frames(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of JAX and Flax."""
    if tb is None:
        return None
    rest, is_foreign = _own_frames(tb.tb_next), tb.tb_frame.f_code.co_filename.startswith(FOREIGN)
    return rest if is_foreign else types.TracebackType(rest, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)


def _sentence(doing: str, error: Exception) -> JShardError:
    frame = _own_frame(error)
    place = f"{shown_path(frame.filename)}:{frame.lineno}" if frame is not None else ""
    where = f"{place} (in {frame.name}{_signal(error)})" if frame is not None else f"the program{_signal(error)}"
    message = " ".join(str(error).split()).rstrip(".;:")
    message = message if len(message) <= LONGEST else message[:LONGEST].rsplit(" ", 1)[0] + " ..."
    fault = f"{where} fails while {doing}: {type(error).__name__}" + (f": {message}" if message else "")
    hint = f"fix {place}" if place else "call it by itself to see all of Python's frames"
    if _is_ambiguous(error) and configuration() is not None:
        hint = _view_hint(frame)
    return JShardError(fault, hint=hint)


def _is_ambiguous(error: Exception) -> bool:
    """Return True for JAX's error for a result without a known sharding. JAX does not export the class."""
    return type(error).__name__ == "ShardingTypeError"


def _view_hint(frame: traceback.FrameSummary | None) -> str:
    name = "that function" if frame is None else frame.name
    return (
        f"give {name} to jshard.shard, write output: gather for the signal of the product before it, or axis_types: auto "
        "under jshard"
    )


def _own_frame(error: Exception) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code."""
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


def check_takes_its_models(f: Callable[..., Any]) -> None:
    """Raise an error for a closed-over model: its parameters would be constants, with their present values."""
    f = inspect.unwrap(f)
    if not isinstance(f, types.FunctionType):
        return
    used = inspect.getclosurevars(f)
    for name, value in {**used.globals, **used.nonlocals}.items():
        if isinstance(value, nnx.Module):
            line = f"{Path(f.__code__.co_filename).name}:{f.__code__.co_firstlineno}"
            raise JShardError(
                f"{f.__name__} ({line}) uses the model {name} and does not take it: its parameters would not be placed, "
                "and stay what they are now",
                hint=f"give it {name} as an argument",
            )
