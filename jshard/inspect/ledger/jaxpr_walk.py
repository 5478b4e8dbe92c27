"""Every collective of a jaxpr and of the jaxprs inside it, with what the name stacks around it say."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.extend import source_info_util

from jshard.errors import JShardError
from jshard.inspect.ledger.around import Around, said_by
from jshard.inspect.ledger.explicit_sharding import typed_collectives
from jshard.inspect.ledger.implicit_resharding import decided_by_compiler
from jshard.kernels.collectives import COLLECTIVES
from jshard.kernels.kernel_traffic import Schedule, collective_of, declared

KIND_OF = {primitive: collective for collective in COLLECTIVES.values() for primitive in collective.primitives}
# They name mesh axes and move nothing: casts, questions, and the second halves of asynchronous collectives.
FREE = frozenset("axis_index pvary preduced vary_unreduced_cast vary_unreduced_cast_p".split())


@dataclasses.dataclass(frozen=True)
class Asked:
    """One collective where it stands in the program. `path` is the nesting of signals around it."""

    path: tuple[str, ...]
    phase: str
    collective: str
    primitive: str
    mesh_axes: tuple[str, ...]
    group: int
    count: int
    count_known: bool
    payload: int
    dtype: str
    shape: tuple[int, ...]
    via: str
    source: str
    declared: int | None = (
        None  # bytes on the wire that a kernel says of itself, where the table's price is not its own
    )
    schedule: Schedule | None = None  # and what it computes meanwhile


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A strategy that nobody named and jshard took by itself: `words` say which, and its price."""

    path: tuple[str, ...]
    words: str
    source: str
    phase: str = "forward"
    collective: str = ""
    mesh_axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Decided:
    """An operation that nobody asked to move anything and whose types say that something has to: the compiler decides
    how. It stands outside every shard_map, on arrays that lie split on an explicit mesh."""

    path: tuple[str, ...]
    phase: str
    primitive: str
    mesh_axes: tuple[str, ...]
    count: int
    count_known: bool
    via: str
    source: str
    collective: str = ""


def walk(jaxpr: Any) -> Iterator[Asked | Decided]:
    """The collectives of `jaxpr`, and what else its compiler has to move, in program order."""
    yield from _walk(jaxpr, Around())


def choices_in(jaxpr: Any) -> Iterator[Chosen]:
    """The strategies that `jaxpr` runs by and nobody named, with a collective or without."""
    yield from dict.fromkeys(_choices(jaxpr, Around()))


def _choices(jaxpr: Any, outside: Around) -> Iterator[Chosen]:
    for eqn in jaxpr.eqns:
        around = outside.entering(eqn)
        if around.chosen:
            yield Chosen(around.path, around.chosen, source_of(around.named or eqn))
            continue
        for inner in _inner(eqn.params.values()):
            yield from _choices(inner, around)


def scopes_in(jaxpr: Any) -> set[tuple[str, ...]]:
    """Every nesting of signals that something of `jaxpr` stands in."""
    found: set[tuple[str, ...]] = set()
    seen: set[tuple[int, tuple[str, ...]]] = set()

    def collect(jaxpr: Any, outer: tuple[str, ...]) -> None:
        if (id(jaxpr), outer) in seen:  # equal layers share one
            return
        seen.add((id(jaxpr), outer))
        for eqn in jaxpr.eqns:
            path = (*outer, *said_by(eqn.source_info.name_stack.stack).path)
            found.add(path)
            for inner in _inner(eqn.params.values()):
                collect(inner, path)

    collect(_bare(jaxpr), ())
    return found


def has_transposed(jaxpr: Any) -> bool:
    """Whether some of it came out of a transposition: whether it holds a backward pass."""
    for eqn in jaxpr.eqns:
        stack = eqn.source_info.name_stack.stack
        if any(type(part).__name__ == "Transform" and part.name == "transpose" for part in stack):
            return True
        if any(has_transposed(inner) for inner in _inner(eqn.params.values())):
            return True
    return False


def _walk(jaxpr: Any, outside: Around) -> Iterator[Asked | Decided]:
    for eqn in jaxpr.eqns:
        around = outside.entering(eqn)
        name = eqn.primitive.name
        if mesh_axes := decided_by_compiler(eqn):
            yield _decided(eqn, around, mesh_axes)
        if name in KIND_OF:
            yield from _collective(eqn, around)
        elif name == "shard_map":
            sizes = {**around.sizes, **eqn.params["mesh"].shape}
            yield from _walk(_bare(eqn.params["jaxpr"]), around.within(sizes=sizes))
        elif name == "scan":
            count = around.count * eqn.params["length"]
            if count:
                yield from _walk(_bare(eqn.params["jaxpr"]), around.within(count=count))
        elif name == "while":
            for inner in _inner([eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]):
                yield from _walk(inner, around.within(count_known=False))
        elif name == "cond":
            branches = eqn.params["branches"]
            for number, branch in enumerate(branches, 1):
                via = (*around.via, f"branch {number} of {len(branches)}")
                yield from _walk(_bare(branch), around.within(via=via))
        elif name == "pallas_call":  # its refs and semaphores are not collectives of JAX
            yield from _kernel(eqn, around)
        else:
            if not around.sizes:
                for name, mesh_axes, shape, dtype in typed_collectives(eqn):
                    sizes = eqn.outvars[0].aval.sharding.mesh.shape
                    group = math.prod(sizes[mesh_axis] for mesh_axis in mesh_axes)
                    yield _asked(name, eqn, around, mesh_axes, group, shape, dtype, via="sharding in types")
            elif name not in FREE and not name.endswith("_done"):
                _refuse_unknown(eqn, around)
            for inner in _inner(eqn.params.values()):
                yield from _walk(inner, around)


def _bare(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _inner(values: Any) -> Iterator[Any]:
    for value in values:
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(_bare(each), "eqns"):
                yield _bare(each)


def _mesh_axes(eqn: Any) -> tuple[str, ...]:
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(name for name in (names if isinstance(names, (tuple, list)) else (names,)) if isinstance(name, str))


def _collective(eqn: Any, around: Around) -> Iterator[Asked]:
    kind = KIND_OF[eqn.primitive.name]
    mesh_axes = _mesh_axes(eqn)
    if not mesh_axes:
        return
    groups = eqn.params.get("axis_index_groups")
    group = len(groups[0]) if groups else math.prod(around.sizes[name] for name in mesh_axes)
    for operand, result in zip(eqn.invars, eqn.outvars, strict=False):  # pbroadcast_dynamic has a second operand
        aval = result.aval if kind.payload == "result" else operand.aval
        aval = getattr(aval, "inner_aval", aval)  # of an asynchronous start
        yield _asked(kind.name, eqn, around, mesh_axes, group, aval.shape, aval.dtype)


def _kernel(eqn: Any, around: Around) -> Iterator[Asked]:
    """What a Pallas kernel declares; one that sends to another device has to."""
    name = eqn.params.get("name") or "without a name"
    said = declared(eqn.params)
    if said is not None and said["mesh_axes"]:
        collective = collective_of(said["op"])
        assert collective is not None, f"kernel {name} declares {said['op']}, which is no collective"
        for mesh_axis in said["mesh_axes"]:
            if mesh_axis not in around.sizes:
                raise JShardError(
                    f'kernel {name} ({source_of(eqn)}) declares traffic over mesh axis "{mesh_axis}", which is not one of the '
                    f"shard_map around it",
                    mend=f"use {' or '.join(around.sizes) or 'it inside jax.shard_map'}",
                )
        group = math.prod(around.sizes[mesh_axis] for mesh_axis in said["mesh_axes"])
        result = eqn.outvars[0].aval
        shape, dtype = said.get("shape", result.shape), jax.numpy.dtype(said.get("dtype", result.dtype))
        via = f"kernel {said['algorithm']}, as it declares"
        asked = _asked(collective, eqn, around, said["mesh_axes"], group, shape, dtype, via=via)
        under = Schedule(**said["schedule"]) if "schedule" in said else None
        yield dataclasses.replace(asked, payload=said["payload"], declared=said["wire"], schedule=under)
    elif said is None and any(map(_sends, _inner(eqn.params.values()))):
        raise JShardError(
            f"kernel {name} ({source_of(eqn)}) sends to other devices and declares nothing, so its traffic can't be told",
            mend="give its pallas_call metadata=jshard.kernels.declare(op, mesh_axis, payload, algorithm=, wire=)",
        )


def _sends(jaxpr: Any) -> bool:
    """Whether a kernel copies to another device."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dma_start" and jax.tree.unflatten(eqn.params["tree"], eqn.invars)[-1] is not None:
            return True  # the last operand is the number of the device it goes to
        if any(map(_sends, _inner(eqn.params.values()))):
            return True
    return False


def _asked(collective: str, eqn: Any, around: Around, mesh_axes, group, shape, dtype, via: str = "") -> Asked:
    return Asked(
        path=around.path,
        phase=around.phase,
        collective=collective,
        primitive=eqn.primitive.name,
        mesh_axes=tuple(mesh_axes),
        group=group,
        count=around.count,
        count_known=around.count_known,
        payload=math.prod(shape) * dtype.itemsize,
        dtype=str(dtype),
        shape=tuple(shape),
        via=", ".join((*around.via, *([via] if via else ()))),
        source=source_of(around.named or eqn),
    )


def _decided(eqn: Any, around: Around, mesh_axes: tuple[str, ...]) -> Decided:
    source = source_of(around.named or eqn)
    via = ", ".join(around.via)
    return Decided(
        around.path, around.phase, eqn.primitive.name, mesh_axes, around.count, around.count_known, via, source
    )


def _refuse_unknown(eqn: Any, around: Around) -> None:
    mesh_axes = [name for name in _mesh_axes(eqn) if name in around.sizes]
    if mesh_axes:
        raise JShardError(
            f'the program calls {eqn.primitive.name} over mesh axis "{mesh_axes[0]}", which jshard has no price for',
            mend=f"use one of {', '.join(f'jshard.{name}' for name in COLLECTIVES)}",
        )


# -- the user's own line --

_INSIDE = (str(Path(__file__).parents[2]), str(Path(jax.__file__).parent), "/flax/")


def source_of(eqn: Any) -> str:
    """`model.py:12`: the innermost line of the program that is not jshard's, JAX's or Flax's."""
    for frame in source_info_util.summarize(eqn.source_info, num_frames=50).splitlines()[::-1]:
        found = re.match(r"(.+?):(\d+)", frame.strip())
        if found and not any(inside in found[1] for inside in _INSIDE):
            return f"{Path(found[1]).name}:{found[2]}"
    return ""
