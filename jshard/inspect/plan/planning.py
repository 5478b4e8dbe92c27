"""`jshard.plan(f, *args, topology="v5e:4x4")`: what the compiler makes of a program, for devices that are not there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jshard.errors import JShardError
from jshard.inspect.compiled.traffic import collectives_in
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.ledger.tracing import Traced, explain
from jshard.inspect.plan import aot as deviceless
from jshard.inspect.plan import cache as plans
from jshard.inspect.plan.aot import LIMIT, exported, flattened
from jshard.inspect.plan.comparison import compare
from jshard.inspect.plan.estimate import estimate
from jshard.inspect.plan.flops import arithmetic_of
from jshard.inspect.plan.memory import memory_of
from jshard.inspect.plan.result import Result
from jshard.inspect.plan.serialize import written
from jshard.inspect.plan.text import page
from jshard.inspect.plan.topology import Topology
from jshard.inspect.user_code_errors import told
from jshard.layouts.mesh import absent_mesh
from jshard.signals.active_config import configuration, on_mesh
from jshard.signals.config import Configuration
from jshard.signals.topologies import fitted, hint_of
from jshard.table import Block, Shown


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Shown, Result):
    """What was asked, what the compiler made of it, what memory it needs and what time a model gives. It prints as a page."""

    def blocks(self) -> Iterator[Block]:
        return page(self)

    def to_json(self) -> str:
        """One document, its schema named in it."""
        return written(self)


def plan(
    f: Callable[..., Any], *args: Any, topology: str | None = None, backward: bool | None = None, limit: float = LIMIT,
    cache: bool = True, **kwargs: Any,
) -> Plan:  # fmt: skip
    """`f(*args)` compiled for a topology such as `v5e:4x4`, `v5p:8x8x16`, `v6e:16x16`, `tpu7x:2x2x2`, `h100:8` or `cpu:8`,
    none of which need be here; without one, for the `jshard.topology` of what is loaded. Arguments are as for `explain`,
    which also says what `backward` is: arrays and modules as they lie now, or shapes. A program that makes a shard_map
    itself takes its mesh from `jshard.mesh()`.

    The compiler runs in another process, for at most `limit` seconds; what it made is kept, and looked up if `cache`.

        print(jshard.plan(loss, model, x, topology="v5e:4x4"))
    """
    target = Topology.chosen(topology, configuration())
    if target is None:
        raise JShardError(
            "jshard.plan is given no topology, and none is loaded",
            hint='write topology="v5e:4x4", or topology: v5e:4x4 under jshard in the configuration',
        )
    away = _away(target, (args, kwargs))
    deviceless.check_installed(target)
    with moved_to(away):
        args, kwargs = _lying((args, kwargs), away, target)
        ledger = explain(f, *args, backward=backward, **kwargs)
        program, args, kwargs = program_of(f, args, kwargs, backward)
        return planned(program, args, kwargs, ledger, target, away, limit=limit, cache=cache)


def planned(
    program: Any, args: Any, kwargs: Any, ledger: Ledger, topology: Topology, mesh: Any, *,
    limit: float = LIMIT, cache: bool = True,
) -> Plan:  # fmt: skip
    """The plan of a jitted program of shapes that lie on absent meshes, of which `ledger` says what it asks for."""
    with told("it is traced"):
        flat, leaves, donated = flattened(program, args, kwargs)
        traced = flat.trace(*leaves).jaxpr
        jaxpr = getattr(traced, "jaxpr", traced)
        deviceless.check_stays_on_devices(jaxpr)
        arithmetic = arithmetic_of(jaxpr)
        export = exported(flat, leaves, donated, topology)
    found = plans.key(export)
    compiled = plans.load(found) if cache else None
    cached = compiled is not None
    if compiled is None:
        compiled = deviceless.compile_absent(export, topology, limit=limit)
        plans.store(found, compiled)
    got = collectives_in(compiled.text) if compiled.text else []
    sizes = dict(mesh.shape)
    memory = memory_of(compiled, topology, ledger.memory, configuration())
    return Plan(
        topology=topology,
        mesh=sizes,
        asked=ledger,
        got=tuple(got),
        comparison=compare(ledger, got, sizes, topology.chip) if compiled.text else None,
        memory=memory,
        estimate=estimate(ledger, got, arithmetic, memory, topology),
        compilers=_compilers(topology),
        seconds=compiled.seconds,
        cached=cached,
        compiled=compiled,
    )


def mesh_on(topology: Topology, present: Configuration) -> Any:
    """The mesh of a configuration, of the devices of a topology."""
    assert present.mesh is not None
    sizes = dict(zip(present.mesh.names, present.mesh.sizes, strict=True))
    sizes = fitted(sizes, present.mesh.place, topology.name, topology.place)
    return _of_topology(absent_mesh(sizes, axis_types=present.axis_types), topology)


@contextlib.contextmanager
def moved_to(mesh: Any) -> Iterator[None]:
    """What is loaded, if anything, on this mesh."""
    present = configuration()
    with on_mesh(mesh) if present is not None and present.mesh is not None else contextlib.nullcontext():
        yield


def _of_topology(mesh: Any, topology: Topology) -> Any:
    return mesh.update(abstract_device=topology.abstract_device)


def _away(topology: Topology, arguments: Any) -> Any:
    """The mesh that programs are traced over: that of the configuration, else that of the arguments, else one axis."""
    present = configuration()
    if present is not None and present.mesh is not None:
        return mesh_on(topology, present)
    meshes = dict.fromkeys(each.mesh for each in map(_sharding, _arrays(arguments)) if each is not None)
    if not meshes:
        return _of_topology(absent_mesh({"devices": topology.devices}, axis_types="auto"), topology)
    mesh = next(iter(meshes))
    return _twin(mesh, topology)


def _twin(mesh: Any, topology: Topology) -> Any:
    if mesh.size != topology.devices:
        sizes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
        raise JShardError(
            f"an argument lies on a mesh of {mesh.size} devices, {{{sizes}}}, and {topology.name} has {topology.devices:,}",
            hint=hint_of(mesh.size, topology.name, "use topology=", "the sizes of the mesh"),
        )
    bare = AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.shape), axis_types=mesh.axis_types)
    return _of_topology(bare, topology)


def _arrays(arguments: Any) -> list[Any]:
    leaves = jax.tree.leaves(arguments, is_leaf=_is_node)
    nodes = [leaf for leaf in leaves if _is_node(leaf)]
    return [*jax.tree.leaves(nnx.split(nodes)[1]), *(leaf for leaf in leaves if not _is_node(leaf))]


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def _sharding(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _lying(arguments: Any, away: Any, topology: Topology) -> Any:
    """The same, each array a shape that lies on the absent devices as it lies now; whole where it lies on one device."""

    def lying(leaf: Any) -> Any:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return leaf
        sharding = _sharding(leaf)
        if sharding is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(away, PartitionSpec()))
        mesh = away if sharding.mesh.axis_names == away.axis_names else _twin(sharding.mesh, topology)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, sharding.spec))

    leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_node)
    nodes = [leaf for leaf in leaves if _is_node(leaf)]
    graph, state = nnx.split(nodes)
    supply = iter(nnx.merge(graph, jax.tree.map(lying, state)))
    return jax.tree.unflatten(tree, [next(supply) if _is_node(leaf) else lying(leaf) for leaf in leaves])


def program_of(f: Any, args: Any, kwargs: Any, backward: bool | None) -> tuple[Any, Any, Any]:
    """What is compiled: `f` itself, when it is jitted and takes nothing but arrays, so that what it donates is donated;
    else its arrays in and out, and their gradients as `explain` says."""
    whole = Traced(f, args, kwargs)
    if whole.lacks_backward(backward):
        return jax.jit(whole.call_with_gradients), (whole.arrays,), {}
    if isinstance(f, type(jax.jit(len))) and all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves((args, kwargs))):
        return f, args, kwargs
    return jax.jit(whole.call), (whole.arrays,), {}


def _compilers(topology: Topology) -> str:
    names = {"tpu": ["libtpu"], "cuda": ["jax-cuda13-plugin", "jax-cuda12-plugin"], "cpu": ["jaxlib"]}[
        topology.platform
    ]
    told_ = [f"{name} {plans.version(name)}" for name in names if plans.version(name) != "absent"]
    return ", ".join([f"jax {jax.__version__}", *told_])


__all__ = ["Plan", "mesh_on", "moved_to", "plan", "planned", "program_of"]
