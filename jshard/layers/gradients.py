"""`jshard.value_and_grad`: gradients of a model, summed over the devices of a batch once, and together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.errors import JShardError, did_you_mean, multiples
from jshard.kernels.all_reduction import all_reduce_coalesced
from jshard.kernels.collectives import check_vma_enabled, pvary
from jshard.layers.accumulation import accumulated
from jshard.layers.kernel_support import all_reduce_of
from jshard.layers.layer import model_arrays
from jshard.layers.reduce import mean
from jshard.layers.strategy import Names, inside_shard_map
from jshard.layouts.layout import Layout
from jshard.layouts.paths import keys_of
from jshard.layouts.redistribution import redistribute
from jshard.provenance import scope
from jshard.signals.active_config import configuration, mesh
from jshard.signals.config import Configuration, Pipeline
from jshard.signals.scope import active, unplaced


def value_and_grad(
    f: Callable[..., Any], *, over: str | Sequence[str] | None = None, has_aux: bool = False, wrt: Any = nnx.Param
) -> Callable[..., Any]:
    """Differentiate as `nnx.value_and_grad(f)`, for `f(model, ...)`, but for the last bit. Inside a `jshard.step` gradients are
    summed over the mesh axes `over` (those that any `row` names) once, when `f` is done, instead of layer by
    layer and in each turn of a loop: one sum of each parameter where `f` takes its batch in several parts, and between CPU
    processes one message for all that are small. The ledger has them under the signal that is active here:

        with jshard.signal("gradients"):
            value, gradients = jshard.value_and_grad(lambda model: losses(model(x), y))(model)

    Where `f` returns an array, as the loss of each row, the value is its mean, and is summed with the gradients; one number
    must be reduced in `f` by `jshard.mean`, which is a sum more. Until then each device holds gradients of its own part
    alone. Over whole arrays layers sum their own, as ever; where the configuration says `jshard.pipeline`, the rows of arrays
    go through its stages in microbatches, by its schedule, and value and gradients are the means of theirs.
    """

    def own(model: Any, *args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        """Return the loss, to which each device adds its part, and aux."""
        found, aux = f(model, *args, **kwargs) if has_aux else (f(model, *args, **kwargs), None)
        return (_part_of_mean(found) if jnp.ndim(found) else found), (jnp.ndim(found), aux)

    def of_microbatch(model: Any, *args: Any) -> jax.Array:
        value = f(model, *args)
        return mean(value) if jnp.ndim(value) else value

    unsummed, by_schedule = (
        nnx.value_and_grad(own, argnums=nnx.DiffState(0, wrt), has_aux=True),
        accumulated(of_microbatch),
    )

    @functools.wraps(f)
    def differentiated(model: Any, *args: Any, **kwargs: Any) -> Any:
        present = configuration()
        if not jax.sharding.get_abstract_mesh().manual_axes:
            if present is not None and present.pipeline is not None and not unplaced.value:
                if has_aux or kwargs or wrt is not nnx.Param:
                    raise JShardError(
                        f"jshard.value_and_grad by jshard.pipeline ({present.pipeline.place}) takes arrays in their order, and "
                        "gives the value and the gradients by all parameters",
                        hint="leave has_aux, wrt and named arguments away, or remove jshard.pipeline",
                    )
                return by_schedule(model, *jax.tree.map(functools.partial(_microbatches, present.pipeline), args))
            (value, (_, aux)), gradients = unsummed(model, *args, **kwargs)
            return ((value, aux) if has_aux else value), gradients
        if present is None or not check_vma_enabled():
            raise JShardError(
                "jshard.value_and_grad needs a configuration, and a shard_map with check_vma on",
                hint="call it inside jshard.step, or take nnx.value_and_grad",
            )
        names = _axes(over, present)
        graph, parameters, rest = nnx.split(model, wrt, ...)
        # What is no parameter is shared with the model, and changes with it.
        apart = nnx.merge(graph, jax.tree.map(lambda x: pvary(x, names), parameters), rest)
        (value, (rank, aux)), gradients = unsummed(apart, *args, **kwargs)
        if not rank:
            _check_summed(value, names)
        with scope(phase="backward"):
            wide = [value.dtype, *_wide(apart, gradients)]
            value, gradients = _summed((value, gradients), (0 if rank else value, parameters), wide)
            return ((value, aux) if has_aux else value), gradients

    return differentiated


def _microbatches(asked: Pipeline, x: Any) -> jax.Array:
    """The rows of an array in microbatches, one after the other; what has no rows is given to each."""
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


def _axes(over: str | Sequence[str] | None, present: Configuration) -> Names:
    if over is None:
        found = tuple(dict.fromkeys(name for signal in present.signals.values() for name in signal.row))
    else:
        found = (over,) if isinstance(over, str) else tuple(over)
    for name in found:
        if name not in mesh().axis_names:
            raise JShardError(
                f'jshard.value_and_grad is over mesh axis "{name}", which {dict(mesh().shape)} does not have',
                hint=did_you_mean(name, mesh().axis_names, f"use {' or '.join(mesh().axis_names)}"),
            )
    inside_shard_map(found, "jshard.value_and_grad")
    return found


def _part_of_mean(losses: jax.Array) -> jax.Array:
    """Take the mean in global view; inside a shard_map return what this device's shard adds to it."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return mean(losses)
    ways = math.prod(jax.lax.axis_size(name) for name in jax.typeof(losses).mat.varying)
    return jnp.sum(losses) / (losses.size * ways)


def _check_summed(value: jax.Array, names: Names) -> None:
    left = [name for name in names if name in jax.typeof(value).mat.varying]
    if left:
        raise JShardError(
            f'the loss under jshard.value_and_grad differs along mesh axis "{left[0]}": each device has that of its part',
            hint="return the loss of each row, or reduce it: jshard.mean(losses)",
        )


def _wide(model: Any, gradients: Any) -> list[Any]:
    """Return for each gradient the dtype that its layer's signal sums in."""
    placed = model_arrays(model)
    return [
        jnp.dtype(placed[keys_of(path)].reduce_dtype or leaf.dtype)
        for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]
    ]


def _summed(gradients: Any, parameters: Any, wide: Sequence[Any]) -> Any:
    """Sum each gradient over the mesh axes over which its parameter is invariant, those over the same axes together."""
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
