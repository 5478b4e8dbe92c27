"""`jshard.shard`: an unmodified Flax model, or a function of one, run on each device's part as the configuration claims."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.layers.layer import built_arrays, is_sharded
from jshard.layers.partition import Input, Program
from jshard.layers.partition.part import whole
from jshard.layers.roles import Placed
from jshard.layouts.layout import Layout
from jshard.layouts.paths import keys_of, words_of
from jshard.layouts.redistribution import Axes, redistribute
from jshard.signals.active_config import configuration, mesh
from jshard.signals.claims import Claim, claims
from jshard.signals.scope import unplaced
from jshard.signals.signal import Signal

T = TypeVar("T")


def shard(program: T, *args: Any, **kwargs: Any) -> T:
    """Run a model, or a function that takes one, on each device's part, as the signals say that claim its parameters.

    A model keeps its class and code; the parameters of it are placed by a trace of its call with `args`, which may be
    `jax.ShapeDtypeStruct`s, else by its first call. With no configuration loaded everything runs as it is. On
    `axis_types: auto` parameters and rows are placed by the same signals, and the program is left to XLA.
    """
    if isinstance(program, nnx.Module):
        if not is_sharded(program):
            program.__class__ = _sharded_class(type(program))
        if args or kwargs:
            place(program, *args, **kwargs)
        return program
    if not callable(program):
        raise JShardError(
            f"jshard.shard was given a {type(program).__name__}",
            hint="give it a Flax model, or a function that takes one",
        )
    return _sharded(program)  # type: ignore[return-value]


def place(model: nnx.Module, *args: Any, **kwargs: Any) -> None:
    """Move the parameters of a model to where a call with these arguments uses them; the arguments may be abstract."""
    if configuration() is None:
        return
    leaves, tree = jax.tree.flatten((args, kwargs))
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    calls: list[_Call] = []

    def call(given: list[Any]) -> None:
        it = iter(given)
        args, kwargs = jax.tree.unflatten(
            tree, [next(it) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        )
        calls.append(_Call(type(model)._jshard_original.__call__, (model, *args), kwargs))  # type: ignore[attr-defined]

    jax.eval_shape(call, shapes)  # Flax takes what only describes an array for a constant
    calls[0].keep(calls[0].placed())


def composed(model: nnx.Module, f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f(model(x), *rest)` as a function of the model, x and the rest, partitioned as a whole where the model is."""
    function = lambda model, x, *rest: f(model(x), *rest)
    return _sharded(function) if is_sharded(model) else function


def placements() -> Mapping[str, Placed]:
    """How parameters lie by the program that was traced last for them, by path, under what is loaded now."""
    present = configuration()
    return {} if present is None or present.mesh is None else _placements.get((present.fingerprint, mesh()), {})


_placements: collections.OrderedDict[Any, dict[str, Placed]] = collections.OrderedDict()


@functools.cache
def _sharded_class(cls: type) -> type:
    """A subclass whose call is partitioned: instances of it are instances of `cls`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(cls.__call__, (self, *args), kwargs)

    functools.update_wrapper(call, cls.__call__)
    names = {"__call__": call, "_jshard_original": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), names)


def _sharded(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _run(f, args, kwargs)

    return call


def _run(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if configuration() is None or unplaced.value:
        return f(*args, **kwargs)
    return _Call(f, args, kwargs).run()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Trace as if there were one device: what is sharded inside is part of the same program."""
    with unplaced(True), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


class _Call:
    """One call of a function: its arrays, and the program for arrays like these."""

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        present = configuration()
        assert present is not None
        self.args = args, kwargs
        self.graphdef, self.parameters, self.state, rest = nnx.split(self.args, nnx.Param, nnx.Variable, ...)
        named, self.tree = jax.tree_util.tree_flatten_with_path(self.parameters)
        leaves, self.rest_tree = jax.tree.flatten((self.state, rest))
        self.own = len(jax.tree.leaves(self.state))
        self.paths = tuple("/".join(words_of(path)[2:]) for path, _ in named)
        modules = [(at, each) for at, each in enumerate(args) if isinstance(each, nnx.Module)]
        built = {
            (0, at, *path): each.signal_path for at, module in modules for path, each in built_arrays(module).items()
        }
        layers = tuple(built.get(keys_of(path), ()) for path, _ in named)
        self.static = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
        self.numbers = [x for _, x in named]
        self.arrays = [leaf for leaf in leaves if _is_array(leaf)]
        types = tuple(
            (jnp.shape(x), x.dtype if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).dtype)
            for x in [*self.numbers, *self.arrays]
        )
        layouts = tuple(None if isinstance(x, jax.ShapeDtypeStruct) else _layout(x, mesh()) for x in self.arrays)
        situation = _Situation(
            f, self.graphdef, self.tree, self.rest_tree, self.static, self.paths, layers, types, layouts, self.own,
            mesh(), present.fingerprint,
        )  # fmt: skip
        self.program, self.out = _program(situation)

    def placed(self) -> list[Any]:
        """The parameters where they rest; the shape of one says where it will."""
        layouts = [Layout(self.program.mesh, *axes) for axes in self.program.in_axes]
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding)
            if isinstance(x, jax.ShapeDtypeStruct)
            else redistribute(x, layout, label=f"jshard.shard ({path})")
            for x, layout, path in zip(self.numbers, layouts, self.paths, strict=False)
        ]

    def keep(self, placed: list[Any]) -> None:
        """Give the model these parameters."""
        nnx.update(self.args, jax.tree.unflatten(self.tree, placed))

    def run(self) -> Any:
        numbers = self.placed()
        if not any(isinstance(x, Tracer) for x in numbers):  # a gradient would lie as the parameter did before
            self.keep(numbers)
        axes = self.program.in_axes[len(self.numbers) :]
        arrays = [
            redistribute(x, Layout(self.program.mesh, *a), label="jshard.shard")
            for x, a in zip([*self.arrays, *self.out.consts], axes, strict=True)
        ]
        outs = self.out.compiled(*numbers, *arrays)
        result, state = jax.tree.unflatten(self.out.tree, outs)
        nnx.update(self.args, state)
        return result


class _Out:
    """What a traced function returns, beside arrays: their tree; and the arrays that it closes over."""

    tree: Any = None
    consts: Sequence[Any] = ()
    compiled: Any = None


@dataclasses.dataclass(frozen=True)
class _Situation:
    """All that a program is traced for. A model may hold what has no hash: its arrays' names and types have to do."""

    f: Callable[..., Any]
    graphdef: Any
    tree: Any
    rest_tree: Any
    static: tuple[Any, ...]  # the leaves that are no arrays
    paths: tuple[str, ...]  # of parameters
    layers: tuple[tuple[str, ...], ...]  # the signals that layers of jshard around them were built under
    types: tuple[tuple[tuple[int, ...], Any], ...]  # of parameters, then of all other arrays
    layouts: tuple[Layout | None, ...]  # of all other arrays
    own: int  # how many of these are a model's own
    mesh: Mesh
    fingerprint: Any

    def __hash__(self) -> int:
        return hash((self.f, self.paths, self.types, self.fingerprint))


@functools.lru_cache(maxsize=256)
def _program(s: _Situation) -> tuple[Program, _Out]:
    _check_takes_its_models(s.f)
    out, count = _Out(), len(s.paths)

    def alone(*xs: Any) -> list[Any]:
        it = iter(xs[count:])
        state, rest = jax.tree.unflatten(s.rest_tree, [next(it) if x is None else x for x in s.static])
        args, kwargs = nnx.merge(s.graphdef, jax.tree.unflatten(s.tree, list(xs[:count])), state, rest)
        result = s.f(*args, **kwargs)
        flat, out.tree = jax.tree.flatten((result, nnx.split((args, kwargs), nnx.Param, nnx.Variable, ...)[2]))
        return flat

    with _alone():
        jaxpr = jax.make_jaxpr(alone)(*(jax.ShapeDtypeStruct(*each) for each in s.types))
    claimed = _claims(s)
    row = rows([claim.signal for claim in claimed if claim is not None])
    each = zip(s.types, claimed, s.paths, strict=False)
    inputs = [Input(whole(len(shape)), claim, path) for (shape, _), claim, path in each]
    batch = next((shape[0] for shape, _ in s.types[count + s.own :] if shape), None)
    for number, ((shape, _), layout) in enumerate(zip(s.types[count:], s.layouts, strict=True)):
        inputs.append(Input(_given(shape, layout, row if number >= s.own else (), batch)))
    jaxpr, out.consts = closed_over(jaxpr)
    program = Program(s.mesh, jaxpr, [*inputs, *(Input(whole(np.ndim(x))) for x in out.consts)])
    out.compiled = jax.jit(program)
    _placements.setdefault((s.fingerprint, s.mesh), {}).update(program.placed)
    while len(_placements) > 16:
        _placements.popitem(last=False)
    return program, out


def _check_takes_its_models(f: Callable[..., Any]) -> None:
    """Refuse a model that a function only closes over: its parameters would be constants, and stay what they are now."""
    if not inspect.isfunction(f):
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


def _claims(s: _Situation) -> list[Claim | None]:
    """Find the claim of each parameter: by the signal of the layer around it, else by a glob."""
    present = configuration()
    assert present is not None
    left = [path for path, built in zip(s.paths, s.layers, strict=True) if not built]
    claimed = claims(present, left) if left and present.has_claims else {}
    found = []
    for path, built in zip(s.paths, s.layers, strict=True):
        claim = Claim(present.lookup(built), "") if built else claimed.get(path)
        if claim is not None:
            _check_words(claim.signal, path)
        found.append(claim)
    return found


def _check_words(signal: Signal, path: str) -> None:
    """Refuse what a signal asks for and the partition does not do."""
    asked = {
        **{f"dtype.{key}": getattr(signal.dtype, key) for key in ("param", "compute", "reduce")},
        **{f"kernel.{op}": True for op, _ in signal.kernel if op != "all_reduce"},
        "output": signal.output in ("scatter", "sum"), "remat": signal.remat, "backward": signal.backward,
        "shard.workers": signal.shard is not None and signal.shard.workers is not None,
    }  # fmt: skip
    for key in (key for key, said in asked.items() if said):
        raise JShardError(
            f'signal "{signal.name}" ({signal.at(key)}) says {key}, which jshard.shard does not do yet, for {path}',
            hint=f"remove {key}, or build that layer with jshard.Linear and call the model without jshard.shard",
        )


def closed_over(jaxpr: Any) -> tuple[Any, list[Any]]:
    """The same with the arrays that it closes over as its last arguments."""
    consts = list(getattr(jaxpr, "consts", ()))
    bare = getattr(jaxpr, "jaxpr", jaxpr)
    if not consts:
        return bare, []
    return bare.replace(
        constvars=[], invars=[*bare.invars, *bare.constvars], debug_info=bare.debug_info.with_unknown_names()
    ), consts


def _given(shape: tuple[int, ...], layout: Layout | None, row: tuple[str, ...], batch: int | None) -> Axes:
    """An array on the mesh stays as it is; the first axis of what has as many rows as the batch is split by rows."""
    if layout is not None and any(layout.axes):
        return layout.axes
    if row and shape and shape[0] == batch:
        return (row, *whole(len(shape) - 1))
    return whole(len(shape))


def rows(signals: Sequence[Signal]) -> tuple[str, ...]:
    """Return the mesh axes that rows of the batch are split over: those of all signals that name any."""
    found = {signal.row: signal for signal in signals if signal.row}
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise JShardError(
            f"{one} splits rows over {'+'.join(one.row)}, and {other} over {'+'.join(other.row)}",
            hint="give both the same row: a batch is split one way",
        )
    return next(iter(found), ())


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _layout(x: Any, on: Mesh) -> Layout | None:
    found = Layout.of(x)
    return found if found is not None and found.mesh.shape == on.shape else None
