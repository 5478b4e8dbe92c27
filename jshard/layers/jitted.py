"""`jshard.jit`: compile a function over the mesh, with models and optimizers sharded by their signals."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax._src.config import trace_context
from jax.core import Tracer

from jshard.errors import JShardError
from jshard.layers.call_arguments import PARAMETER, Arguments, Path, WrittenBack, is_array
from jshard.layers.call_cache import Snapshot, names, take
from jshard.layers.creating import Uncreated, realized
from jshard.layers.layer import built_arrays, is_by_layers
from jshard.layers.recording import Taken, recording
from jshard.layers.sharding import as_sharded, check_program, shard
from jshard.layers.user_code_errors import boundary, check_takes_its_models, in_own_words
from jshard.layouts.layout import Layout
from jshard.layouts.paths import slashed, words_of
from jshard.layouts.redistribution import redistribute, replicated
from jshard.runs import events
from jshard.signals.active_config import configuration, mesh, use_stages
from jshard.signals.scope import entering, unplaced


def jit(
    f: Callable[..., Any] | None = None,
    *,
    donate: bool = False,
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Compile a function of models, optimizers, parameters and arrays to a single program over the loaded mesh.

    The first call traces `f` abstractly, reads the parameters' shardings at rest, and moves NNX models and optimizers there;
    an optimizer's state is sharded like its parameters. Linen variables, TrainStates, Equinox modules and other trees are
    returned in these shardings. A call with the same shapes compiles nothing. Inside, `jshard.value_and_grad` differentiates
    a partitioned loss. A function without calls of jshard is partitioned as a whole. Without a configuration nothing is moved.

        @jshard.jit
        def step(model, optimizer, x, y):
            loss, gradients = jshard.value_and_grad(loss_fn)(model, x, y)
            optimizer.update(model, gradients)
            return loss

    `donate` reuses the memory of models, optimizers and trees of parameters for their updates. Arguments named in
    `static_argnames` are static. The result has `.lower(...)`, as of `jax.jit`.
    """
    if f is None:
        return functools.partial(jit, donate=donate, static_argnames=static_argnames)
    check_program("jshard.jit", f)
    static = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    return _jitted(in_own_words(f), static, donate=donate)


def _jitted(f: Callable[..., Any], static: Sequence[str], *, donate: bool) -> Callable[..., Any]:
    """Return `f` compiled once for each structure and shapes of its arguments."""
    programs: dict[Any, JittedProgram] = {}

    def compiled_for(arguments: Arguments) -> JittedProgram:
        before, types = (arguments.structure, trace_context()), tuple(map(_type, arguments.arrays))
        if (*before, types) not in programs:
            if programs and events.listeners:
                shapes = ", ".join(jax.typeof(x).str_short() for x in arguments.arrays[arguments.in_nodes :])
                events.tell("compiles_again", program=getattr(f, "__name__", "a function"), shapes=shapes)
            use_stages()
            if configuration() is not None:
                check_takes_its_models(f)
            program = JittedProgram(f, arguments, donate=donate)
            at_rest = tuple(map(_type, program.placed(list(map(_shape, arguments.arrays)))))
            programs[*before, types] = programs[*before, at_rest] = program
        return programs[*before, types]

    snapshots: dict[tuple[int | None, ...], Snapshot] = {}

    @boundary
    @functools.wraps(f)
    def call(*args: object, **kwargs: object) -> Any:
        if unplaced.value:
            return f(*args, **kwargs)
        given = (*args, *kwargs.values())
        key, situation = names(given), (tuple(kwargs), trace_context())
        if (snapshot := snapshots.get(key)) is not None:
            place = snapshot.program.placed_one
            if (operands := snapshot.operands(given, situation, place)) is not None:
                return snapshot.program.again(snapshot, *operands)
        arguments = Arguments.of(f, args, kwargs, static)
        program = compiled_for(arguments)
        result = program(arguments)
        if not static and (taken := program.snapshot(arguments, given, situation)) is not None:
            if key not in snapshots:
                for node in arguments.nodes:
                    weakref.finalize(node, snapshots.pop, key, None)
            snapshots[key] = taken
        return result

    def lower(*args: object, **kwargs: object) -> jax.stages.Lowered:
        arguments = Arguments.of(f, args, kwargs, static)
        jitted = compiled_for(arguments)
        return jitted.program.lower(*jitted.apart(jitted.placed(arguments.arrays)))

    def at_rest(*args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with shapes for arrays, in their shardings after a call."""
        arguments = Arguments.of(f, args, kwargs, static)
        jitted = compiled_for(arguments)
        return jitted.structure.holding(jitted.placed(list(map(_shape, arguments.arrays))))[1:3]

    vars(call)["lower"], vars(call)["at_rest"] = lower, at_rest
    return call


class JittedProgram:
    """The program for a structure of arguments; `taken` holds each array's layout at rest, None without a mesh."""

    def __init__(self, f: Callable[..., Any], arguments: Arguments, *, donate: bool):
        self.structure, self.donate, self.in_nodes = arguments.structure, donate, arguments.in_nodes
        self.f, self.taken, self.parameters = _placed(f, arguments)
        self.shapes = list(map(jnp.shape, arguments.arrays))
        trees = {path[0] for path in self.parameters}  # trees and NNX objects may be donated
        self.donated = [at < self.in_nodes or path[0] in trees for at, path in enumerate(arguments.paths)]
        self.written: WrittenBack | None = None  # set when the program is traced
        self.program = jax.jit(self._body, donate_argnums=0 if donate else ())

    def __call__(self, arguments: Arguments) -> Any:
        arrays = realized(self.placed(arguments.arrays))
        inside = list(zip(arrays, arguments.arrays, strict=True))[: arguments.in_nodes]
        if any(x is not before and not isinstance(x, Tracer) for x, before in inside):
            nnx.update((arguments.nodes,), *self.structure.states_of(arrays))
        outs = self.program(*self.apart(arrays))
        assert self.written is not None
        return self.written.into((arguments.nodes,), outs)

    def snapshot(self, arguments: Arguments, given: tuple[Any, ...], situation: object) -> Snapshot | None:
        """Take the snapshot of a finished call; None if NNX objects are inside other arguments, or change structure."""
        count, nodes = arguments.in_nodes, [each for each in given if isinstance(each, nnx.Pytree)]
        if not nodes or len(nodes) != len(arguments.nodes) or self.written is None or self.written.targets is None:
            return None
        if self.donate and any(self.donated[count:]):  # their memory is gone
            return None
        numbers = Arguments.of(self.f, given, {}).arrays[:count]
        others = [self.placed_one(number, x) for number, x in enumerate(arguments.arrays[count:])]
        return take(given, numbers, self, situation, others)

    def again(self, snapshot: Snapshot, numbers: list[Any], arrays: list[Any]) -> Any:
        """Run on the operands of a snapshot, and update its variables."""
        assert self.written is not None
        begin, targets = self.written.result.num_leaves, self.written.targets
        outs = self.program(*self.apart([*numbers, *arrays]))
        for source, x in zip(targets or (), outs[begin:], strict=True):
            snapshot.variables[source].set_raw_value(x)
        return jax.tree.unflatten(self.written.result, outs[:begin])

    def placed_one(self, number: int, x: jax.Array) -> Any:
        """Move an array outside of NNX objects to its layout at rest."""
        taken, shape = self.taken[self.in_nodes + number], self.shapes[self.in_nodes + number]
        return taken.put(x, "jshard.jit") if taken is not None and jnp.shape(x) == shape else x

    def placed(self, arrays: Sequence[Any]) -> list[Any]:
        """Move the arrays to their layouts at rest."""
        return [x if at is None else at.put(x, "jshard.jit") for x, at in zip(arrays, self.taken, strict=True)]

    def apart(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Split the arrays into donated arrays and others."""
        both = list(zip(arrays, self.donated, strict=True))
        return [x for x, donated in both if donated], [x for x, donated in both if not donated]

    def _body(self, donated: list[Any], others: list[Any]) -> list[Any]:
        supplies = iter(others), iter(donated)
        # Tracers from an outer trace may have other shardings.
        arrays = self.placed([next(supplies[is_donated]) for is_donated in self.donated])
        nodes, args, kwargs, before = self.structure.holding(arrays)
        with as_sharded(nodes), entering():
            result = self.f(*args, **kwargs)
        states = nnx.split((nodes,), nnx.Param, nnx.Variable, ...)[1:3]
        self.written, flat = WrittenBack.of(result, states, before, arrays, keep=self.donate)
        for number, source in self.written.returns_to.items():
            if (taken := self.taken[source]) is not None:
                flat[number] = redistribute(flat[number], taken.layout, label="jshard.jit")
        leaves = [leaf for leaf in jax.tree_util.tree_flatten_with_path(result)[0] if is_array(leaf[1])]
        for number, (path, x) in enumerate(leaves):
            layouts = {
                self.parameters[like][1].layout for like in _like(tuple(words_of(path)), jnp.shape(x), self.parameters)
            }
            if len(layouts) == 1:  # with two, layers of two models have its path, and its sharding is kept
                flat[number] = redistribute(x, layouts.pop(), label="jshard.jit")
        return flat


def _placed(
    f: Callable[..., Any], arguments: Arguments
) -> tuple[Callable[..., Any], list[Taken | None], dict[Path, tuple[Any, Taken]]]:
    """Return `f`, the layout at rest of each array, and the parameters by path, with their shapes.
    A function without calls of jshard is returned partitioned as a whole."""
    present = configuration()
    if present is None or present.mesh is None:
        return f, [None] * len(arguments.arrays), {}
    marks, rows = _marks(f, arguments)
    if not marks and not is_by_layers(list(arguments.nodes)):
        f = shard(f)
        marks, rows = _marks(f, arguments)
    arrays, paths, built = arguments.arrays, arguments.paths, built_arrays(arguments.nodes)
    lies = [at if at is not None and at.mesh == mesh() else None for at in map(Layout.of, arrays)]
    parameters: dict[Path, tuple[Any, Taken]] = {}
    in_state: dict[Path, Layout] = {}  # the layout of a parameter's optimizer state at rest
    for number, (path, x) in enumerate(zip(paths, arrays, strict=True)):
        mark, layout = marks.get(number), lies[number]
        if mark is not None and mark.placed is not None:
            parameters[path], signal = (jnp.shape(x), mark), mark.placed.use.claim.signal
            in_state[path] = mark.placed.lies.in_use if signal.store_optimizer else mark.layout
        elif arguments.kinds[number] == PARAMETER and mark is None and layout is not None:
            # The parameter's layer placed it.
            parameters[path], signal = (jnp.shape(x), Taken(layout, x.dtype)), built[arguments.keys[number]].signal
            in_state[path] = layout
        else:
            continue
        if signal is not None and signal.store_optimizer:
            in_state[path] = in_state[path].also_over(signal.store_optimizer, jnp.shape(x))
    batch = _batch(arguments, parameters)
    taken: list[Taken | None] = []
    for number, (path, x) in enumerate(zip(paths, arrays, strict=True)):
        mark, layout, is_outside = marks.get(number), lies[number], number >= arguments.in_nodes
        like = None if path in parameters else next(iter(_like(path, jnp.shape(x), parameters)), None)
        if like is not None and jnp.ndim(x):
            _check_not_whole(path, x, [y for other, y in zip(paths, arrays, strict=True) if other in parameters])
        if path in parameters:
            at_rest = parameters[path][1]
        elif is_outside and layout is not None and layout.mesh_axes:
            at_rest = Taken(layout)
        elif like is not None and not (mark is not None and mark.layout.mesh_axes):
            at_rest = Taken(in_state[like])
        elif mark is not None and (mark.layout.mesh_axes or layout is None):
            at_rest = mark
        elif layout is not None:  # such as a cache, which the program has split
            at_rest = Taken(layout)
        elif is_outside and batch is not None and jnp.shape(x)[:1] == (batch,):
            split = Layout(mesh(), rows, *(None,) * (jnp.ndim(x) - 1))
            at_rest = Taken(split if batch % split.ways(0) == 0 else replicated(mesh(), jnp.ndim(x)))
        else:
            at_rest = Taken(replicated(mesh(), jnp.ndim(x)))
        taken.append(at_rest)
    return f, taken, parameters


def _marks(f: Callable[..., Any], arguments: Arguments) -> tuple[dict[int, Taken], tuple[str, ...]]:
    """Trace `f` abstractly; return the layouts of its arrays in partitioned calls, by number, and the mesh axes of rows."""

    def traced(*arrays: object) -> list[Any]:
        nodes, args, kwargs, _ = arguments.structure.holding(arrays)
        leaves = jax.tree.leaves((f(*args, **kwargs), nnx.split(nodes)[1]))
        return list(filter(is_array, leaves))

    with recording() as recorded, entering():
        jaxpr = jax.make_jaxpr(traced)(*map(_shape, arguments.arrays))
    return recorded.of_arguments(jaxpr), recorded.rows


def _like(path: Path, shape: object, parameters: Mapping[Path, tuple[Any, Taken]]) -> list[Path]:
    """Return the parameters of an optimizer state's path, by the longest common end, then common
    words: `D/opt_state/mu/up/kernel` is of `D/params/up/kernel`."""
    alike = [other for other, (like, _) in parameters.items() if like == shape and other[-1:] == path[-1:]]
    rank = {other: (len(commonprefix([path[::-1], other[::-1]])), len({*path} & {*other})) for other in alike}
    return [other for other in alike if rank[other] == max(rank.values())]


def _batch(arguments: Arguments, parameters: Mapping[Path, Any]) -> int | None:
    """Return the number of rows: the first size of the least nested array outside of models."""
    outside = list(zip(arguments.paths, arguments.arrays, strict=True))[arguments.in_nodes :]
    data = [(len(path), jnp.shape(x)) for path, x in outside if path not in parameters and jnp.ndim(x)]
    return min(data, key=lambda item: item[0])[1][0] if data else None


def _type(x: Any) -> tuple[Any, ...]:
    x = _shape(x)
    return x.shape, x.dtype, x.weak_type


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), weak_type=isinstance(x, bool | int | float | complex))


def _check_not_whole(path: Path, x: object, parameters: Sequence[Any]) -> None:
    """Raise an error for an optimizer's array made whole on a device before its model is created."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and any(isinstance(y, Uncreated) for y in parameters):
        raise JShardError(
            f"{slashed(path)}, of shape {x.shape}, is whole on one device, and jshard.create has not made the model yet",
            hint="write optimizer = jshard.create(nnx.Optimizer, model, ...) too",
        )
