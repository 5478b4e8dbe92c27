"""A call of a function under `jshard.shard`: its arrays, their claims, and the program for such arrays."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax._src.config import trace_context
from jax._src.util import register_cache, weakref_lru_cache
from jax.core import Tracer
from jax.sharding import Mesh

from jshard.errors import JShardError
from jshard.layers.call_arguments import OUTSIDE, PARAMETER, VARIABLE, Arguments, Structure, WrittenBack
from jshard.layers.creating import realized
from jshard.layers.layer import built_arrays
from jshard.layers.linen import check_nothing_looks_like_parameters, has_params, is_callable_tree, trees_of_parameters
from jshard.layers.partition import Input, Microbatches, Program
from jshard.layers.partition.pieces import Pieces
from jshard.layers.partition.planner import whole
from jshard.layers.pipeline.numbered import PipelinedPieces
from jshard.layers.pipeline.stacked import Pipelined
from jshard.layers.program_claims import active_signals, program_claims
from jshard.layers.recording import Taken, recorder
from jshard.layers.user_code_errors import (
    check_mesh_is_known,
    check_numbers,
    check_takes_its_models,
    in_own_words,
    of_transformation,
)
from jshard.layouts.layout import Layout, check_divides
from jshard.layouts.mesh import check_in_use
from jshard.layouts.paths import slashed
from jshard.layouts.redistribution import Axes, redistribute
from jshard.programs.jaxprs import Jaxpr, Shaped, closed_over, equations
from jshard.programs.provenance import said, scope
from jshard.signals.active_config import configuration, mesh
from jshard.signals.claims import Claim
from jshard.signals.globs import ParameterPath, below
from jshard.signals.scope import entering, scopes, unplaced
from jshard.signals.signal import Signal


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Trace as for a single device: nothing inside is sharded by itself."""
    with unplaced(True), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


_programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()  # by the number in name stacks
_recent: collections.deque[Program] = collections.deque(maxlen=256)  # kept alive: JAX keeps traces with their numbers
_numbers = itertools.count()


def programs_in(jaxpr: Jaxpr) -> list[Program]:
    """Return the programs called in a trace."""
    numbers = dict.fromkeys(said(eqn.source_info.name_stack.stack, "program") for eqn in equations(jaxpr))
    return [program for number in numbers if (program := _programs.get(number)) is not None]


class Call:
    """A call of a function: its arrays, and the program for such arrays."""

    def __init__(
        self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ("params",)
    ):
        present = configuration()
        assert present is not None
        check_in_use(mesh())
        call = Arguments.of(f, args, kwargs, is_array=_is_array)
        self.structure, self.given, self.nodes = call.structure, call.given, call.nodes
        self.arrays, self.kinds, self.arguments = call.arrays, call.kinds, [path[0] for path in call.paths]
        self.trees = trees_of_parameters(call.given, names)
        described = _described(call, self.trees)
        if not any(array.path for array in described):
            check_nothing_looks_like_parameters(f, call.given, present)
        with alone():  # as in the trace, which does not depend on a mesh in use
            context = trace_context()
        s = _Situation(call.structure, described, mesh(), present.fingerprint, context, scopes())
        self.program, self.out = _program_of(f, s)
        self.described = self.out.arrays
        present.used.update(self.out.used)
        signals = (parameter.use.claim.signal for parameter in self.program.placed.values())
        present.placed.update(tuple(signal.name.split("/")) for signal in signals)

    def placed(self, *, every: bool = False) -> list[Any]:
        """Return all arrays, with parameters and Linen's variables moved to rest; with `every`, move the others too."""
        axes, recorded = iter(self.program.in_axes), recorder() if every else None
        arrays = []
        if recorded is not None:
            recorded.rows = recorded.rows or self.out.rows
        for x, argument, array in zip(self.arrays, self.arguments, self.described, strict=True):
            layout = Layout(self.program.mesh, *next(axes))
            label = f"jshard.shard ({array.path})" if array.path else "jshard.shard"
            if recorded is not None and isinstance(x, Tracer):
                x = recorded.mark(x, Taken(layout, array.dtype, self.program.placed.get(array.path)))
            if every or array.path or argument in self.trees:
                x = Taken(layout, array.dtype if array.path else None).put(x, label)
            arrays.append(x)
        return realized(arrays)

    def kept(self, placed: list[Any]) -> list[Any]:
        """Update the NNX models with the parameters among `placed`, and return the trees of parameters."""
        nnx.update((self.nodes,), self.structure.states_of(placed)[0])
        _, args, kwargs, _ = self.structure.holding(placed)
        return [x for name, x in zip(self.given, (*args, *kwargs.values()), strict=True) if name in self.trees]

    def run(self, name: str) -> Any:
        """Run the program; `name` is the function's name in errors."""
        check_mesh_is_known(self.arrays, name)
        try:
            return self._run()
        except (TraceContextError, TypeError) as error:
            if (sentence := of_transformation(error, self.arrays, name)) is None:
                raise
            raise sentence from None

    def _run(self) -> Any:
        arrays = self.placed(every=True)
        operands = self.operands(arrays)
        pairs = zip(arrays, self.arrays, self.described, strict=True)
        moved = [x for x, before, array in pairs if x is not before and array.path]
        if moved and not any(isinstance(x, Tracer) for x in moved):  # a gradient would have the old layout
            nnx.update((self.nodes,), self.structure.states_of(arrays)[0])
        with scope(program=self.out.number):
            outs = self.out.compiled(*operands)
        return self.out.written.into((self.nodes,), outs)

    def operands(self, placed: list[Any]) -> list[Any]:
        """Return the program's operands: these arrays, and the function's closed-over arrays."""
        consts = zip(self.out.consts, self.program.in_axes[len(placed) :], strict=True)
        return placed + [Taken(Layout(self.program.mesh, *a)).put(x, "jshard.shard") for x, a in consts]

    def microbatches(self, batches: Mapping[str, Any], by: Sequence[str]) -> tuple[Any, list[list[Any]]]:
        """Return the mean over `batches`, and the gradients of each argument in `by`, in the order
        of its leaves. `batches` are the arguments with an axis of microbatches before their own
        axes. Gradients are by the floating-point parameters."""
        places = list(zip(self.kinds, self.arguments, self.program.inputs, self.described, strict=False))
        smooth = [
            (kind == PARAMETER or at in self.trees) and jnp.issubdtype(x.dtype, jnp.inexact)
            for kind, at, _, x in places
        ]
        owned = [[n for n, (_, at, *_) in enumerate(places) if smooth[n] and at == each] for each in by]
        staged = [n for n, (_, at, i, _) in enumerate(places) if i.claim and i.claim.stage and at not in by]
        parameters = (*sum(owned, []), *staged)
        variables = tuple(n for n, (kind, *_) in enumerate(places) if kind == VARIABLE)
        batch = tuple(n for n, (kind, at, *_) in enumerate(places) if kind == OUTSIDE and at in batches)
        if len(self.program.jaxpr.outvars) != 1 + len(variables):
            made = len(self.program.jaxpr.outvars) - 1
            raise JShardError(
                f"the model has {len(variables)} variables before its call and {made} after it, and a microbatch passes "
                "them to the next",
                hint="make every variable when the model is built",
            )
        present = configuration()
        by_schedule = present is not None and present.pipeline is not None
        if self.program.is_in_pieces and not by_schedule:
            stage = self.program.stage
            assert stage is not None
            raise JShardError(
                f"{stage.signal} is on a stage, and a batch in microbatches goes through stages by a schedule",
                hint=f"write jshard: {{pipeline: {{axis: {stage.mesh_axis}}}, train: {{microbatches: 4}}}}",
            )
        by_pieces = _pipelined_pieces if self.program.is_in_pieces else _pipelined
        run = (by_pieces if by_schedule else _microbatches)(self.program, parameters, variables, batch).run
        xs = self.operands(self.placed(every=True))
        rows = [x for name in self.given if name in batches for x in jax.tree.leaves(batches[name]) if _is_array(x)]
        for n, x in zip(batch, rows, strict=True):
            xs[n] = Taken(Layout(self.program.mesh, (), *self.program.in_axes[n])).put(x, "jshard.shard")
        with scope(program=self.out.number):
            value, gradients, kept = run(xs)
        self.out.written.into((self.nodes,), [value, *kept])
        lay = {n: (g, Layout.of(self.arrays[n])) for n, g in zip(parameters, gradients, strict=True)}
        moved = {n: g if at is None else redistribute(g, at) for n, (g, at) in lay.items()}
        return value, [[moved[n] for n in numbers] for numbers in owned]


def _described(call: Arguments, trees: Mapping[str, Any]) -> tuple[_Array, ...]:
    """Describe each array of a call; `trees` are the trees of parameters other than NNX objects."""
    built, keys = built_arrays(call.nodes), [*call.keys, *[()] * (len(call.arrays) - len(call.keys))]
    inner = [_inner(path, x, kind, trees) for path, x, kind in zip(call.paths, call.arrays, call.kinds, strict=True)]
    led = len({path[0] for path, below in zip(call.paths, inner, strict=True) if below is not None}) > 1
    described = []
    for (argument, *words), x, kind, key, path in zip(call.paths, call.arrays, call.kinds, keys, inner, strict=True):
        check_numbers(x)
        abstract, is_own = isinstance(x, jax.ShapeDtypeStruct), kind == PARAMETER
        path = "" if path is None else ParameterPath.of(argument, path, led=led)
        described.append(_Array(
            path, built[key].signal_path if is_own else (), jnp.shape(x), x.dtype if abstract else jax.typeof(x).dtype,
            None if path else _layout(x, mesh()),
            len(words) if kind == OUTSIDE and argument not in trees and not _is_key(x) else None,
            type(call.given[argument]) if is_own else None,
        ))  # fmt: skip
    return tuple(described)


def _inner(path: Sequence[str], x: Any, kind: int, trees: Mapping[str, Any]) -> str | None:
    """Return the path of a parameter below its argument; None for other arrays."""
    argument, *words = path
    if argument not in trees:
        return (slashed(words) or None) if kind == PARAMETER else None
    tree = trees[argument]
    is_whole_number = is_callable_tree(tree) and not jnp.issubdtype(x.dtype, jnp.inexact)
    if is_whole_number or (has_params(tree) and words[0] != "params"):
        return None
    return slashed(words[1:] if has_params(tree) else words)


_microbatches = functools.lru_cache(maxsize=16)(Microbatches)
_pipelined = functools.lru_cache(maxsize=16)(Pipelined)
_pipelined_pieces = functools.lru_cache(maxsize=16)(PipelinedPieces)


@dataclasses.dataclass(frozen=True)
class _Array:
    """The description of an array of a call, a part of a trace's key."""

    path: str  # a ParameterPath; "" if it is not a parameter
    layer: tuple[str, ...]  # the signal under which its jshard layer was built
    shape: tuple[int, ...]
    dtype: Any
    layout: Layout | None  # the present layout, if it is not a parameter
    depth: int | None  # the nesting depth inside an argument; None for a model's variable
    owner: type | None  # the class of a parameter's model


class _Out:
    """The results of a trace beside the program: the write-back, the closed-over arrays and the claims."""

    written: WrittenBack
    arrays: tuple[_Array, ...]  # with parameters in their dtype at rest
    rows: tuple[str, ...] = ()  # the mesh axes that split the rows of a batch
    consts: Sequence[Any] = ()
    compiled: Any = None
    number: str = ""  # of the program
    used: Mapping[tuple[type | None, str], tuple[Signal, str]] = {}  # the claims by active signals


@dataclasses.dataclass(frozen=True)
class _Situation:
    """The key of a trace. The hash uses the arrays' names and types, because a model may hold unhashable values."""

    structure: Structure
    arrays: tuple[_Array, ...]
    mesh: Mesh
    fingerprint: Any
    context: Any  # JAX's settings, such as `jax.default_matmul_precision`, and the active signal
    scopes: tuple[str, ...]  # the names of the active signals

    def __hash__(self) -> int:
        return hash((self.arrays, self.fingerprint))


def _unsharded(f: Callable[..., Any], s: _Situation) -> tuple[Any, WrittenBack, dict[str, Claim]]:
    """Trace a function as for a single device; return its program, its write-back, and its parameters' claims."""
    written: list[WrittenBack] = []

    def of_one_device(*xs: object) -> list[Any]:
        nodes, args, kwargs, before = s.structure.holding(xs)
        result = in_own_words(f)(*args, **kwargs)
        back, flat = WrittenBack.of(result, nnx.split((nodes,), nnx.Param, nnx.Variable, ...)[1:3], before, xs)
        written.append(back)
        return flat

    with alone(), entering() as lines:
        jaxpr = jax.make_jaxpr(of_one_device)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in s.arrays))
    active = active_signals(jaxpr, [x.path if not x.layer else "" for x in s.arrays], lines, s.scopes)
    parameters = [x for x in s.arrays if x.path]
    layers, owners = {x.path: x.layer for x in parameters}, {x.path: x.owner for x in parameters}
    return jaxpr, written[-1], program_claims(layers, owners, active)


def _at_rest(array: _Array, claimed: Mapping[str, Claim]) -> _Array:
    """Return the array's description, for a parameter in its signal's dtype at rest."""
    dtype = claimed[array.path].signal.dtype.param if array.path in claimed else None
    if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return dataclasses.replace(array, dtype=jnp.dtype(dtype))


def _traced(f: Callable[..., Any], s: _Situation) -> tuple[Program, _Out]:
    check_takes_its_models(f)
    out = _Out()
    jaxpr, out.written, claimed = _unsharded(f, s)
    out.arrays = tuple(_at_rest(x, claimed) for x in s.arrays)
    if out.arrays != s.arrays:  # use the program for arrays in their dtypes at rest
        return _program_of(f, dataclasses.replace(s, arrays=out.arrays))
    by_use: dict[tuple[type | None, str], list[Claim]] = {}
    for x in s.arrays:
        if x.owner is not None and x.path in claimed and claimed[x.path].line:
            by_use.setdefault((x.owner, below(x.path)), []).append(claimed[x.path])
    # two models of one class under two signals give no claim for a third model
    out.used = {
        key: (first.signal, first.line)
        for key, (first, *others) in by_use.items()
        if all(claim.signal == first.signal for claim in others)
    }
    signals = [claim.signal for claim in claimed.values()]
    row, ring = agreed(signals, "row"), agreed(signals, "ring")
    # the batch is the least nested array; deeper arrays, such as statistics, may have another first axis
    depths = [x.depth for x in s.arrays if x.depth is not None and x.shape]
    batch = next((x.shape[0] for x in s.arrays if x.shape and depths and x.depth == min(depths)), None)
    of_batch = (x.shape for x in s.arrays if x.depth is not None and x.shape[:1] == (batch,))
    length = next((shape[1] for shape in of_batch if shape[1:]), 1)
    if ring and length > 1:
        signal = next(signal for signal in signals if signal.ring)
        check_divides(length, ring, s.mesh, label=signal.label("ring"), what=f"{length} places of each row")

    def lead(array: _Array) -> Axes:
        """Return the mesh axes of the first axes of a batch's array: rows, and places."""
        if array.depth is None or array.shape[:1] != (batch,):
            return ()
        if row and (array.layout is None or not array.layout.mesh_axes):
            signal = next(signal for signal in signals if signal.row)
            check_divides(array.shape[0], row, s.mesh, label=signal.label("row"), what=f"{batch} rows")
        return (row, ring) if length > 1 and array.shape[1:2] == (length,) else (row,)

    inputs = [
        Input(whole(len(x.shape)), claimed.get(x.path), x.path) if x.path
        else Input(_given(x.shape, x.layout, lead(x)))
        for x in s.arrays
    ]  # fmt: skip
    jaxpr, out.consts = closed_over(jaxpr)
    inputs += [Input(_given(np.shape(x), _layout(x, s.mesh), ())) for x in out.consts]
    program = Program(s.mesh, jaxpr, inputs, returns_to=out.written.returns_to)
    out.compiled = jax.jit(Pieces(program) if program.is_in_pieces else program)
    out.rows, out.number = row, str(next(_numbers))
    _programs[out.number] = program
    _recent.append(program)
    return program, out


# Traces are cached: for a function during its lifetime, for methods the last 256.
_of_function = weakref_lru_cache(_traced, maxsize=None, trace_context_in_key=False)
_of_method = functools.lru_cache(256)(_traced)
# jax.clear_caches() must clear these too; JAX has no public name for this.
for cache in (_of_method, _microbatches, _pipelined, _pipelined_pieces):
    register_cache(cache, "jshard.shard")


def _program_of(f: Callable[..., Any], s: _Situation) -> tuple[Program, _Out]:
    return (_of_function if isinstance(f, types.FunctionType) else _of_method)(f, s)


def _given(shape: tuple[int, ...], layout: Layout | None, lead: Axes) -> Axes:
    """Return an input's axes: its own, with places split over the ring, if it is sharded, else `lead`."""
    have = whole(len(shape)) if layout is None else layout.axes
    if not any(have):
        return (*lead, *whole(len(shape) - len(lead)))
    return (have[0], *lead[1:], *have[2:]) if lead[1:] and not any(have[1:]) else have


def agreed(signals: Sequence[Signal], key: str) -> tuple[str, ...]:
    """Return the mesh axes of `row`, or `ring`, on which all signals with this key agree."""
    by_axes = {signal.axes(key): signal for signal in signals if signal.axes(key)}
    if len(by_axes) > 1:
        one, other = list(by_axes.values())[:2]
        what = {"row": "rows", "ring": "places"}[key]
        raise JShardError(
            f"{one} splits {what} over {'+'.join(one.axes(key))}, and {other} over {'+'.join(other.axes(key))}",
            hint=f"give both the same {key}: a batch is split one way",
        )
    return next(iter(by_axes), ())


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _is_key(x: Shaped) -> bool:
    """Return True for a `jax.random.PRNGKey`, whose two numbers are not rows."""
    return x.shape == (2,) and x.dtype == np.uint32


def _layout(x: jax.Array, on: Mesh) -> Layout | None:
    layout = Layout.of(x)
    return layout if layout is not None and layout.mesh.shape == on.shape else None
