"""One call of a function that `jshard.shard` runs: its arrays, what claims them, and the program for arrays like these."""

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
    """Trace as if there were one device: what is sharded inside is part of the same program."""
    with unplaced(True), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


_programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()  # by the number in name stacks
_recent: collections.deque[Program] = collections.deque(maxlen=256)  # alive, as JAX keeps traces that say their numbers
_numbers = itertools.count()


def programs_in(jaxpr: Jaxpr) -> list[Program]:
    """Return the programs that a trace calls. Calls outside the trace change nothing."""
    numbers = dict.fromkeys(said(eqn.source_info.name_stack.stack, "program") for eqn in equations(jaxpr))
    return [program for number in numbers if (program := _programs.get(number)) is not None]


class Call:
    """One call of a function: its arrays, and the program for arrays like these."""

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
        if not any(each.path for each in described):
            check_nothing_looks_like_parameters(f, call.given, present)
        with alone():  # as it is traced: a mesh that is in use is none of it
            context = trace_context()
        s = _Situation(call.structure, described, mesh(), present.fingerprint, context, scopes())
        self.program, self.out = _program_of(f, s)
        self.described = self.out.arrays
        present.used.update(self.out.used)
        present.placed.update(tuple(each.use.claim.signal.name.split("/")) for each in self.program.placed.values())

    def placed(self, *, every: bool = False) -> list[Any]:
        """All arrays: parameters, and Linen's other variables, where they rest; with `every`, all others where the program
        takes them."""
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
        """Give NNX models the parameters among these arrays, and return the trees of parameters with theirs."""
        nnx.update((self.nodes,), self.structure.states_of(placed)[0])
        _, args, kwargs, _ = self.structure.holding(placed)
        return [x for name, x in zip(self.given, (*args, *kwargs.values()), strict=True) if name in self.trees]

    def run(self, name: str) -> Any:
        """Run the program; `name` is the function's, in errors."""
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
        if moved and not any(isinstance(x, Tracer) for x in moved):  # a gradient would lie as the parameter did before
            nnx.update((self.nodes,), self.structure.states_of(arrays)[0])
        with scope(program=self.out.number):
            outs = self.out.compiled(*operands)
        return self.out.written.into((self.nodes,), outs)

    def operands(self, placed: list[Any]) -> list[Any]:
        """What the program takes: these arrays, and those that the function closes over."""
        consts = zip(self.out.consts, self.program.in_axes[len(placed) :], strict=True)
        return placed + [Taken(Layout(self.program.mesh, *a)).put(x, "jshard.shard") for x, a in consts]

    def microbatches(self, batches: Mapping[str, Any], by: Sequence[str]) -> tuple[Any, list[list[Any]]]:
        """Return the mean over `batches`, arguments with an axis of microbatches before their own, and the gradients by the
        floating-point parameters of each argument in `by`, in the order of its leaves."""
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
                f"the model has {len(variables)} variables before its call and {made} behind it, and microbatches hand them "
                "from one microbatch to the next",
                hint="make every variable when the model is built",
            )
        present = configuration()
        by_schedule = present is not None and present.pipeline is not None
        if self.program.pieces is not None and not by_schedule:
            stage = self.program.stage
            assert stage is not None
            raise JShardError(
                f"{stage.signal} is on a stage, and a batch in microbatches goes through stages by a schedule",
                hint=f"write jshard: {{pipeline: {{axis: {stage.mesh_axis}}}, train: {{microbatches: 4}}}}",
            )
        by_pieces = _pipelined_pieces if self.program.pieces is not None else _pipelined
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
    """Describe each array of a call; `trees` are the arguments that hold parameters, and are no NNX objects."""
    built, keys = built_arrays(call.nodes), [*call.keys, *[()] * (len(call.arrays) - len(call.keys))]
    inner = [_inner(path, x, kind, trees) for path, x, kind in zip(call.paths, call.arrays, call.kinds, strict=True)]
    led = len({path[0] for path, each in zip(call.paths, inner, strict=True) if each is not None}) > 1
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
    """The path of a parameter below its argument; None of what is no parameter."""
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
    """What a program is traced for, of one array of a call."""

    path: str  # a ParameterPath; "" of all that is no parameter
    layer: tuple[str, ...]  # the signal that a layer of jshard around it was built under
    shape: tuple[int, ...]
    dtype: Any
    layout: Layout | None  # where it lies, if it is no parameter
    depth: int | None  # how deep inside an argument it was found; None for what is a model's own
    owner: type | None  # the class of the model that a parameter is in


class _Out:
    """What a traced function returns, beside arrays; the arrays that it closes over; and what it claims."""

    written: WrittenBack
    arrays: tuple[_Array, ...]  # as the program takes them: parameters in their dtype at rest
    rows: tuple[str, ...] = ()  # the mesh axes that split the rows of a batch
    consts: Sequence[Any] = ()
    compiled: Any = None
    number: str = ""  # of the program
    used: Mapping[tuple[type | None, str], tuple[Signal, str]] = {}  # the claims by active signals


@dataclasses.dataclass(frozen=True)
class _Situation:
    """All that a program is traced for. A model may hold what has no hash: its arrays' names and types have to do."""

    structure: Structure
    arrays: tuple[_Array, ...]
    mesh: Mesh
    fingerprint: Any
    context: Any  # what JAX was told, as by `jax.default_matmul_precision`, and the active signal
    scopes: tuple[str, ...]  # the names of the active signals

    def __hash__(self) -> int:
        return hash((self.arrays, self.fingerprint))


def _unsharded(f: Callable[..., Any], s: _Situation) -> tuple[Any, WrittenBack, dict[str, Claim]]:
    """Trace a function as for one device, and return its program, what it writes back, and the claims of its parameters."""
    written: list[WrittenBack] = []

    def of_one_device(*xs: object) -> list[Any]:
        nodes, args, kwargs, before = s.structure.holding(xs)
        result = in_own_words(f)(*args, **kwargs)
        back, flat = WrittenBack.of(result, nnx.split((nodes,), nnx.Param, nnx.Variable, ...)[1:3], before, xs)
        written.append(back)
        return flat

    with alone(), entering() as lines:
        jaxpr = jax.make_jaxpr(of_one_device)(*(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in s.arrays))
    active = active_signals(jaxpr, [each.path if not each.layer else "" for each in s.arrays], lines, s.scopes)
    parameters = [each for each in s.arrays if each.path]
    layers, owners = {each.path: each.layer for each in parameters}, {each.path: each.owner for each in parameters}
    return jaxpr, written[-1], program_claims(layers, owners, active)


def _at_rest(array: _Array, claimed: Mapping[str, Claim]) -> _Array:
    """The array, if it is a parameter in the dtype that its signal says it rests in."""
    dtype = claimed[array.path].signal.dtype.param if array.path in claimed else None
    if dtype is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return dataclasses.replace(array, dtype=jnp.dtype(dtype))


def _traced(f: Callable[..., Any], s: _Situation) -> tuple[Program, _Out]:
    check_takes_its_models(f)
    out = _Out()
    jaxpr, out.written, claimed = _unsharded(f, s)
    out.arrays = tuple(_at_rest(each, claimed) for each in s.arrays)
    if out.arrays != s.arrays:  # the program that takes them as they rest
        return _program_of(f, dataclasses.replace(s, arrays=out.arrays))
    by_use: dict[tuple[type | None, str], list[Claim]] = {}
    for each in s.arrays:
        if each.owner is not None and each.path in claimed and claimed[each.path].line:
            by_use.setdefault((each.owner, below(each.path)), []).append(claimed[each.path])
    # two models of one class that are used under two signals leave none for a third
    out.used = {
        key: (first.signal, first.line)
        for key, (first, *others) in by_use.items()
        if all(claim.signal == first.signal for claim in others)
    }
    signals = [claim.signal for claim in claimed.values()]
    row, ring = agreed(signals, "row"), agreed(signals, "ring")
    # a batch is an argument, or in one; what lies deeper, as statistics, may have another first axis
    depths = [each.depth for each in s.arrays if each.depth is not None and each.shape]
    batch = next((each.shape[0] for each in s.arrays if each.shape and depths and each.depth == min(depths)), None)
    of_batch = (each.shape for each in s.arrays if each.depth is not None and each.shape[:1] == (batch,))
    length = next((shape[1] for shape in of_batch if shape[1:]), 1)
    if ring and length > 1:
        signal = next(signal for signal in signals if signal.ring)
        check_divides(length, ring, s.mesh, label=signal.label("ring"), what=f"{length} places of each row")

    def lead(array: _Array) -> Axes:
        """How the first axes of a batch's arrays are split: rows, and places."""
        if array.depth is None or array.shape[:1] != (batch,):
            return ()
        if row and (array.layout is None or not array.layout.mesh_axes):
            signal = next(signal for signal in signals if signal.row)
            check_divides(array.shape[0], row, s.mesh, label=signal.label("row"), what=f"{batch} rows")
        return (row, ring) if length > 1 and array.shape[1:2] == (length,) else (row,)

    inputs = [
        Input(whole(len(each.shape)), claimed.get(each.path), each.path) if each.path
        else Input(_given(each.shape, each.layout, lead(each)))
        for each in s.arrays
    ]  # fmt: skip
    jaxpr, out.consts = closed_over(jaxpr)
    inputs += [Input(_given(np.shape(x), _layout(x, s.mesh), ())) for x in out.consts]
    program = Program(s.mesh, jaxpr, inputs, returns_to=out.written.returns_to)
    out.compiled, out.rows, out.number = jax.jit(program), row, str(next(_numbers))
    _programs[out.number] = program
    _recent.append(program)
    return program, out


# Traces are kept: of a function as long as it lives; of a method, the last 256.
_of_function = weakref_lru_cache(_traced, maxsize=None, trace_context_in_key=False)
_of_method = functools.lru_cache(256)(_traced)
# jax.clear_caches() clears these too, as it does JAX's own above: JAX has no public name for that.
for each in (_of_method, _microbatches, _pipelined, _pipelined_pieces):
    register_cache(each, "jshard.shard")


def _program_of(f: Callable[..., Any], s: _Situation) -> tuple[Program, _Out]:
    return (_of_function if isinstance(f, types.FunctionType) else _of_method)(f, s)


def _given(shape: tuple[int, ...], layout: Layout | None, lead: Axes) -> Axes:
    """An array on the mesh stays as it is, but that places are split over the ring; the first axes of others are `lead`."""
    have = whole(len(shape)) if layout is None else layout.axes
    if not any(have):
        return (*lead, *whole(len(shape) - len(lead)))
    return (have[0], *lead[1:], *have[2:]) if lead[1:] and not any(have[1:]) else have


def agreed(signals: Sequence[Signal], key: str) -> tuple[str, ...]:
    """Return the mesh axes that `row`, or places by `ring`, of the batch are split over: those of all signals that name any."""
    found = {signal.axes(key): signal for signal in signals if signal.axes(key)}
    if len(found) > 1:
        one, other = list(found.values())[:2]
        what = {"row": "rows", "ring": "places"}[key]
        raise JShardError(
            f"{one} splits {what} over {'+'.join(one.axes(key))}, and {other} over {'+'.join(other.axes(key))}",
            hint=f"give both the same {key}: a batch is split one way",
        )
    return next(iter(found), ())


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _is_key(x: Shaped) -> bool:
    """The two numbers of a `jax.random.PRNGKey` are no rows."""
    return x.shape == (2,) and x.dtype == np.uint32


def _layout(x: jax.Array, on: Mesh) -> Layout | None:
    found = Layout.of(x)
    return found if found is not None and found.mesh.shape == on.shape else None
