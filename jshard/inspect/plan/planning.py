"""`jshard.plan` compiles a program for absent devices; `jshard.explain` lists its collectives.
On Auto axes, `explain` also lists the collectives that XLA's partitioner adds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax._src.config import compilation_cache_include_metadata_in_key
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jshard.errors import JShardError
from jshard.inspect.compiled.schedule import collectives_in
from jshard.inspect.ledger.entries import Line, joined
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.ledger.tracing import Traced, is_array, ledger_of
from jshard.inspect.plan import aot
from jshard.inspect.plan import cache as plans
from jshard.inspect.plan.aot import LIMIT, exported
from jshard.inspect.plan.comparison import DTYPES, compare
from jshard.inspect.plan.estimate import estimate, memory_of
from jshard.inspect.plan.match import paired
from jshard.inspect.plan.result import Plan
from jshard.inspect.plan.topology import Topology
from jshard.inspect.plan.walk import Walked, walked
from jshard.layers.user_code_errors import as_user_error
from jshard.layouts.mesh import absent_mesh, present_mesh, sizes_of
from jshard.programs.flops import arithmetic_of
from jshard.programs.jaxprs import Shaped
from jshard.signals.active_config import configuration, on_mesh
from jshard.signals.config import Configuration
from jshard.signals.keys import blamed
from jshard.signals.topologies import fitted, hint_of


def plan(
    f: Callable[..., Any], *args: Any, topology: str | None = None, backward: bool | None = None, limit: float = LIMIT,
    **kwargs: object,
) -> Plan:  # fmt: skip
    """Compile `f(*args)` for a topology: `v5e:4x4`, `v5p:8x8x16`, `v6e:16x16`, `tpu7x:2x2x2`, `h100:8` or `cpu:8`.

    None of its devices need be here. Without a topology, the configuration's `jshard.topology`
    applies. Arguments are as for `explain`, `backward` included: arrays and modules in their present
    layouts, or shapes. A program that makes a shard_map itself takes its mesh from `jshard.mesh()`.

    The compiler runs in another process, for at most `limit` seconds. Its result is cached.

        print(jshard.plan(loss, model, x, topology="v5e:4x4"))
    """
    target = Topology.chosen(topology, configuration())
    if target is None:
        raise JShardError(
            "jshard.plan needs a topology, and the configuration names none",
            hint='write topology="v5e:4x4", or topology: v5e:4x4 under jshard in the configuration',
        )
    here = Traced(f, args, kwargs)
    away = _away(target, here.arrays)
    aot.check_installed(target)
    with moved_to(away):
        traced = Traced(*here.holding([on_absent(each, away, target) for each in here.arrays])[1])
        ledger = ledger_of(traced, traced.nodes, backward=backward)
        program, args, kwargs = program_of(traced, backward)
        return planned(program, args, kwargs, ledger, target, away, limit=limit)


def planned(
    program: Any, args: Any, kwargs: Any, ledger: Ledger, topology: Topology, mesh: Any, *, limit: float = LIMIT
) -> Plan:
    """Return the plan of a jitted program of shapes on absent meshes, with its ledger."""
    with as_user_error("it is traced"):
        export = exported(program, args, kwargs, topology)
    key = plans.key(export)
    compiled = plans.load(key)
    cached = compiled is not None
    if compiled is None:
        compiled = aot.compile_absent(export, topology, limit=limit)
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
    """Return the mesh of a configuration on the devices of a topology."""
    assert present.mesh is not None
    sizes = dict(zip(present.mesh.names, present.mesh.sizes, strict=True))
    sizes = fitted(sizes, present.mesh.place, topology.name, topology.place, topology.slices)
    return _of_topology(absent_mesh(sizes, axis_types=present.axis_types), topology)


@contextlib.contextmanager
def moved_to(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Put the loaded configuration, if any, on this mesh."""
    present = configuration()
    with on_mesh(mesh) if present is not None and present.mesh is not None else contextlib.nullcontext():
        yield


def _of_topology(mesh: Any, topology: Topology) -> Any:
    return mesh.update(abstract_device=topology.abstract_device)


def _away(topology: Topology, arrays: list[Any]) -> Any:
    """Return the mesh to trace over: the mesh of the configuration or of the arguments, else one axis of all devices."""
    present = configuration()
    if present is not None and present.mesh is not None:
        return mesh_on(topology, present)
    meshes = dict.fromkeys(each.mesh for each in map(_sharding, arrays) if each is not None)
    if not meshes:
        return _of_topology(absent_mesh({"devices": topology.devices}, axis_types="auto"), topology)
    return _twin(next(iter(meshes)), topology)


def _twin(mesh: Any, topology: Topology) -> Any:
    if mesh.size != topology.devices:
        raise JShardError(
            f"an argument is on a mesh of {mesh.size} devices, {sizes_of(mesh)}, and {topology.name} has "
            f"{topology.devices:,}",
            hint=hint_of(mesh.size, topology.name, "use topology=", "the sizes of the mesh"),
        )
    bare = AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.shape), axis_types=mesh.axis_types)
    return _of_topology(bare, topology)


def _sharding(leaf: object) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def on_absent(array: Shaped, away: Any, topology: Topology) -> Any:
    """Return the shape of an array in its present layout, on absent devices; whole if it is on a single device."""
    if not is_array(array):
        return array
    sharding, mesh, spec = _sharding(array), away, PartitionSpec()
    if sharding is not None:
        mesh = away if sharding.mesh.axis_names == away.axis_names else _twin(sharding.mesh, topology)
        spec = sharding.spec
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))


def program_of(traced: Traced, backward: bool | None) -> tuple[Any, Any, Any]:
    """Return the program to compile: the jitted function itself, so that it donates, if it takes arrays
    alone. Otherwise the program takes and returns flat arrays, with gradients as `explain` adds them."""
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


# -- explain --


def explain(f: Callable[..., Any], *args: object, backward: bool | None = None, **kwargs: object) -> Ledger:
    """Return every collective of `f(*args)`, each with the YAML line that asks for it.

    On Auto axes the ledger adds the collectives of XLA, each with your source line, its operation and the nearest signal.

    Arguments are arrays, `jax.ShapeDtypeStruct`s, NNX modules and pytrees of them; `f` may be jitted, or a
    module. Without `backward`, a function that already holds a gradient (a training step) is read as it
    is, and any other function with the gradients of all floating-point arrays among its arguments. With an
    optimizer among the arguments, the ledger also lists the memory held between steps. Nothing runs. Only
    a program on Auto axes is compiled, for pretended devices if the devices of its mesh are not here.

        print(jshard.explain(loss, model, x))
    """
    traced = Traced(f, args, kwargs)
    return with_added(ledger_of(traced, traced.nodes, backward=backward), traced, backward)


def with_added(ledger: Ledger, traced: Traced, backward: bool | None = None) -> Ledger:
    """Return the ledger with the compiler's own collectives on Auto axes. It is unchanged
    on explicit axes, and on slices of the devices, which no single program spans."""
    meshes = traced.meshes or {present_mesh()}
    mesh = next(iter(meshes))
    if not ledger.is_auto or len(meshes) > 1 or mesh is None or mesh.size == 1:
        return ledger
    with as_user_error("it is compiled"):
        if isinstance(mesh, Mesh):
            platform, (program, args, kwargs) = mesh.devices.flat[0].platform, program_of(traced, backward)
            with compilation_cache_include_metadata_in_key(True):  # its text needs this program's source lines
                text = program.lower(*args, **kwargs).compile().as_text()
        else:
            platform, topology = "cpu", Topology.of(f"cpu:{mesh.size}")
            there = Traced(*traced.holding([on_absent(each, mesh, topology) for each in traced.arrays])[1])
            text = aot.compile_absent(exported(*program_of(there, backward), topology), topology).text
    compiler = f"XLA for {platform.upper()}"
    added = joined(_added(ledger, text, mesh.shape, compiler), lambda line: (line.once(), line.source))
    return dataclasses.replace(ledger, lines=(*ledger.lines, *added), compiler=compiler)


def _added(ledger: Ledger, text: str, sizes: Mapping[str, int], compiler: str) -> Iterator[Line]:
    """Yield a line for each array of a running collective without a ledger line."""
    for run in paired(ledger, collectives_in(text), sizes)[1]:
        if run.left and run.got.group > 1:
            yield Line(
                cause=blamed(run.cause, run.axes),
                collective=run.got.collective,
                primitive=run.got.operations[run.number],
                mesh_axes=run.axes,
                group=run.got.group,
                count=run.left,
                count_known=run.got.count_known,
                payload=run.payload,
                dtype=DTYPES.get(run.dtype, run.dtype),
                shape=(run.elements,),
                compiler=compiler,
            )
