"""The scope of a signal, `with jshard.signal("layer1"):`, in and out of jit, per thread. The scope
is part of JAX's trace cache key, by the content of the signal and not by its name. Another layout
is another trace, and equal layers under different names share a trace."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Hashable, Iterator
from typing import Any

import jax

from jshard.errors import JShardError, kind_of
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import is_explicit
from jshard.layouts.redistribution import as_array, redistribute
from jshard.programs.provenance import line_here, scope
from jshard.signals.active_config import configuration, mesh_for, no_fingerprint
from jshard.signals.device_sets import check_reach
from jshard.signals.faults import listed
from jshard.signals.plain_layers import Watch, splits, watching
from jshard.signals.signal import Signal


class Scope:
    """The nested names at a point of a program. Scopes are equal if no lookup below differs."""

    __slots__ = ("backward", "digest", "entry", "path")

    def __init__(self, path: tuple[str, ...], backward: str | None = None, entry: Entry | None = None):
        self.path = path
        self.backward = backward
        self.entry = entry  # the innermost
        self.digest: Hashable = None
        if path and (present := configuration()) is not None:
            self.digest = present.digest(path), None if backward is None else present.lookup((backward,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


_context = jax.make_user_context(Scope(()))
Lines = dict[tuple[str, ...], set[str]]  # the lines of `with`, by nested names
_entered: contextvars.ContextVar[Lines | None] = contextvars.ContextVar("entered", default=None)
unplaced = jax.make_user_context(False)  # True in a trace for one device: signals place nothing


class Entry(contextlib.ContextDecorator):
    """A `with jshard.signal(name)` block; as a decorator it covers every call of the function."""

    def __init__(self, *names: str, backward: str | None = None):
        self.names = names
        self.backward = backward
        self._exits: contextlib.ExitStack | None = None
        self.waits = False  # not yet entered by the user
        self.is_read = False  # by a layer, placement or partitioned call inside

    def __call__(self, function: object) -> Any:
        """Enter the signal in each call of `function`."""
        self.waits, name = False, "/".join(self.names)
        if not callable(function):
            raise JShardError(
                f'signal "{name}" is called with {kind_of(function)}',
                hint=f'write `with jshard.signal("{name}"):`, or jshard.signal.tensor(x, name="{name}")',
            )
        return super().__call__(function)

    def __del__(self) -> None:
        if self.waits:
            name = "/".join(self.names)
            text = f'signal "{name}" is named but never entered; write `with jshard.signal("{name}"):`'
            warnings.warn(text, stacklevel=2)

    def _recreate_cm(self) -> Entry:
        return Entry(*self.names, backward=self.backward)

    def __enter__(self) -> Entry:
        self.waits = False
        if self._exits is not None:
            name = "/".join(self.names)
            raise JShardError(
                f'signal "{name}" is entered twice through one object',
                hint=f'write `with jshard.signal("{name}"):` again',
            )
        path = (*_here().path, *self.names)
        present = configuration()
        if present is not None:
            present.lookup(path)
            if self.backward is not None:
                present.lookup((self.backward,))
        if (lines := _entered.get()) is not None:
            lines.setdefault(path, set()).add(line_here())
        with contextlib.ExitStack() as exits:
            exits.enter_context(_context(Scope(path, self.backward, self)))
            exits.enter_context(scope(signal="/".join(self.names)))
            self._watch = None if self.is_read else _watch(path)
            exits.enter_context(watching(self._watch))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *reason: object) -> None:
        assert self._exits is not None
        if isinstance(reason[1], Exception) and not failed_under(reason[1]):
            vars(reason[1])["__jshard_path__"] = active_path()
        path, watch, present = _context.value.path, self._watch, configuration()
        exits, self._exits = self._exits, None
        exits.close()
        if watch is not None and present is not None and not self.is_read and reason[1] is None:
            watch.warn(has_split=path in present.placed)


def _watch(path: tuple[str, ...]) -> Watch | None:
    """Watch plain layers under these signals, unless jshard itself runs the program."""
    present = configuration()
    if present is None or present.mesh is None or _entered.get() is not None or unplaced.value:
        return None
    signal = present.lookup(path)
    return Watch(signal) if splits(signal) and not jax.sharding.get_abstract_mesh().manual_axes else None


@contextlib.contextmanager
def entering() -> Iterator[Lines]:
    """Record the line of each `with` entered inside."""
    lines: Lines = {}
    before = _entered.set(lines)
    try:
        yield lines
    finally:
        _entered.reset(before)


def _here() -> Scope:
    """Return the scope of this point, and mark it as read."""
    here = _context.value
    if here.entry is not None:
        here.entry.is_read = True
    return here


def failed_under(error: Exception) -> tuple[str, ...]:
    """Return the names of the scopes left by an exception, outermost first."""
    return getattr(error, "__jshard_path__", ())


def _words(name: object) -> list[str]:
    """Return the nested names of "decoder/attn"."""
    if not isinstance(name, str) or not all(name.split("/")):
        raise JShardError(f"a signal is named by {name!r}", hint='give it a name, like jshard.signal("layer1")')
    return name.split("/")


def active() -> Signal | None:
    """Return the active signal, resolved. Outside every scope, return `jshard.default` or None."""
    present, path, backward = configuration(), active_path(), _context.value.backward
    if present is None or not path or unplaced.value:
        return None
    signal = present.lookup(path)
    return signal if backward is None else dataclasses.replace(signal, backward=backward)


def active_path() -> tuple[str, ...]:
    """Return the names of the scopes here, outermost first; outside every scope, of `jshard.default`."""
    path, present = _here().path, configuration()
    return path if path or present is None or present.default is None else tuple(present.default.split("/"))


def scopes() -> tuple[str, ...]:
    """Return the names of the scopes here, outermost first."""
    return _here().path


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Leave every signal: keys and random numbers drawn inside are the same program under all signals."""
    with _context(Scope(())), no_fingerprint():
        yield


def resolve(remembered: tuple[str, ...]) -> tuple[Signal | None, contextlib.AbstractContextManager[Any]]:
    """Return the signal for a layer built under `remembered`, and a context to enter it if needed.
    The active signal comes first, then the remembered names, then `jshard.default`."""
    present, path = configuration(), remembered or active_path()
    if present is None or _context.value.path or not path:
        return active(), contextlib.nullcontext()
    entry = Entry(*path)
    entry.is_read = True
    return None if unplaced.value else present.lookup(path), entry


def tensor_layout(signal: Signal, rank: int, label: str = "") -> Layout:
    """Return the layout of an array under `signal`: by its `shard`, or axis 0 over `row` and the
    last over `column`. `label` names the array in an error."""
    mesh, shard_axes = mesh_for(signal)
    axes: list[tuple[str, ...]] = [()] * rank
    if signal.shard is not None:
        axis = signal.shard.axis  # none of what is replicated
        if axis is not None:
            if not -rank <= axis < rank:
                raise JShardError(
                    f"{signal.label('shard.axis')} shards axis {axis} of {label or f'a rank-{rank} array'}",
                    hint="use " + (listed(map(str, range(rank))) if rank else "a replicated signal"),
                )
            axes[axis] = shard_axes
    elif rank:
        axes[0] = signal.row
        axes[-1] = (*axes[-1], *signal.column)
    elif signal.row or signal.column:
        raise JShardError(f"{signal} splits a rank-0 array", hint="place it outside the signal")
    return Layout(mesh, *axes)


class SignalFunction:
    """The class of `jshard.signal`: a scope by call, and GT's other spellings as methods."""

    def __call__(self, name: str) -> Entry:
        """Return the scope `name`: everything built or called inside has the layout of this signal."""
        return self.context(name)

    def context(self, name: str, backward: str | None = None) -> Entry:
        """Return the scope `name`, with cotangents in the layout of the signal `backward`."""
        entry = Entry(*_words(name), backward=backward)
        entry.waits = True
        return entry

    def tensor(self, x: Any, name: str | None = None) -> jax.Array:
        """Return `x` in the layout of signal `name`, or of the active signal. The layout is its `shard`, or
        axis 0 over `row` and the last axis over `column`. Without a configuration, return `x` unchanged."""
        with contextlib.nullcontext() if name is None else Entry(*_words(name)):
            return _place(x)

    def enter(self, name: str) -> None:
        """Enter a signal until `exit(name)`."""
        Entry(*_words(name)).__enter__()

    def exit(self, name: str) -> None:
        """Leave the innermost signal, named `name`."""
        top = _context.value.entry
        if top is None:
            raise JShardError(
                f'signal "{name}" is left, but none is entered', hint=f'call jshard.signal.enter("{name}") first'
            )
        innermost = "/".join(top.names)
        if innermost != name:
            raise JShardError(
                f'signal "{name}" is left while "{innermost}" is the innermost',
                hint=f'call jshard.signal.exit("{innermost}") first',
            )
        top.__exit__(None, None, None)

    def current(self) -> str | None:
        """Return the names of the active scopes, as in "decoder/attn"; None outside every scope."""
        return "/".join(_context.value.path) or None


def signal_here(call: str) -> Signal:
    """Return the active signal for `call`, which places an array; raise an error outside every scope."""
    signal, present = active(), configuration()
    assert present is not None
    if signal is None:
        name = next(iter(present.signals), "inputs")
        raise JShardError(
            f"{call} is under no signal of {present.source}",
            hint=f'write `with jshard.signal("{name}"):` around it',
        )
    present.placed.add(active_path())
    return signal


def _place(x: jax.Array) -> jax.Array:
    present = configuration()
    if present is None:
        return x
    signal = signal_here("jshard.signal.tensor(x)")
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise JShardError(
            f"{signal} can't place an array inside a shard_map, where x is one device's part already",
            hint="place it before: jshard.signal.tensor(x) outside the shard_map",
        )
    label = str(signal)
    x = as_array(x, label=label)
    layout = tensor_layout(signal, x.ndim)
    check_reach(x, layout.mesh, signal)
    if signal.backward is None:
        return redistribute(x, layout, label=label)
    other = present.lookup((signal.backward,))
    back, origin = tensor_layout(other, x.ndim), Layout.of(x)

    def bwd(_: None, cotangent: Any) -> tuple[Any]:
        check_reach(cotangent, back.mesh, other)
        if origin is not None and not is_explicit(back.mesh):
            raise JShardError(
                f"{other} can't have the cotangent of an array on an explicit mesh, which stays on that mesh",
                hint=f'give signal "{other.name}" mesh axes instead of workers',
            )
        with scope(key="backward"):
            cotangent = redistribute(cotangent, back, label=label)
            if origin is not None:  # to the layout in the type of x
                cotangent = redistribute(cotangent, Layout(back.mesh, *origin.axes), label=label)
        return (cotangent,)

    place = jax.custom_vjp(lambda x: redistribute(x, layout, label=label))
    place.defvjp(lambda x: (place(x), None), bwd)
    return place(x)


signal = SignalFunction()
