"""`jshard.Optimizer`: an optax transformation whose state is sharded like its parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from jshard.errors import JShardError
from jshard.layers.layer import model_arrays
from jshard.layers.user_code_errors import boundary
from jshard.layouts.creation import typed_as
from jshard.layouts.layout import Layout
from jshard.layouts.mesh import homes_of, with_axis_types
from jshard.layouts.paths import keys_of, words_of
from jshard.layouts.redistribution import move, plan_moves, redistribute
from jshard.programs.jaxprs import Jaxpr, equations
from jshard.programs.provenance import scope
from jshard.signals.active_config import configuration, mesh, on_mesh
from jshard.signals.device_sets import is_elsewhere

Path = tuple[Any, ...]
Axes = tuple[tuple[str, ...], ...]


class Optimizer(nnx.Optimizer):
    """An `nnx.Optimizer(model, tx, wrt=nnx.Param)` with state sharded like the parameters, or by `store`.

        optimizer = jshard.Optimizer(model, optax.adamw(1e-3))
        optimizer.update(model, gradients)

    `optimizer.tx` is the optax transformation with sharded state, for a loop by optax alone: `optimizer.tx.init(parameters)`.
    """

    @boundary
    def __init__(self, model: nnx.Module, tx: optax.GradientTransformation, *, wrt: Any = nnx.Param):
        super().__init__(model, with_sharded_state(tx, model, wrt), wrt=wrt)
        if configuration() is not None and not _is_on_workers(nnx.state(model, wrt)):
            self.step.set_value(redistribute(self.step.get_value(), Layout(mesh())))

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> optax.Updates:
        """Update `model` by its gradients, in the ledger's phase "update"."""
        with scope(phase="update"):
            return super().update(model, grads, **kwargs)


def with_sharded_state(
    tx: optax.GradientTransformation, model: nnx.Module, wrt: Any = nnx.Param
) -> optax.GradientTransformation:
    """Return `tx` with its state sharded like the parameters of `model`. Under a signal with
    `store: {optimizer: data}` the state is split over data too, although the parameter is whole:
    gradients are sliced, and updates are all-gathered."""
    if configuration() is None:
        return tx
    if _is_on_workers(parameters := nnx.state(model, wrt)):
        return _beside(tx, parameters)
    at_rest, in_state, signals = _places(model, wrt)
    analyses: dict[Any, _Update] = {}

    def full_update(params: object) -> _Update:
        tree = jax.tree.structure(params)
        if tree not in analyses:
            analyses[tree] = _Update.of(tx, params, in_state)
        return analyses[tree]

    def init(params: object) -> Any:
        leaves, tree = jax.tree.flatten(jax.eval_shape(tx.init, params))
        shardings = [Layout(mesh(), *axes).sharding for axes in full_update(params).state_axes]
        assert len(shardings) == len(leaves)
        where = jax.tree.unflatten(tree, shardings)
        return jax.tree.map(typed_as, jax.jit(tx.init, out_shardings=where)(params), where)

    @scope(phase="update")
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        local = bool(jax.sharding.get_abstract_mesh().manual_axes)
        updates = _bring(updates, at_rest, in_state, signals, local)
        params = None if params is None else _bring(params, at_rest, in_state, signals, local)
        transform = optax.with_extra_args_support(tx).update
        if local and any(names for axes in in_state.values() for names in axes):
            _check_elementwise(analyses.values(), transform, (updates, state, params), extra)
        state_axes = None if local else full_update(updates).state_axes
        updates, after = transform(updates, state, params, **extra)
        if state_axes is not None:
            leaves, tree = jax.tree.flatten(after)
            kept = [redistribute(leaf, Layout(mesh(), *axes)) for leaf, axes in zip(leaves, state_axes, strict=True)]
            after = jax.tree.unflatten(tree, kept)
        return _bring(updates, in_state, at_rest, signals, local), after

    return optax.GradientTransformationExtraArgs(init, update)


def _is_on_workers(parameters: object) -> bool:
    return homes_of(jax.tree.leaves(parameters), mesh()) != [mesh()]


def _beside(tx: optax.GradientTransformation, parameters: Any) -> optax.GradientTransformation:
    """Wrap `tx` for parameters on slices of the mesh. The state is created on each parameter's
    devices, and gradients are moved there from the devices of a `backward`."""
    layouts = {keys_of(path): Layout.of(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(parameters)[0]}
    homes = homes_of(jax.tree.leaves(parameters), mesh())
    if (
        len(homes) > 1
    ):  # optax compiles parts of an update for all parameters at once; a program has a single device set
        like = jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, parameters))
        reduction = _first_reduction(jax.make_jaxpr(tx.update)(like, jax.eval_shape(tx.init, like), like).jaxpr)
        if reduction is not None:
            raise JShardError(
                f"the optimizer reduces over whole parameters ({reduction}), which are on several sets of workers",
                hint="use one that treats each element by itself, such as adamw",
            )
        tx = optax.chain(*(optax.masked(tx, functools.partial(_on, layouts, home)) for home in homes))

    def brought(path: Path, leaf: jax.Array) -> Any:
        layout = layouts.get(keys_of(path))
        return redistribute(leaf, layout) if layout is not None and is_elsewhere(leaf, layout.mesh) else leaf

    @scope(phase="update")
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates = jax.tree_util.tree_map_with_path(brought, updates)
        return optax.with_extra_args_support(tx).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _on(layouts: dict[Path, Layout | None], home: Any, tree: object) -> Any:
    """Return a mask of the leaves of parameters on `home`."""

    def is_here(path: Path, _: object) -> bool:
        layout = layouts.get(keys_of(path))
        return layout is not None and {*layout.mesh.devices.flat} == {*home.devices.flat}

    return jax.tree_util.tree_map_with_path(is_here, tree)


def _places(
    model: nnx.Module, wrt: Any
) -> tuple[dict[Path, Axes], dict[Path, Axes], dict[Path, tuple[str, ...]]]:  # fmt: skip
    """Return each parameter's axes, its state's axes, and its signal where `store: {optimizer: ...}` makes them differ."""
    at_rest: dict[Path, Axes] = {}
    in_state: dict[Path, Axes] = {}
    signals: dict[Path, tuple[str, ...]] = {}
    placed = model_arrays(model)
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(model, wrt))[0]:
        path, layout = keys_of(path), Layout.of(leaf)
        at_rest[path] = in_state[path] = ((),) * jnp.ndim(leaf) if layout is None else layout.axes
        here = placed[path]
        if here.layout is not None and here.signal is not None and here.signal.store_optimizer:
            split = here.layout.also_over(here.signal.store_optimizer, jnp.shape(leaf))
            in_state[path], signals[path] = split.axes, here.signal_path
    return at_rest, in_state, signals


def _bring(
    tree: object, source: dict[Path, Axes], target: dict[Path, Axes], signals: dict[Path, tuple[str, ...]], local: bool
) -> Any:
    """Redistribute every leaf from `source` to `target`; `local` means inside a shard_map."""

    def bring(path: Path, leaf: jax.Array) -> Any:
        here, there = source.get(keys_of(path)), target.get(keys_of(path))
        if here is None or there is None or here == there:
            return leaf
        with scope(signal="/".join(signals[keys_of(path)]), key="store.optimizer"):
            if local:
                return move(leaf, plan_moves(here, there))
            return redistribute(leaf, Layout(mesh(), *there), source=Layout(mesh(), *here))

    return jax.tree_util.tree_map_with_path(bring, tree)


@dataclasses.dataclass(frozen=True)
class _Update:
    """The axes of an update's new state and its first reduction, from sharding types. Parameters
    and gradients are sharded like the state."""

    state_axes: list[Axes]
    reduction: str | None

    @classmethod
    def of(cls, tx: optax.GradientTransformation, params: object, in_state: dict[Path, Axes]) -> _Update:
        twin = with_axis_types(mesh(), "explicit")

        def typed(path: Path, leaf: jax.Array) -> jax.ShapeDtypeStruct:
            layout = Layout(twin, *in_state.get(keys_of(path), ((),) * jnp.ndim(leaf)))
            return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=layout.sharding)

        with on_mesh(twin):
            like = jax.tree_util.tree_map_with_path(typed, params)
            try:
                state = jax.eval_shape(tx.init, like)
                program = jax.make_jaxpr(tx.update)(like, state, like).jaxpr
            except Exception as error:
                if type(error).__name__ != "ShardingTypeError":  # JAX does not export the class
                    raise
                raise _mixes_parts(like) from None
        after = program.outvars[len(program.outvars) - len(jax.tree.leaves(state)) :]
        return cls([_axes_of_type(result.aval) for result in after], _first_reduction(program))


def _mixes_parts(params: object) -> JShardError:
    """Return the error for an optimizer with products over a split parameter."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    for path, leaf in sorted(leaves, key=lambda item: -item[1].ndim):
        if split := [name for names in _axes_of_type(leaf) for name in names]:
            axes = " and ".join(f'"{name}"' for name in split)
            return JShardError(
                f"the optimizer multiplies whole parameters, and {'.'.join(words_of(path))} of shape {leaf.shape} is "
                f"split over mesh axis {axes}",
                hint="use one that treats each element by itself, such as adamw, or do not split the parameter: write only row",
            )
    raise AssertionError("types were ambiguous where no parameter is split")


def _axes_of_type(aval: Any) -> Axes:
    if not isinstance(aval.sharding, NamedSharding):
        return ((),) * aval.ndim
    return Layout.from_sharding(aval.sharding, aval.ndim).axes


def _check_elementwise(known: Iterable[_Update], transform: Any, operands: Any, extra: dict[str, Any]) -> None:
    """Raise an error inside a shard_map for an optimizer with reductions: each would see only a shard."""
    reductions = [update.reduction for update in known]
    if not reductions:
        reductions = [_first_reduction(jax.make_jaxpr(lambda *each: transform(*each, **extra))(*operands).jaxpr)]
    reduction = next((name for name in reductions if name is not None), None)
    if reduction is not None:
        raise JShardError(
            f"the optimizer reduces over whole parameters ({reduction}), and inside a shard_map it sees one "
            "device's shard",
            hint="return the gradients from the shard_map, and call optimizer.update outside",
        )


def _first_reduction(jaxpr: Jaxpr) -> str | None:
    names = (equation.primitive.name for equation in equations(jaxpr))
    reductions = "dot_general", "sort", "top_k"
    return next((name for name in names if name.startswith(("reduce_", "arg", "cum")) or name in reductions), None)
