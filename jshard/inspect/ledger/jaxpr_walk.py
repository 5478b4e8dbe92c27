"""A walk over the collectives of a jaxpr and its inner jaxprs, with their causes from name stacks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jshard.errors import JShardError
from jshard.inspect.ledger.entries import ChosenStrategy, Left, Line, Staged
from jshard.inspect.ledger.explicit_sharding import decided_by_compiler, typed_collectives
from jshard.kernels.collectives import COLLECTIVES
from jshard.kernels.kernel_traffic import collective_of, declared
from jshard.layers.pipeline.ticks import slot_p
from jshard.programs.jaxprs import CHECKPOINTS, Eqn, Jaxpr, bare, equations, inner, level
from jshard.programs.provenance import Cause, often, said, source_of
from jshard.signals.keys import blamed

KIND_OF = {primitive: collective for collective in COLLECTIVES.values() for primitive in collective.primitives}
# They name mesh axes and move nothing: casts, queries, and the second halves of asynchronous collectives.
FREE = frozenset(
    "axis_index one_device_cast one_device_sum pvary preduced vary_unreduced_cast vary_unreduced_cast_p".split()
)


@dataclasses.dataclass(frozen=True)
class Around:
    """The context of an equation: its cause, its number of runs, the mesh."""

    cause: Cause = Cause()
    count: int = 1
    before: int = 1  # runs of the loop around it
    each: int | None = None  # runs on one device, where only some devices run it
    count_known: bool = True
    branches: tuple[str, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of the mesh axes of the shard_maps around
    checkpoint: bool = False  # whether a jax.checkpoint directly surrounds it
    named: Any = None  # the outermost equation under a signal: its line is the user's, inner ones are shared

    def entering(self, eqn: Eqn) -> Around:
        """Return the context with the equation's own name stack added."""
        cause = self.cause.inside(eqn.source_info.name_stack.stack, checkpoint=self.checkpoint)
        if cause is self.cause:
            return self
        return dataclasses.replace(self, cause=cause, named=eqn if cause.path and self.named is None else self.named)

    def within(self, **changes: object) -> Around:
        """Return the context for the jaxprs inside the entered equation."""
        return dataclasses.replace(self, **{"checkpoint": False, **changes})

    def blamed(self, eqn: Eqn, mesh_axes: tuple[str, ...] = ()) -> Cause:
        """Return the cause of `eqn`, with its lines of the program and of the configuration."""
        return dataclasses.replace(blamed(self.cause, mesh_axes), source=source_of(self.named or eqn))


def walk(jaxpr: Jaxpr) -> Iterator[Line | Left | ChosenStrategy | Staged]:
    """Yield collectives, operations left to the compiler, unnamed strategies and pipeline schedules, in program order."""
    yield from _walk(jaxpr, Around())


def scopes_in(jaxpr: Jaxpr) -> set[tuple[str, ...]]:
    """Return the nestings of signals around the equations of `jaxpr`."""
    paths: set[tuple[str, ...]] = set()
    seen: set[tuple[int, tuple[str, ...]]] = set()

    def collect(jaxpr: Jaxpr, outer: Cause) -> None:
        if (id(jaxpr), outer.path) in seen:  # equal layers share a jaxpr
            return
        seen.add((id(jaxpr), outer.path))
        for eqn in level(jaxpr):
            cause = outer.inside(eqn.source_info.name_stack.stack)
            paths.add(cause.path)
            for each in inner(eqn):
                collect(each, cause)

    collect(bare(jaxpr), Cause())
    return paths


def has_transposed(jaxpr: Jaxpr) -> bool:
    """Return True if `jaxpr` holds a backward pass: an equation under a transposition."""
    stacks = (eqn.source_info.name_stack.stack for eqn in equations(jaxpr))
    return any(type(part).__name__ == "Transform" and part.name == "transpose" for stack in stacks for part in stack)


def _walk(jaxpr: Any, outside: Around) -> Iterator[Line | Left | ChosenStrategy | Staged]:
    for eqn in level(jaxpr):
        around = outside.entering(eqn)
        name = eqn.primitive.name
        if around.cause.chosen and not outside.cause.chosen:  # with a collective or without
            cause = around.blamed(eqn)
            yield ChosenStrategy(cause.place, cause.signal, cause.chosen, cause.source)
        if mesh_axes := decided_by_compiler(eqn):
            cause = around.blamed(eqn, mesh_axes)
            yield Left(cause, name, mesh_axes, around.count, around.count_known, around.branches)
        if name == slot_p.name:
            slot = eqn.params["slot"]
            yield Staged(slot.mesh_axis, slot.table, slot.layers, slot.kept, slot.left)
        elif name in KIND_OF:
            yield from _collective(eqn, _by_a_table(eqn, around) or around)
        elif name == "shard_map":
            sizes = {**around.sizes, **eqn.params["mesh"].shape}
            yield from _walk(eqn.params["jaxpr"], around.within(sizes=sizes))
        elif name == "scan":
            count, each = (n and n * eqn.params["length"] for n in (around.count, around.each))
            if count:
                inside = around.within(count=count, each=each, before=around.count)
                yield from _walk(eqn.params["jaxpr"], inside)
        elif name == "while":
            for each in (eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]):
                yield from _walk(each, around.within(count_known=False))
        elif name == "cond":
            branches = eqn.params["branches"]
            if inside := _by_a_table(eqn, around):
                for branch in branches if inside.count else ():
                    yield from _walk(branch, inside.within())
                continue
            for number, branch in enumerate(branches, 1):
                nested = (*around.branches, f"branch {number} of {len(branches)}")
                yield from _walk(branch, around.within(branches=nested))
        elif name == "pallas_call":  # its refs and semaphores are not collectives of JAX
            yield from _kernel(eqn, around)
        else:
            if not around.sizes:
                for collective, mesh_axes, shape, dtype in typed_collectives(eqn):
                    sizes = eqn.outvars[0].aval.sharding.mesh.shape
                    group = math.prod(sizes[mesh_axis] for mesh_axis in mesh_axes)
                    yield _line(collective, eqn, around, mesh_axes, group, shape, dtype, typed=True)
            elif name not in FREE and not name.endswith("_done"):
                _refuse_unknown(eqn, around)
            for each in inner(eqn):
                yield from _walk(each, around.within(checkpoint=name in CHECKPOINTS))


def _by_a_table(eqn: Eqn, around: Around) -> Around | None:
    """Return the context with the number of runs in the name scope of a loop over ticks; None outside such a loop."""
    stack = eqn.source_info.name_stack.stack
    if not (times := often(said(stack, "times"))):
        return None
    each = said(stack, "each")
    count = int(around.before * max(times))
    return dataclasses.replace(around, count=count, each=around.before * int(each) if each else None)


def mesh_axes_of(eqn: Eqn) -> tuple[str, ...]:
    """Return the mesh axes named by a collective."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(name for name in (names if isinstance(names, (tuple, list)) else (names,)) if isinstance(name, str))


def _collective(eqn: Any, around: Around) -> Iterator[Line]:
    kind = KIND_OF[eqn.primitive.name]
    mesh_axes = mesh_axes_of(eqn)
    if not (mesh_axes and around.count):
        return
    groups = eqn.params.get("axis_index_groups")
    group = len(groups[0]) if groups else math.prod(around.sizes[name] for name in mesh_axes)
    for operand, result in zip(eqn.invars, eqn.outvars, strict=False):  # pbroadcast_dynamic has a second operand
        aval = result.aval if kind.payload == "result" else operand.aval
        aval = getattr(aval, "inner_aval", aval)  # an asynchronous start wraps its type
        yield _line(kind.name, eqn, around, mesh_axes, group, aval.shape, aval.dtype)


def _kernel(eqn: Any, around: Around) -> Iterator[Line]:
    """Yield the traffic declared by a Pallas kernel; raise for a kernel that sends and declares nothing."""
    name = eqn.params.get("name") or "without a name"
    traffic = declared(eqn.params)
    if traffic is not None and traffic["mesh_axes"]:
        collective = collective_of(traffic["op"])
        assert collective is not None, f"kernel {name} declares {traffic['op']}, which is no collective"
        for mesh_axis in traffic["mesh_axes"]:
            if mesh_axis not in around.sizes:
                raise JShardError(
                    f'kernel {name} ({source_of(eqn)}) declares traffic over mesh axis "{mesh_axis}", but the shard_map '
                    "around it has no such axis",
                    hint=f"use {' or '.join(around.sizes) or 'it inside jax.shard_map'}",
                )
        group = math.prod(around.sizes[mesh_axis] for mesh_axis in traffic["mesh_axes"])
        result = eqn.outvars[0].aval
        shape, dtype = traffic.get("shape", result.shape), jax.numpy.dtype(traffic.get("dtype", result.dtype))
        line = _line(collective, eqn, around, traffic["mesh_axes"], group, shape, dtype, kernel=traffic["algorithm"])
        yield dataclasses.replace(line, payload=traffic["payload"], declared=traffic["wire"])
    elif traffic is None and any(is_remote(each) for body in inner(eqn) for each in equations(body)):
        raise JShardError(
            f"kernel {name} ({source_of(eqn)}) sends to other devices and declares no traffic",
            hint="give its pallas_call metadata=jshard.kernels.declare(op, mesh_axis, payload, algorithm=, wire=)",
        )


def _line(collective: str, eqn: Eqn, around: Around, mesh_axes, group, shape, dtype, **more: Any) -> Line:
    return Line(
        cause=around.blamed(eqn, tuple(mesh_axes)),
        collective=collective,
        primitive=eqn.primitive.name,
        mesh_axes=tuple(mesh_axes),
        group=group,
        count=around.count,
        count_known=around.count_known,
        each=around.each,
        payload=math.prod(shape) * dtype.itemsize,
        dtype=str(dtype),
        shape=tuple(shape),
        branches=around.branches,
        **more,
    )


def is_remote(eqn: Eqn) -> bool:
    """Return True if an equation of a kernel copies to another device: its last operand is not None."""
    return eqn.primitive.name == "dma_start" and jax.tree.unflatten(eqn.params["tree"], eqn.invars)[-1] is not None


def _refuse_unknown(eqn: Eqn, around: Around) -> None:
    mesh_axes = [name for name in mesh_axes_of(eqn) if name in around.sizes]
    if mesh_axes:
        raise JShardError(
            f'the program calls {eqn.primitive.name} over mesh axis "{mesh_axes[0]}", and jshard has no price for it',
            hint=f"use one of {', '.join(f'jshard.collectives.{name}' for name in COLLECTIVES)}",
        )
