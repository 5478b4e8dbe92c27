"""`with jshard.signal("layer1"):` the scope that names a place in the program, in and out of jit, per thread.

The scope lives in a context that is part of JAX's trace cache key, by what the signal *says* and not by its name: another
placement is another trace, and equal layers under different names share one.
"""

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
    """The nesting of names at one point of a program. Equal when nothing below could tell the two apart."""

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
Lines = dict[tuple[str, ...], set[str]]  # of each `with`, by the names that are nested there
_entered: contextvars.ContextVar[Lines | None] = contextvars.ContextVar("entered", default=None)
unplaced = jax.make_user_context(False)  # a program is traced as for one device: signals name places and place nothing


class Entry(contextlib.ContextDecorator):
    """One `with jshard.signal(name)`; as a decorator it covers every call of the function."""

    def __init__(self, *names: str, backward: str | None = None):
        self.names = names
        self.backward = backward
        self._exits: contextlib.ExitStack | None = None
        self.waits = False  # to be entered, by the user who asked for it
        self.is_read = False  # by a layer, a placement or a partitioned call below

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
            text = f'signal "{name}" is named here and never entered; write `with jshard.signal("{name}"):`'
            warnings.warn(text, stacklevel=2)

    def _recreate_cm(self) -> Entry:
        return Entry(*self.names, backward=self.backward)

    def __enter__(self) -> Entry:
        self.waits = False
        if self._exits is not None:
            name = "/".join(self.names)
            raise JShardError(
                f'signal "{name}" is entered a second time through one object',
                hint=f'write `with jshard.signal("{name}"):` anew',
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
    """Watch the plain layers under these signals, where nothing of jshard runs them."""
    present = configuration()
    if present is None or present.mesh is None or _entered.get() is not None or unplaced.value:
        return None
    signal = present.lookup(path)
    return Watch(signal) if splits(signal) and not jax.sharding.get_abstract_mesh().manual_axes else None


@contextlib.contextmanager
def entering() -> Iterator[Lines]:
    """Note the line of each `with` that is entered inside."""
    lines: Lines = {}
    before = _entered.set(lines)
    try:
        yield lines
    finally:
        _entered.reset(before)


def _here() -> Scope:
    """Return the scope of this point, for a reader that does what its signal says."""
    here = _context.value
    if here.entry is not None:
        here.entry.is_read = True
    return here


def failed_under(error: Exception) -> tuple[str, ...]:
    """The names of the scopes that an exception left, outermost first."""
    return getattr(error, "__jshard_path__", ())


def _words(name: object) -> list[str]:
    """The nested names of "decoder/attn"."""
    if not isinstance(name, str) or not all(name.split("/")):
        raise JShardError(f"a signal is named by {name!r}", hint='give it a name, like jshard.signal("layer1")')
    return name.split("/")


def active() -> Signal | None:
    """The signal that holds here, resolved: outside every scope `jshard.default`, or None, as with no configuration."""
    present, path, backward = configuration(), active_path(), _context.value.backward
    if present is None or not path or unplaced.value:
        return None
    signal = present.lookup(path)
    return signal if backward is None else dataclasses.replace(signal, backward=backward)


def active_path() -> tuple[str, ...]:
    """The names this point is inside, outermost first; outside every scope that of `jshard.default`."""
    path, present = _here().path, configuration()
    return path if path or present is None or present.default is None else tuple(present.default.split("/"))


def scopes() -> tuple[str, ...]:
    """The names of the scopes around this point, outermost first."""
    return _here().path


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Leave every signal: keys and numbers that are drawn inside hang on none, and are one program for all of them."""
    with _context(Scope(())), no_fingerprint():
        yield


def resolve(remembered: tuple[str, ...]) -> tuple[Signal | None, contextlib.AbstractContextManager[Any]]:
    """The signal for a layer built under `remembered`: the active one, else the remembered one, else `jshard.default`; and
    what enters it where it is not active."""
    present, path = configuration(), remembered or active_path()
    if present is None or _context.value.path or not path:
        return active(), contextlib.nullcontext()
    entry = Entry(*path)
    entry.is_read = True
    return None if unplaced.value else present.lookup(path), entry


def tensor_layout(signal: Signal, rank: int, label: str = "") -> Layout:
    """Where an array placed under `signal` lies: as its `shard` says, else axis 0 over `row` and the last over `column`.
    `label` names it in an error."""
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
    """`jshard.signal`: a scope by itself, and GT's other spellings of it as attributes."""

    def __call__(self, name: str) -> Entry:
        """The scope `name`: everything built or called inside lies as the configuration says of it."""
        return self.context(name)

    def context(self, name: str, backward: str | None = None) -> Entry:
        """The same scope, its cotangents lying as the signal `backward` says."""
        entry = Entry(*_words(name), backward=backward)
        entry.waits = True
        return entry

    def tensor(self, x: Any, name: str | None = None) -> jax.Array:
        """`x` placed as signal `name` (or the active one) says: by its `shard`, else axis 0 over `row` and the last axis
        over `column`. Unchanged when no configuration is loaded."""
        with contextlib.nullcontext() if name is None else Entry(*_words(name)):
            return _place(x)

    def enter(self, name: str) -> None:
        """Enter a signal until `exit(name)`."""
        Entry(*_words(name)).__enter__()

    def exit(self, name: str) -> None:
        """Leave the innermost signal, which must be `name`."""
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
        """The name of the active scope, with those around it: "decoder/attn"; None outside every scope."""
        return "/".join(_context.value.path) or None


def signal_here(call: str) -> Signal:
    """Return the active signal for `call`, which places an array as the signal says."""
    signal, present = active(), configuration()
    assert present is not None
    if signal is None:
        name = next(iter(present.signals), "inputs")
        raise JShardError(
            f"{call} stands under no signal of {present.source}",
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
            f"{signal} is to place an array inside a shard_map, where x is one device's part already",
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
                f"{other} can't have the cotangent of an array on an explicit mesh, which lies on that mesh too",
                hint=f'give signal "{other.name}" mesh axes instead of workers',
            )
        with scope(key="backward"):
            cotangent = redistribute(cotangent, back, label=label)
            if origin is not None:  # as the type of x says
                cotangent = redistribute(cotangent, Layout(back.mesh, *origin.axes), label=label)
        return (cotangent,)

    place = jax.custom_vjp(lambda x: redistribute(x, layout, label=label))
    place.defvjp(lambda x: (place(x), None), bwd)
    return place(x)


signal = SignalFunction()
