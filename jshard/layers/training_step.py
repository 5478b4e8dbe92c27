"""`jshard.jit(view='shards')`: a full training step in one shard_map, in which the same layer bodies run on shards."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jshard.errors import JShardError
from jshard.layers.call_cache import Snapshot, names, take
from jshard.layouts.layout import Layout, as_axes
from jshard.layouts.mesh import is_explicit, with_axis_types
from jshard.layouts.paths import words_of
from jshard.signals.active_config import configuration, mesh, on_mesh
from jshard.signals.scope import active_digest


class Untyped(JShardError):
    """A step is traced from outside on an auto mesh, where no tracer tells how its array lies."""


def step(f: Callable[..., Any], *, outputs: Any, donate: bool) -> Callable[..., Any]:
    """Compile `f` to one program in one shard_map, in which layers run their bodies directly. Arguments are NNX objects, which
    are updated in place, and arrays that lie on the mesh."""
    programs: dict[Any, Any] = {}
    snapshots: dict[tuple[int | None, ...], Snapshot] = {}

    def prepared(args: tuple[Any, ...], situation: Any) -> tuple[Any, list[Any], list[Any], Any]:
        graphdef, variables, arrays = nnx.split(args, nnx.Variable, ...)
        leaves, tree = jax.tree.flatten((variables, arrays))
        if any(isinstance(leaf, Tracer) for leaf in leaves) and not is_explicit(mesh()):
            raise Untyped(
                f"{_name(f)}, a jshard.jit(view='shards'), is traced on an auto mesh, where nothing tells how its arrays lie",
                hint="call it outside jax.jit, or write axis_types: explicit",
            )
        layouts = tuple(map(_spec, leaves))
        _all_placed(f, arrays)
        key = (graphdef, tree, layouts, tuple((jax.typeof(leaf)) for leaf in leaves), situation)
        if key not in programs:
            specs = jax.tree.unflatten(tree, layouts)
            programs[key] = _program(f, graphdef, (variables, arrays), specs, outputs, donate=donate)
        structure = jax.tree.structure(variables)
        return programs[key], leaves[: structure.num_leaves], leaves[structure.num_leaves :], structure

    def remember(args: tuple[Any, ...], numbers: list[Any], program: Any, situation: Any) -> None:
        taken, key = take(args, numbers, program, situation), names(args)
        if taken is None:
            return
        if key not in snapshots:
            for each in args:
                if isinstance(each, nnx.Pytree):
                    weakref.finalize(each, snapshots.pop, key, None)
        snapshots[key] = taken

    @functools.wraps(f)
    def stepped(*args: Any) -> Any:
        situation = _situation()
        snapshot = snapshots.get(names(args))
        if snapshot is not None and (operands := snapshot.operands(args, situation)):
            result, numbers = snapshot.program(*operands)
            snapshot.keep(numbers)
            return result
        program, numbers, arrays, structure = prepared(args, situation)
        remember(args, numbers, program, situation)
        result, numbers = program(numbers, arrays)
        nnx.update(args, jax.tree.unflatten(structure, numbers))
        return result

    def lower(*args: Any) -> jax.stages.Lowered:
        program, numbers, arrays, _ = prepared(args, _situation())
        return program.lower(numbers, arrays)

    vars(stepped)["lower"] = lower
    return stepped


def _situation() -> Any:
    present = configuration()
    if present is None:
        raise JShardError(
            "jshard.jit(view='shards') needs a mesh, and no configuration is loaded",
            hint='call jshard.load("configs/mlp.yaml")',
        )
    return present.fingerprint, mesh(), active_digest()


def _spec(leaf: Any) -> PartitionSpec:
    """Return how an array, or the type of one on an explicit mesh, is sharded: an entry for each axis."""
    layout = Layout.of(leaf)
    return PartitionSpec(*(None,) * jax.typeof(leaf).ndim) if layout is None else layout.spec


def _all_placed(f: Callable[..., Any], arrays: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(arrays)[0]:
        if jax.numpy.ndim(leaf) and Layout.of(leaf) is None:
            shape = jax.numpy.shape(leaf)
            raise JShardError(
                f"{_argument(path)} of {_name(f)}, an array of shape {shape}, does not lie on the mesh",
                hint='place it first: jshard.signal.tensor(x, name="layer1")',
            )


def _argument(path: Any) -> str:
    """`argument 0 (up.kernel)`"""
    number, *rest = words_of(path)
    inside = ".".join(rest)
    return f"argument {number} ({inside})" if inside else f"argument {number}"


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", repr(f))


def _program(f: Any, graphdef: Any, given: Any, specs: Any, outputs: Any, *, donate: bool) -> Any:
    """Make the program, over two lists of arrays: variables, and the others."""
    tree, before = jax.tree.structure(given), jax.tree.structure(given[0])

    def run(variables: list[Any], arrays: list[Any]) -> Any:
        args = nnx.merge(graphdef, *jax.tree.unflatten(tree, [*variables, *arrays]))
        result = f(*args)
        numbers, after = jax.tree.flatten(nnx.split(args, nnx.Variable, ...)[1])
        if after != before:
            raise JShardError(
                f"{_name(f)} leaves its arguments with other variables than it found in them",
                hint="make every module and variable before the step",
            )
        return result, numbers

    in_specs = tuple(map(jax.tree.leaves, specs))
    results = _found_outputs(f, run, given, specs) if outputs is None else outputs

    def checked(variables: list[Any], arrays: list[Any]) -> Any:
        result, numbers = run(variables, arrays)
        _check_alike(f, result, results)
        return result, numbers

    mapped = jax.shard_map(checked, mesh=mesh(), in_specs=in_specs, out_specs=(results, in_specs[0]))
    return jax.jit(mapped, donate_argnums=(0,) if donate else ())


def _check_alike(f: Any, result: Any, specs: Any) -> None:
    """Raise when a result varies between devices where its spec says that it is the same."""
    try:
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(jax.tree.broadcast(specs, result)), strict=True)
    except ValueError:  # of another form, which shard_map tells
        return
    for leaf, spec in pairs:
        split = {name for names in spec for name in as_axes(names)}
        apart = sorted(jax.typeof(leaf).mat.varying - split)
        if apart:
            raise JShardError(
                f'{_name(f)} returns an array of shape {leaf.shape} that differs along mesh axis "{apart[0]}": each device has '
                "that of its part",
                hint="reduce over all devices: jshard.mean(x) in place of jnp.mean(x), as jshard.sum and jshard.max",
            )


def _found_outputs(f: Any, run: Any, given: Any, specs: Any) -> Any:
    """Find the specs of the results, from the types that the same function has over global arrays on an explicit mesh."""
    twin = with_axis_types(mesh(), "explicit")

    def typed(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jax.numpy.shape(leaf), jax.typeof(leaf).dtype, sharding=NamedSharding(twin, spec))

    with on_mesh(twin):
        result, after = jax.eval_shape(run, *map(jax.tree.leaves, jax.tree.map(typed, given, specs)))
    before = jax.tree_util.tree_flatten_with_path(specs[0])[0]
    for (path, spec), leaf in zip(before, after, strict=True):
        if spec != _spec(leaf):
            raise JShardError(
                f"{_name(f)} takes {_argument(path)} lying as {spec} and leaves it as {_spec(leaf)}",
                hint="redistribute it to where it was, or keep this part of the step outside jshard.jit(view='shards')",
            )
    return jax.tree.map(_spec, result)
