"""Gradients of a model: `jshard.value_and_grad`, and means over the microbatches of a training step."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jax.tree_util import keystr

from jshard.errors import JShardError, kind_of, multiples
from jshard.kernels.all_reduction import all_reduce_coalesced
from jshard.kernels.collectives import check_vma_enabled, pvary
from jshard.layers.call_arguments import Arguments, is_array, is_node
from jshard.layers.jitted import jit
from jshard.layers.layer import is_by_layers, model_arrays
from jshard.layers.linen import arguments, trees_of_parameters
from jshard.layers.reduce import mean
from jshard.layers.sharding import call_of, partitioned, sharded
from jshard.layers.strategy import Names, all_reduce_of, inside_shard_map
from jshard.layers.user_code_errors import boundary, name_of
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import is_explicit
from jshard.layouts.paths import keys_of
from jshard.layouts.redistribution import redistribute
from jshard.programs.jaxprs import Shaped
from jshard.programs.provenance import scope
from jshard.signals.active_config import configuration, mesh, use_stages
from jshard.signals.config import Pipeline
from jshard.signals.scope import active, unplaced


def value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: object = nnx.Param,
) -> Callable[..., Any]:
    """Differentiate `f` as `nnx.value_and_grad` does, partitioned as under `jshard.shard`.

    The arguments `argnums` are NNX models, differentiated by their variables `wrt`; or Linen variables, Equinox modules and
    other trees, with gradients None for leaves other than floating-point arrays. If `f` returns the loss of each row, the
    value is the mean. Under `jshard.pipeline` rows go through the stages in microbatches, by the pipeline's schedule; value,
    aux and gradients are the means over microbatches. Outside of jit the parameters are moved to their shardings at rest.

    Inside a `jax.shard_map` gradients are summed over the mesh axes of `row` once, at the end of `f`, instead of in each
    layer and each iteration of a loop. A scalar loss must be reduced in `f` by `jshard.mean`. The ledger lists the sums under
    the signal active at this call.
    """
    numbers, own = (argnums,) if isinstance(argnums, int) else tuple(argnums), _mean_loss(f, has_aux=has_aux)

    @boundary
    @functools.wraps(f)
    def differentiated(*args: object, **kwargs: object) -> Any:
        present = configuration()
        if jax.sharding.get_abstract_mesh().manual_axes:
            if numbers != (0,):
                fault = (
                    f"jshard.value_and_grad inside a shard_map differentiates by argument 0, and argnums is {argnums}"
                )
                raise JShardError(fault, hint=f"give {name_of(f)} the model first, and remove argnums")
            return _in_shard_map(f, wrt, has_aux=has_aux)(*args, **kwargs)
        flat = (*args, *kwargs.values())
        if max(numbers) >= len(flat):
            fault = (
                f"{name_of(f)} is given {len(flat)} arguments, and differentiated by argument {max(numbers)}, from 0"
            )
            raise JShardError(fault, hint=f"call it as {name_of(f)}{inspect.signature(f)}")
        run = _differentiated(own, numbers, wrt)
        if present is not None and present.mesh is not None and not unplaced.value:
            given = list(arguments(f, args, kwargs).items())
            by = [given[number] for number in numbers]
            if present.pipeline is not None or not all(is_node(x) and is_by_layers(x) for _, x in by):
                if not any(isinstance(x, Tracer) for x in jax.tree.leaves(flat)):
                    return eager(*args, **kwargs)
                use_stages()
                names = ["params", *(name for name, x in by if not is_node(x) and not hasattr(x, "dtype"))]
                run = _differentiated(sharded(own, names), numbers, wrt)
                if present.pipeline is not None:
                    run = functools.partial(_by_schedule, own, present.pipeline, [name for name, _ in by], wrt, names)
        (value, aux), gradients = run(*args, **kwargs)
        gradients = gradients[0] if isinstance(argnums, int) else gradients
        return ((value, aux) if has_aux else value), gradients

    eager = jit(differentiated)
    return differentiated


def _mean_loss(f: Callable[..., Any], *, has_aux: bool) -> Callable[..., tuple[jax.Array, Any]]:
    """Return `f` with the mean of its loss, and aux, which is None without `has_aux`."""

    @functools.wraps(f)
    def own(*args: object, **kwargs: object) -> tuple[jax.Array, Any]:
        loss, aux = f(*args, **kwargs) if has_aux else (f(*args, **kwargs), None)
        dtype = getattr(loss, "dtype", None)
        if not isinstance(loss, float) and (dtype is None or not jnp.issubdtype(dtype, jnp.inexact)):
            what = f"an array of {dtype}" if dtype is not None else kind_of(loss)
            hint = "return the loss, or with has_aux=True a pair (loss, aux)"
            raise JShardError(f"{name_of(f)} returns {what}, which has no gradient", hint=hint)
        return (mean(loss) if jnp.ndim(loss) else jnp.asarray(loss)), aux

    return own


def _differentiated(f: Callable[..., Any], numbers: Sequence[int], wrt: Any) -> Callable[..., Any]:
    """Differentiate `f`, with a loss and aux as result, by the arguments `numbers`; keywords count after the others."""

    def differentiated(*args: object, **kwargs: object) -> Any:
        flat = [*args, *kwargs.values()]
        trees = {number: flat[number] for number in numbers if not is_node(flat[number])}
        for number, tree in trees.items():
            flat[number] = jax.tree.map(lambda x: x if _is_smooth(x) else None, tree)

        def call(*given: object) -> Any:
            every = list(given)
            for number, tree in trees.items():
                every[number] = jax.tree.map(lambda x, smooth: smooth if _is_smooth(x) else x, tree, given[number])
            return f(*every[: len(args)], **dict(zip(kwargs, every[len(args) :], strict=True)))

        by = tuple(number if number in trees else nnx.DiffState(number, wrt) for number in numbers)
        return nnx.value_and_grad(call, argnums=by, has_aux=True)(*flat)

    return differentiated


def _is_smooth(x: Shaped) -> bool:
    return isinstance(x, float | complex) or (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact))


def _by_schedule(
    own: Callable[..., Any],
    asked: Pipeline,
    by: list[str],
    wrt: object,
    names: list[str],
    /,
    *args: object,
    **kwargs: object,
) -> Any:
    """Differentiate by microbatches through the stages of a pipeline. A vector holds loss and aux: both are means."""
    given = arguments(own, args, kwargs)
    trees = trees_of_parameters(given, names)
    apart: list[Callable[[jax.Array], Any]] = []  # for each trace, the function that splits its vector

    @functools.wraps(own)
    def of_microbatch(*one: object, **more: object) -> jax.Array:
        value, aux = own(*one, **more)
        vector, back = value, lambda value: (value, aux)
        if jax.tree.leaves(aux):
            _check_aux(aux, _aux_shapes(own, args, kwargs), asked)
            # aux has no gradient: only the loss in the vector is differentiated
            vector, back = ravel_pytree((value, jax.tree.map(jax.lax.stop_gradient, aux)))
        apart.append(back)
        return vector

    for name in by:
        _check_is_parameters(given[name], name in trees, wrt, asked)
    rows = {name: x for name, x in given.items() if name not in trees and not is_node(x)}
    batches = jax.tree.map(lambda x: _microbatches(asked, x) if is_array(x) else x, rows)
    one = given | jax.tree.map(lambda x: x[0] if is_array(x) else x, batches)
    for name in trees.keys() & set(by):
        one[name] = jax.tree.map(lambda x: jnp.asarray(x) if _is_smooth(x) else x, trees[name])
    positional = tuple(one.values())[: len(args)]
    call = call_of(of_microbatch, positional, {name: one[name] for name in kwargs}, names)
    value, gradients = call.microbatches(batches, by)
    return apart[-1](value), tuple(_gradient(given[at], wrt, each) for at, each in zip(by, gradients, strict=True))


def _check_is_parameters(x: Any, is_tree: bool, wrt: Any, asked: Pipeline) -> None:
    about = f"jshard.value_and_grad by jshard.pipeline ({asked.place}) differentiates by parameters, and"
    if not is_node(x) and not is_tree:
        what = f"an array of shape {x.shape}" if hasattr(x, "shape") else kind_of(x)
        raise JShardError(f"{about} is given {what}", hint='differentiate by a tree, as {"scale": array}')
    if is_node(x) and jax.tree.leaves(nnx.filter_state(nnx.state(x, wrt), nnx.Not(nnx.Param))):
        what = f"wrt={getattr(wrt, '__name__', wrt)} selects other variables of {type(x).__name__}"
        raise JShardError(f"{about} {what}", hint="write wrt=nnx.Param, or remove jshard.pipeline")


def _check_aux(aux: object, shapes: Sequence[tuple[int, ...]], asked: Pipeline) -> None:
    """Raise an error for aux with another shape per microbatch than `shapes`: its mean would not be the mean of all rows."""
    for (path, x), shape in zip(jax.tree_util.tree_flatten_with_path(aux)[0], shapes, strict=True):
        dtype, what = getattr(x, "dtype", None), ""
        if not isinstance(x, float) and (dtype is None or not jnp.issubdtype(dtype, jnp.floating)):
            what = f"is {kind_of(x) if dtype is None else f'an array of {dtype}'}"
        elif jnp.shape(x) != shape:
            what = f"has shape {jnp.shape(x)} of a microbatch and {shape} of all rows"
        if what:
            about = f"jshard.pipeline ({asked.place}) takes the mean of aux over microbatches, and aux{keystr(path)}"
            raise JShardError(f"{about} {what}", hint="return its mean over rows, or compute it by another call")


def _aux_shapes(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of the leaves of aux for all rows."""
    call, shapes = Arguments.of(own, args, kwargs), list[tuple[int, ...]]()

    def traced(arrays: Sequence[Any]) -> None:
        _, args, kwargs, _ = call.structure.holding(arrays)
        shapes[:] = [getattr(x, "shape", ()) for x in jax.tree.leaves(own(*args, **kwargs)[1])]

    jax.eval_shape(traced, [jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype) for x in call.arrays])
    return shapes


def _gradient(x: Any, wrt: Any, leaves: Sequence[Any]) -> Any:
    """Return the gradients of an argument in its tree structure; None for leaves without floating-point numbers."""
    gradients = iter(leaves)
    gradient = jax.tree.map(
        lambda x: next(gradients) if _is_smooth(x) else None, nnx.state(x, nnx.Param) if is_node(x) else x
    )
    return nnx.filter_state(gradient, wrt) if is_node(x) and wrt is not nnx.Param else gradient


def _in_shard_map(f: Callable[..., Any], wrt: Any, *, has_aux: bool) -> Callable[..., Any]:
    """Return a function that differentiates on each device's shard, and sums all gradients at the end."""

    def own(model: object, *args: object, **kwargs: object) -> tuple[jax.Array, Any]:
        """Return this device's share of the loss, and aux."""
        loss, aux = f(model, *args, **kwargs) if has_aux else (f(model, *args, **kwargs), None)
        return (_part_of_mean(loss) if jnp.ndim(loss) else loss), (jnp.ndim(loss), aux)

    def differentiated(model: Any, *args: object, **kwargs: object) -> Any:
        present = configuration()
        if present is None or not check_vma_enabled():
            raise JShardError(
                "jshard.value_and_grad needs a configuration, and a shard_map with check_vma on",
                hint="load one, leave check_vma on, or use nnx.value_and_grad",
            )
        names = tuple(dict.fromkeys(name for signal in present.signals.values() for name in signal.row))
        inside_shard_map(names, "jshard.value_and_grad")
        graph, parameters, rest = nnx.split(model, wrt, ...)
        # Variables other than parameters are shared with the model, and change with it.
        apart = nnx.merge(graph, jax.tree.map(lambda x: pvary(x, names), parameters), rest)
        unsummed = nnx.value_and_grad(own, argnums=nnx.DiffState(0, wrt), has_aux=True)
        (value, (rank, aux)), gradients = unsummed(apart, *args, **kwargs)
        if not rank:
            _check_summed(value, names)
        with scope(phase="backward"):
            wide = [value.dtype, *_wide(apart, gradients)]
            value, gradients = _summed((value, gradients), (0 if rank else value, parameters), wide)
            return ((value, aux) if has_aux else value), gradients

    return differentiated


def _microbatches(asked: Pipeline, x: jax.Array) -> jax.Array:
    """Split the rows of an array into consecutive microbatches; a scalar is repeated for each."""
    count = asked.microbatches
    if not jnp.ndim(x):
        return jnp.broadcast_to(x, count)
    if x.shape[0] % count:
        raise JShardError(
            f"jshard.pipeline ({asked.place}) has {count} microbatches, and jshard.value_and_grad is given {x.shape[0]} rows",
            hint=f"use {multiples(x.shape[0], count)} rows",
        )
    layout = Layout.of(x)
    if layout is not None:
        x = redistribute(x, Layout(layout.mesh, (), *layout.axes[1:]))
    return jnp.reshape(x, (count, -1, *x.shape[1:]))


def _part_of_mean(losses: jax.Array) -> jax.Array:
    """Return this device's share of the mean."""
    ways = math.prod(jax.lax.axis_size(name) for name in jax.typeof(losses).mat.varying)
    return jnp.sum(losses) / (losses.size * ways)


def _check_summed(value: jax.Array, names: Names) -> None:
    unreduced = [name for name in names if name in jax.typeof(value).mat.varying]
    if unreduced:
        raise JShardError(
            f'the loss under jshard.value_and_grad differs along mesh axis "{unreduced[0]}": each device has only its '
            "own shard's value",
            hint="return the loss of each row, or reduce it: jshard.mean(losses)",
        )


def _wide(model: object, gradients: object) -> list[Any]:
    """Return for each gradient the dtype of its sum, from its layer's signal."""
    placed = model_arrays(model)
    return [
        jnp.dtype(placed[keys_of(path)].reduce_dtype or leaf.dtype)
        for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]
    ]


def _summed(gradients: object, parameters: object, wide: Sequence[Any]) -> Any:
    """Sum each gradient over the mesh axes along which its parameter is equal; sums over the same axes are coalesced."""
    leaves, tree = jax.tree.flatten(gradients)
    alike: dict[tuple[Names, Any], list[int]] = {}
    for number, (leaf, parameter, dtype) in enumerate(zip(leaves, jax.tree.leaves(parameters), wide, strict=True)):
        missing = tuple(sorted(jax.typeof(leaf).mat.varying - jax.typeof(parameter).mat.varying))
        if missing:
            alike.setdefault((missing, dtype), []).append(number)
    algorithm = all_reduce_of(active(), mesh())
    for (missing, dtype), numbers in alike.items():
        arrays = tuple(leaves[number].astype(dtype) for number in numbers)
        sums = all_reduce_coalesced(arrays, missing, algorithm=algorithm)
        for number, total in zip(numbers, sums, strict=True):
            leaves[number] = total.astype(leaves[number].dtype)
    return jax.tree.unflatten(tree, leaves)


# -- sequential microbatches of training --


def accumulated(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for the mean value and the mean gradients of `f(model, *batch)` over microbatches.

    The batch's arrays have an axis of microbatches before their own axes. The model's other variables (random states,
    statistics) are carried from a microbatch to the next.

    On an explicit mesh the loop runs on each device's shards, as under `jshard.shard`. Each gradient is summed over devices
    once, after the loop. A parameter under `store` is gathered, and its gradient scattered, in each iteration, because
    neither is whole between iterations. On other meshes XLA partitions the loop.
    """

    def differentiated(model: Any, *batches: Any) -> Any:
        present = configuration()
        if present is None or present.mesh is None or unplaced.value or not is_explicit(mesh()):
            return _in_turn(partitioned(model, f), model, *batches)
        call = call_of(f, (model, *jax.tree.map(lambda x: x[0], batches)), {})
        name, *names = call.given
        value, (gradients,) = call.microbatches(dict(zip(names, batches, strict=True)), [name])
        return value, jax.tree.unflatten(jax.tree.structure(nnx.state(model, nnx.Param)), gradients)

    return differentiated


def _in_turn(f: Callable[..., Any], model: Any, *batches: object) -> Any:
    graph, parameters, variables = nnx.split(model, nnx.Param, ...)

    def loss(parameters: object, variables: object, batch: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda x: x, variables)  # a copy, because the call may change them
        model = nnx.merge(graph, parameters, own)
        value = f(model, *batch)
        return value, nnx.split(model, nnx.Param, ...)[2]

    def turn(carry: tuple[Any, ...], batch: object) -> tuple[Any, None]:
        total, sums, variables = carry
        (value, variables), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, variables, batch)
        return (total + value, jax.tree.map(jnp.add, sums, gradients), variables), None

    one, _ = jax.eval_shape(loss, parameters, variables, jax.tree.map(lambda x: x[0], batches))
    start = jnp.zeros((), one.dtype), jax.tree.map(jnp.zeros_like, parameters), variables
    (total, sums, variables), _ = jax.lax.scan(turn, start, batches)
    nnx.update(model, variables)
    count = jax.tree.leaves(batches)[0].shape[0]
    return total / count, jax.tree.map(lambda x: x / count, sums)
