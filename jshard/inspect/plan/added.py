"""`jshard.explain(f, *args)`: what a program asks for and, where arrays lie on Auto axes, what XLA's partitioner adds to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax._src.config import compilation_cache_include_metadata_in_key
from jax.sharding import Mesh

from jshard.inspect.compiled.schedule import collectives_in
from jshard.inspect.ledger.entries import Line, joined
from jshard.inspect.ledger.ledger import Ledger
from jshard.inspect.ledger.tracing import Traced, ledger_of
from jshard.inspect.plan.aot import compile_absent, exported
from jshard.inspect.plan.comparison import DTYPES
from jshard.inspect.plan.match import paired
from jshard.inspect.plan.planning import on_absent, program_of
from jshard.inspect.plan.topology import Topology
from jshard.layers.user_code_errors import as_user_error
from jshard.layouts.mesh import present_mesh
from jshard.signals.keys import blamed


def explain(f: Callable[..., Any], *args: object, backward: bool | None = None, **kwargs: object) -> Ledger:
    """Every collective of `f(*args)`: those that it asks for, each with the YAML line that asked, and on Auto axes those that
    XLA adds, each with your source line and operation and the signal nearest to it.

    Arguments are arrays, `jax.ShapeDtypeStruct`s, NNX modules and pytrees of them; `f` may be jitted, or a module. With
    `backward` left out, a function that holds a gradient already (a training step) is read as it is, and any other is
    read with the gradients of every floating-point array among its arguments. With an optimizer among the arguments, the
    ledger also says what is held between steps. Nothing runs; only what lies on Auto axes is compiled, for pretended devices
    where those of its mesh are not here.

        print(jshard.explain(loss, model, x))
    """
    traced = Traced(f, args, kwargs)
    return with_added(ledger_of(traced, traced.nodes, backward=backward), traced, backward)


def with_added(ledger: Ledger, traced: Traced, backward: bool | None = None) -> Ledger:
    """The ledger of a program with what the compiler adds to it; as it is on explicit axes, and on slices of the devices, which
    no one program spans."""
    meshes = traced.meshes or {present_mesh()}
    mesh = next(iter(meshes))
    if not ledger.is_auto or len(meshes) > 1 or mesh is None or mesh.size == 1:
        return ledger
    with as_user_error("it is compiled"):
        if isinstance(mesh, Mesh):
            text, platform = _compiled_here(traced, backward), mesh.devices.flat[0].platform
        else:
            text, platform = _compiled_elsewhere(traced, backward, mesh), "cpu"
    compiler = f"XLA for {platform.upper()}"
    added = joined(_added(ledger, text, mesh.shape, compiler), lambda line: (line.once(), line.source))
    return dataclasses.replace(ledger, lines=(*ledger.lines, *added), compiler=compiler)


def _compiled_here(traced: Traced, backward: bool | None) -> str:
    program, args, kwargs = program_of(traced, backward)
    with compilation_cache_include_metadata_in_key(True):  # another program's lines would be no use
        return program.lower(*args, **kwargs).compile().as_text()


def _compiled_elsewhere(traced: Traced, backward: bool | None, mesh: Mesh) -> str:
    topology = Topology.of(f"cpu:{mesh.size}")
    there = Traced(*traced.holding([on_absent(each, mesh, topology) for each in traced.arrays])[1])
    return compile_absent(exported(*program_of(there, backward), topology), topology).text


def _added(ledger: Ledger, text: str, sizes: Mapping[str, int], compiler: str) -> Iterator[Line]:
    """A line for each array that a collective carries which no line of the ledger asked for."""
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
