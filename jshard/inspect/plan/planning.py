"""`jshard.plan(f, *args, topology="v5e:4x4")`: what the compiler makes of a program, for devices that are not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jshard.errors import JShardError
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.ledger.tracing import Traced, is_array, ledger_of
from jshard.inspect.plan import aot as deviceless
from jshard.inspect.plan import cache as plans
from jshard.inspect.plan.aot import LIMIT, exported
from jshard.inspect.plan.comparison import compare
from jshard.inspect.plan.estimate import estimate
from jshard.inspect.plan.memory import memory_of
from jshard.inspect.plan.result import Plan
from jshard.inspect.plan.topology import Topology
from jshard.inspect.plan.walk import Walked, walked
from jshard.layers.user_code_errors import as_user_error
from jshard.layouts.mesh import absent_mesh, sizes_of
from jshard.programs.flops import arithmetic_of
from jshard.programs.jaxprs import Shaped
from jshard.signals.active_config import configuration, on_mesh
from jshard.signals.config import Configuration
from jshard.signals.topologies import fitted, hint_of


def plan(
    f: Callable[..., Any], *args: Any, topology: str | None = None, backward: bool | None = None, limit: float = LIMIT,
    **kwargs: object,
) -> Plan:  # fmt: skip
    """`f(*args)` compiled for a topology such as `v5e:4x4`, `v5p:8x8x16`, `v6e:16x16`, `tpu7x:2x2x2`, `h100:8` or `cpu:8`,
    none of which need be here; without one, for the `jshard.topology` of what is loaded. Arguments are as for `explain`,
    which also says what `backward` is: arrays and modules as they lie now, or shapes. A program that makes a shard_map
    itself takes its mesh from `jshard.mesh()`.

    The compiler runs in another process, for at most `limit` seconds; what it made is kept, and looked up from then on.

        print(jshard.plan(loss, model, x, topology="v5e:4x4"))
    """
    target = Topology.chosen(topology, configuration())
    if target is None:
        raise JShardError(
            "jshard.plan is given no topology, and none is loaded",
            hint='write topology="v5e:4x4", or topology: v5e:4x4 under jshard in the configuration',
        )
    here = Traced(f, args, kwargs)
    away = _away(target, here.arrays)
    deviceless.check_installed(target)
    with moved_to(away):
        traced = Traced(*here.holding([on_absent(each, away, target) for each in here.arrays])[1])
        ledger = ledger_of(traced, traced.nodes, backward=backward)
        program, args, kwargs = program_of(traced, backward)
        return planned(program, args, kwargs, ledger, target, away, limit=limit)


def planned(
    program: Any, args: Any, kwargs: Any, ledger: Ledger, topology: Topology, mesh: Any, *, limit: float = LIMIT
) -> Plan:
    """The plan of a jitted program of shapes that lie on absent meshes, of which `ledger` says what it asks for."""
    with as_user_error("it is traced"):
        export = exported(program, args, kwargs, topology)
    key = plans.key(export)
    compiled = plans.load(key)
    cached = compiled is not None
    if compiled is None:
        compiled = deviceless.compile_absent(export, topology, limit=limit)
        plans.store(key, compiled)
    found = walked(compiled.text, topology) if compiled.text else Walked(())
    sizes = dict(mesh.shape)
    memory = memory_of(compiled, topology, ledger.memory, configuration())
    return Plan(
        topology=topology,
        mesh=sizes,
        asked=ledger,
        got=found.collectives,
        comparison=compare(ledger, found.collectives, sizes) if compiled.text else None,
        memory=memory,
        estimate=estimate(ledger, found, arithmetic_of(export.jaxpr), memory, topology),
        compilers=_compilers(topology),
        seconds=compiled.seconds,
        cached=cached,
        compiled=compiled,
    )


def mesh_on(topology: Topology, present: Configuration) -> Any:
    """The mesh of a configuration, of the devices of a topology."""
    assert present.mesh is not None
    sizes = dict(zip(present.mesh.names, present.mesh.sizes, strict=True))
    sizes = fitted(sizes, present.mesh.place, topology.name, topology.place, topology.slices)
    return _of_topology(absent_mesh(sizes, axis_types=present.axis_types), topology)


@contextlib.contextmanager
def moved_to(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Put the configuration that is loaded, if any, on this mesh."""
    present = configuration()
    with on_mesh(mesh) if present is not None and present.mesh is not None else contextlib.nullcontext():
        yield


def _of_topology(mesh: Any, topology: Topology) -> Any:
    return mesh.update(abstract_device=topology.abstract_device)


def _away(topology: Topology, arrays: list[Any]) -> Any:
    """The mesh that programs are traced over: that of the configuration, else that of the arguments, else one axis."""
    present = configuration()
    if present is not None and present.mesh is not None:
        return mesh_on(topology, present)
    meshes = dict.fromkeys(each.mesh for each in map(_sharding, arrays) if each is not None)
    if not meshes:
        return _of_topology(absent_mesh({"devices": topology.devices}, axis_types="auto"), topology)
    mesh = next(iter(meshes))
    return _twin(mesh, topology)


def _twin(mesh: Any, topology: Topology) -> Any:
    if mesh.size != topology.devices:
        raise JShardError(
            f"an argument lies on a mesh of {mesh.size} devices, {sizes_of(mesh)}, and {topology.name} has "
            f"{topology.devices:,}",
            hint=hint_of(mesh.size, topology.name, "use topology=", "the sizes of the mesh"),
        )
    bare = AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.shape), axis_types=mesh.axis_types)
    return _of_topology(bare, topology)


def _sharding(leaf: object) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def on_absent(array: Shaped, away: Any, topology: Topology) -> Any:
    """A shape that lies on the absent devices as the array lies now: whole where it lies on one device."""
    if not is_array(array):
        return array
    sharding, mesh, spec = _sharding(array), away, PartitionSpec()
    if sharding is not None:
        mesh = away if sharding.mesh.axis_names == away.axis_names else _twin(sharding.mesh, topology)
        spec = sharding.spec
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))


def program_of(traced: Traced, backward: bool | None) -> tuple[Any, Any, Any]:
    """What is compiled: the function itself, when it is jitted and takes nothing but arrays, so that what it donates is
    donated; else its arrays in and out, and their gradients as `explain` says."""
    if traced.lacks_backward(backward):
        return jax.jit(traced.call_with_gradients), (traced.arrays,), {}
    f, args, kwargs = traced.given
    if isinstance(f, type(jax.jit(len))) and all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves((args, kwargs))):
        return f, args, kwargs
    return jax.jit(traced.call), (traced.arrays,), {}


def _compilers(topology: Topology) -> str:
    names = {"tpu": ["libtpu"], "cuda": ["jax-cuda13-plugin", "jax-cuda12-plugin"], "cpu": ["jaxlib"]}[
        topology.platform
    ]
    versions = [f"{name} {plans.version(name)}" for name in names if plans.version(name) != "absent"]
    return ", ".join([f"jax {jax.__version__}", *versions])
