"""Where a program's first NaN is made: it runs by its equations, and each is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.inspect.ledger.jaxpr_walk import KIND_OF
from jshard.inspect.verify.interpreter import Evaluation, quickly
from jshard.inspect.verify.records import NEVER, Note, Where


@dataclasses.dataclass(frozen=True)
class NanOrigin:
    """The equation that made a NaN, and the device, where each runs by itself."""

    number: int  # of the equation, the same at every run
    turn: int  # how many equations ran before
    where: Where
    device: Any = None

    def words(self, step: str = "") -> str:
        """`log at model.py:12 makes it in the forward pass, under signal "head" (mine.yaml:9)`; `step` is put behind the
        pass."""
        cause, primitive = self.where.cause, self.where.primitive
        kind = KIND_OF.get(primitive)
        at = f" at {cause.source}" if cause.source else ""
        signal = (
            f', under signal "{".".join(cause.path)}"' + f" ({cause.place})" * bool(cause.place) if cause.path else ""
        )
        phase = "update" if cause.phase == "update" else f"{cause.phase} pass"
        return f"{primitive if kind is None else kind.name}{at} makes it in the {phase}{step}{signal}"


def nan_origins(f: Callable[..., Any], mesh: Mesh | None) -> Callable[..., list[NanOrigin]]:
    """Find the equations of a program whose result holds a NaN: `nan_origins(f, mesh)(*args)`, the earliest in front, each
    with the time it first did. All processes of `mesh` call it."""
    found: list[Where] = []

    def asked(*args: object) -> Any:
        jaxpr = jax.make_jaxpr(f)(*args)
        _, notes = Evaluation(nan_origins=True)(jaxpr, jax.tree.leaves(args))
        alike: dict[str, list[Note]] = {}  # by type: each group is joined over devices at once, which compiles sooner
        for note in notes:
            alike.setdefault(str(jax.typeof(note.value)), []).append(note)
        found[:] = [note.where for some in alike.values() for note in some]
        return [_first(some) for some in alike.values()]

    program = jax.jit(
        asked,
        out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()),
        compiler_options=quickly((jax.devices() if mesh is None else mesh.devices.flat)[0]),
    )

    def run(*args: object) -> list[NanOrigin]:
        rows = [row.tolist() for some in jax.device_get(program(*args)) for row in some]
        origins = [
            NanOrigin(number, turn, where, _device(mesh, where, place))
            for number, ((turn, place), where) in enumerate(zip(rows, found, strict=True))
            if turn < NEVER
        ]
        return sorted(origins, key=lambda origin: origin.turn)

    return run


def first(found: list[NanOrigin], harmless: Set[int]) -> NanOrigin | None:
    """The earliest of those that are not `harmless`: numbers of equations that made a NaN which reached no result."""
    return next((origin for origin in found if origin.number not in harmless), None)


def _first(notes: list[Note]) -> Any:
    """When each was, and the number of the device that was first."""
    times = jnp.stack([note.value.reshape(-1) for note in notes])
    return jnp.stack([jnp.min(times, axis=1), jnp.argmin(times, axis=1).astype(jnp.int32)], axis=1)


def _device(mesh: Mesh | None, where: Where, place: int) -> Any:
    """Known where one shard_map over the whole mesh holds the equation."""
    names = [names for names in where.lead if names]
    if mesh is None or len(names) != 1 or names[0] != mesh.axis_names:
        return None
    return mesh.devices.reshape(-1)[place]
