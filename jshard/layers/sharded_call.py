"""One call of a function that `jshard.shard` runs: its arrays, what claims them, and the program for arrays like these."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
from jshard.jaxprs import equations
from jshard.layers.active_signals import active_signals
from jshard.layers.layer import built_arrays
from jshard.layers.linen import (
    Argument,
    argument_names,
    arguments,
    check_nothing_looks_like_parameters,
    has_params,
    is_callable_tree,
    replaced,
    trees_of_parameters,
)
from jshard.layers.partition import Input, Microbatches, Program
from jshard.layers.partition.part import whole
from jshard.layers.pipeline import Pipelined, PipelinedPieces
from jshard.layers.program_claims import program_claims
from jshard.layers.recording import Taken, recorder
from jshard.layers.roles import Placed
from jshard.layers.uncreated import created
from jshard.layers.user_code_errors import check_mesh_is_known, check_numbers, in_own_words, of_transformation
from jshard.layers.written_back import WrittenBack, arrays_of_variables
from jshard.layouts.layout import Layout, check_divides
from jshard.layouts.mesh import check_in_use
from jshard.layouts.paths import keys_of, slashed, words_of
from jshard.layouts.redistribution import Axes, redistribute
from jshard.provenance import said, scope
from jshard.signals.active_config import configuration, mesh
from jshard.signals.claims import Claim
from jshard.signals.parameter_path import ParameterPath, below
from jshard.signals.scope import entering, scopes, unplaced
from jshard.signals.signal import Signal


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Trace as if there were one device: what is sharded inside is part of the same program."""
    with unplaced(True), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


_programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()  # by the number in name stacks
_numbers = itertools.count()


def placements(jaxpr: Any) -> dict[str, Placed]:
    """Return how parameters lie, by path, in the programs that a trace calls. Calls outside the trace change nothing."""
    numbers = dict.fromkeys(said(eqn.source_info.name_stack.stack, "program") for eqn in equations(jaxpr))
    programs = filter(None, map(_programs.get, numbers))
    return {path: placed for program in programs for path, placed in program.placed.items()}


class Call:
    """One call of a function: its arrays, and the program for arrays like these."""

    def __init__(
        self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ("params",)
    ):
        present = configuration()
        assert present is not None
        check_in_use(mesh())
        self.args = args, kwargs
        self.trees = trees_of_parameters(f, args, kwargs, names)
        self.graphdef, *states = nnx.split(replaced(self.args, dict.fromkeys(self.trees)), nnx.Param, nnx.Variable, ...)
        named, self.tree = jax.tree_util.tree_flatten_with_path((list(self.trees.values()), *states))
        self.leaves = [leaf for _, leaf in named]
        called = argument_names(f, args, kwargs)
        inner = [self._inner(key, x) if _is_array(x) else None for key, x in named]
        holders = [self._argument(key) for (key, _), path in zip(named, inner, strict=True) if path is not None]
        of = lambda key, path: ParameterPath.of(called[self._argument(key)], path, led=len({*holders}) > 1)
        paths = ["" if path is None else of(key, path) for (key, _), path in zip(named, inner, strict=True)]
        self.kinds = [key[0].idx for key, x in named if _is_array(x)]
        self.arguments = [self._argument(key) for key, x in named if _is_array(x)]
        built = {
            (_PARAMETERS, *of, *path): each.signal_path
            for of, _, x in arguments(f, args, kwargs)
            for path, each in (built_arrays(x) if isinstance(x, nnx.Module) else {}).items()
        }
        self.arrays = tuple(
            self._array(key, path, built.get(keys_of(key), ()), x) if _is_array(x) else None
            for (key, x), path in zip(named, paths, strict=True)
        )
        if not any(each is not None and each.path for each in self.arrays):
            check_nothing_looks_like_parameters(f, args, kwargs, present)
        static = tuple(x if each is None else None for x, each in zip(self.leaves, self.arrays, strict=True))
        with alone():  # as it is traced: a mesh that is in use is none of it
            context = trace_context()
        situation = _Situation(
            self.graphdef, self.tree, tuple(self.trees), static, tuple(filter(None, self.arrays)), mesh(),
            present.fingerprint, context, scopes(), tuple(called[each] for each in dict.fromkeys(holders)),
        )  # fmt: skip
        # what was traced before is kept: of a function as long as it lives, with what it closes over; of a method, the last 256
        is_function = isinstance(f, types.FunctionType)
        if any(signal.dtype.param for signal in present.signals.values()):
            arrays = iter((_rest_of_function if is_function else _rest_of_method)(f, situation))
            self.arrays = tuple(None if each is None else next(arrays) for each in self.arrays)
            situation = dataclasses.replace(situation, arrays=tuple(filter(None, self.arrays)))
        self.program, self.out = (_of_function if is_function else _of_method)(f, situation)
        present.used.update(self.out.used)
        present.placed.update(tuple(each.use.claim.signal.name.split("/")) for each in self.program.placed.values())

    def _argument(self, key: Any) -> Argument:
        """The argument that a leaf is in."""
        return list(self.trees)[key[1].idx] if key[0].idx == _TREES else keys_of(key)[1:3]

    def _inner(self, key: Any, x: Any) -> str | None:
        """The path of a parameter below its argument; None of what is no parameter."""
        kind, words = key[0].idx, words_of(key)
        if kind == _TREES:
            tree = self.trees[self._argument(key)]
            is_whole_number = is_callable_tree(tree) and not jnp.issubdtype(x.dtype, jnp.inexact)
            if is_whole_number or (has_params(tree) and words[2] != "params"):
                return None
            return slashed(words[3:] if has_params(tree) else words[2:])
        return (slashed(words[3:]) or None) if kind == _PARAMETERS else None

    def _array(self, key: Any, path: str, layer: tuple[str, ...], x: Any) -> _Array:
        kind, words = key[0].idx, words_of(key)
        abstract = isinstance(x, jax.ShapeDtypeStruct)
        depth = len(words) if kind == _REST and not _is_key(x) else None
        check_numbers(x)
        dtype = x.dtype if abstract else jax.typeof(x).dtype
        layout = None if path or abstract else _layout(x, mesh())
        _, *of = keys_of(key)[:3]
        owner = type(self.args[of[0]][of[1]]) if kind == _PARAMETERS else None
        return _Array(path, layer, jnp.shape(x), dtype, layout, depth, owner)

    def placed(self, *, every: bool = False) -> list[Any]:
        """All leaves: parameters, and Linen's other variables, where they rest; with `every`, all others where the program
        takes them."""
        axes, held = iter(self.program.in_axes), len(jax.tree.leaves(list(self.trees.values())))
        leaves, recorded = [], recorder() if every else None
        if recorded is not None:
            recorded.rows = recorded.rows or self.out.rows
        for number, (x, array) in enumerate(zip(self.leaves, self.arrays, strict=True)):
            if array is not None:
                layout = Layout(self.program.mesh, *next(axes))
                label = f"jshard.shard ({array.path})" if array.path else "jshard.shard"
                if recorded is not None and isinstance(x, Tracer):
                    x = recorded.mark(x, Taken(layout, array.dtype, self.program.placed.get(array.path)))
                if every or array.path or number < held:
                    x = Taken(layout, array.dtype if array.path else None).put(x, label)
            leaves.append(x)
        return created(leaves)

    def trees_of(self, placed: list[Any]) -> list[Any]:
        """The trees of parameters among these leaves."""
        return jax.tree.unflatten(self.tree, placed)[_TREES]

    def keep(self, placed: list[Any]) -> None:
        """Give NNX models these parameters."""
        nnx.update(self.args, jax.tree.unflatten(self.tree, placed)[_PARAMETERS])

    def run(self, name: str) -> Any:
        """Run the program; `name` is the function's, in errors."""
        check_mesh_is_known(self.leaves, name)
        try:
            return self._run()
        except (TraceContextError, TypeError) as error:
            if (sentence := of_transformation(error, self.leaves, name)) is None:
                raise
            raise sentence from None

    def _run(self) -> Any:
        leaves = self.placed(every=True)
        operands = self.operands(leaves)
        self.program.find_out_axes(self.out.compiled, operands)
        pairs = zip(leaves, self.leaves, self.arrays, strict=True)
        moved = [x for x, before, array in pairs if x is not before and array is not None and array.path]
        if moved and not any(isinstance(x, Tracer) for x in moved):  # a gradient would lie as the parameter did before
            self.keep(leaves)
        with scope(program=self.out.number):
            outs = self.out.compiled(*operands)
        return self.ended(outs)

    def operands(self, placed: list[Any]) -> list[Any]:
        """What the program takes: the arrays among these leaves, and those that the function closes over."""
        arrays = [x for x, array in zip(placed, self.arrays, strict=True) if array is not None]
        axes = self.program.in_axes[len(arrays) :]
        consts = zip(self.out.consts, axes, strict=True)
        return arrays + [Taken(Layout(self.program.mesh, *a)).put(x, "jshard.shard") for x, a in consts]

    def ended(self, outs: Sequence[Any]) -> Any:
        """Give NNX models the variables that the program leaves, and return its result."""
        return self.out.written.into(self.args, outs)

    def microbatches(self, batches: Mapping[Argument, Any], by: Sequence[Argument]) -> tuple[Any, list[list[Any]]]:
        """Return the mean over `batches`, arguments with an axis of microbatches before their own, and the gradients by the
        floating-point parameters of each argument in `by`, in the order of its leaves."""
        places = list(zip(self.kinds, self.arguments, self.program.inputs, filter(None, self.arrays), strict=False))
        smooth = [kind <= _PARAMETERS and jnp.issubdtype(x.dtype, jnp.inexact) for kind, _, _, x in places]
        owned = [[n for n, (_, at, *_) in enumerate(places) if smooth[n] and at == each] for each in by]
        staged = [n for n, (_, at, i, _) in enumerate(places) if i.claim and i.claim.stage and at not in by]
        parameters = (*sum(owned, []), *staged)
        variables = tuple(n for n, (kind, *_) in enumerate(places) if kind == _STATE)
        batch = tuple(n for n, (kind, at, *_) in enumerate(places) if kind == _REST and at in batches)
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
        self.program.find_out_axes()
        run = (by_pieces if by_schedule else _microbatches)(self.program, parameters, variables, batch).run
        xs = self.operands(self.placed(every=True))
        given = [x for x in self.leaves if _is_array(x)]
        rows = nnx.split(replaced(self.args, {**dict.fromkeys(self.arguments), **batches}), nnx.Variable, ...)[2]
        for n, x in zip(batch, filter(_is_array, jax.tree.leaves(rows)), strict=True):
            xs[n] = Taken(Layout(self.program.mesh, (), *self.program.in_axes[n])).put(x, "jshard.shard")
        with scope(program=self.out.number):
            value, gradients, kept = run(xs)
        self.ended([value, *kept])
        lay = {n: (g, Layout.of(given[n])) for n, g in zip(parameters, gradients, strict=True)}
        moved = {n: g if at is None else redistribute(g, at) for n, (g, at) in lay.items()}
        return value, [[moved[n] for n in numbers] for numbers in owned]


_microbatches = functools.lru_cache(maxsize=16)(Microbatches)
_pipelined = functools.lru_cache(maxsize=16)(Pipelined)
_pipelined_pieces = functools.lru_cache(maxsize=16)(PipelinedPieces)


def described_call(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ("params",)
) -> Call:
    """A call whose arguments may be `jax.ShapeDtypeStruct`s. These are traced, as Flax would take them for constants; models
    and trees of parameters are not."""
    kept = {(0, at): x for at, x in enumerate(args) if isinstance(x, nnx.Module)}
    kept |= trees_of_parameters(f, args, kwargs, names)
    leaves, tree = jax.tree.flatten(replaced((args, kwargs), dict.fromkeys(kept)))
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    calls: list[Call] = []

    def call(given: list[Any]) -> None:
        it = iter(given)
        rest = jax.tree.unflatten(tree, [next(it) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves])
        calls.append(Call(f, *replaced(rest, kept), names))

    jax.eval_shape(call, shapes)
    return calls[0]


_TREES, _PARAMETERS, _STATE, _REST = range(4)  # what a call is split into; the last three are of NNX


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
    rows: tuple[str, ...] = ()  # the mesh axes that split the rows of a batch
    consts: Sequence[Any] = ()
    compiled: Any = None
    number: str = ""  # of the program
    used: Mapping[tuple[type | None, str], tuple[Signal, str]] = {}  # the claims by active signals


@dataclasses.dataclass(frozen=True)
class _Situation:
    """All that a program is traced for. A model may hold what has no hash: its arrays' names and types have to do."""

    graphdef: Any
    tree: Any
    trees: tuple[Argument, ...]
    static: tuple[Any, ...]  # the leaves that are no arrays
    arrays: tuple[_Array, ...]
    mesh: Mesh
    fingerprint: Any
    context: Any  # what JAX was told, as by `jax.default_matmul_precision`, and the active signal
    scopes: tuple[str, ...]  # the names of the active signals
    holders: tuple[str, ...]  # the arguments that hold parameters

    def __hash__(self) -> int:
        return hash((self.arrays, self.fingerprint))


def _unsharded(f: Callable[..., Any], s: _Situation) -> tuple[Any, WrittenBack, dict[str, Claim]]:
    """Trace a function as for one device, and return its program, what it writes back, and the claims of its parameters."""
    written: list[WrittenBack] = []

    def of_one_device(*xs: Any) -> list[Any]:
        it = iter(xs)
        given, *states = jax.tree.unflatten(s.tree, [next(it) if x is None else x for x in s.static])
        before = arrays_of_variables(states[:2])
        merged = nnx.merge(s.graphdef, *states)
        args, kwargs = replaced(merged, dict(zip(s.trees, given, strict=True)))
        result = in_own_words(f)(*args, **kwargs)
        back, flat = WrittenBack.of(result, nnx.split(merged, nnx.Param, nnx.Variable, ...)[1:3], before, xs)
        written.append(back)
        return flat

    with alone(), entering() as lines:
        jaxpr = jax.make_jaxpr(of_one_device)(*(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in s.arrays))
    active = active_signals(jaxpr, [each.path if not each.layer else "" for each in s.arrays], lines, s.scopes)
    parameters = [each for each in s.arrays if each.path]
    layers, owners = {each.path: each.layer for each in parameters}, {each.path: each.owner for each in parameters}
    return jaxpr, written[-1], program_claims(layers, owners, active)


def _at_rest(f: Callable[..., Any], s: _Situation) -> tuple[_Array, ...]:
    """The arrays, with parameters in the dtype that their signals say they rest in."""
    *_, claimed = _unsharded(f, s)
    dtype_of = {path: claim.signal.dtype.param for path, claim in claimed.items() if claim.signal.dtype.param}

    def at_rest(array: _Array) -> _Array:
        if array.path not in dtype_of or not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        return dataclasses.replace(array, dtype=jnp.dtype(dtype_of[array.path]))

    return tuple(map(at_rest, s.arrays))


def _traced(f: Callable[..., Any], s: _Situation) -> tuple[Program, _Out]:
    check_takes_its_models(f)
    out = _Out()
    jaxpr, out.written, claimed = _unsharded(f, s)
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
        label, what = f'signal "{signal.name}" ({signal.at("ring")})', f"{length} places of each row"
        check_divides(length, ring, s.mesh, label=label, what=what)

    def lead(array: _Array) -> Axes:
        """How the first axes of a batch's arrays are split: rows, and places."""
        if array.depth is None or array.shape[:1] != (batch,):
            return ()
        if row and (array.layout is None or not array.layout.mesh_axes):
            signal = next(signal for signal in signals if signal.row)
            label = f'signal "{signal.name}" ({signal.at("row")})'
            check_divides(array.shape[0], row, s.mesh, label=label, what=f"{batch} rows")
        return (row, ring) if length > 1 and array.shape[1:2] == (length,) else (row,)

    inputs = [
        Input(whole(len(each.shape)), claimed.get(each.path), each.path) if each.path
        else Input(_given(each.shape, each.layout, lead(each)))
        for each in s.arrays
    ]  # fmt: skip
    jaxpr, out.consts = closed_over(jaxpr)
    inputs += [Input(_given(np.shape(x), _layout(x, s.mesh), ())) for x in out.consts]
    program = Program(s.mesh, jaxpr, inputs, is_called=True, returns_to=out.written.returns_to)
    out.compiled, out.rows, out.number = jax.jit(program), row, str(next(_numbers))
    _programs[out.number] = program
    return program, out


_of_function, _of_method = (
    weakref_lru_cache(_traced, maxsize=None, trace_context_in_key=False),
    functools.lru_cache(256)(_traced),
)
_rest_of_function = weakref_lru_cache(_at_rest, maxsize=None, trace_context_in_key=False)
_rest_of_method = functools.lru_cache(256)(_at_rest)
# jax.clear_caches() clears these too, as it does JAX's own above: JAX has no public name for that.
for each in (_of_method, _rest_of_method, _microbatches, _pipelined, _pipelined_pieces):
    register_cache(each, "jshard.shard")


def check_takes_its_models(f: Callable[..., Any]) -> None:
    """Refuse a model that a function only closes over: its parameters would be constants, and stay what they are now."""
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


def closed_over(jaxpr: Any) -> tuple[Any, list[Any]]:
    """The same with the arrays that it closes over as its last arguments."""
    consts = list(getattr(jaxpr, "consts", ()))
    bare = getattr(jaxpr, "jaxpr", jaxpr)
    if not consts:
        return bare, []
    return bare.replace(
        constvars=[], invars=[*bare.invars, *bare.constvars], debug_info=bare.debug_info.with_unknown_names()
    ), consts


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


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _is_key(x: Any) -> bool:
    """The two numbers of a `jax.random.PRNGKey` are no rows."""
    return x.shape == (2,) and x.dtype == np.uint32


def _layout(x: Any, on: Mesh) -> Layout | None:
    found = Layout.of(x)
    return found if found is not None and found.mesh.shape == on.shape else None
