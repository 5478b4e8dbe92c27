"""Where a program makes its first NaN: it runs by its equations, and each is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.inspect.ledger.jaxpr_walk import KIND_OF
from jshard.inspect.verify.interpreter import Evaluation, Where, quickly


@dataclasses.dataclass(frozen=True)
class NanOrigin:
    """The equation that made a NaN, and the device, where each runs by itself."""

    number: int  # of the equation, the same at every run
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
    """Find the equations of a program that make a NaN of operands without one: `nan_origins(f, mesh)(*args)`, in program order;
    collectives are last, as their NaN may be another device's. All processes of `mesh` call it."""
    found: list[tuple[int, Where]] = []

    def asked(*args: object) -> Any:
        jaxpr = jax.make_jaxpr(f)(*args)
        _, notes = Evaluation(nan_origins=True)(jaxpr, jax.tree.leaves(args))
        alike: dict[str, list[int]] = {}  # by type: each group is joined over devices at once, which compiles sooner
        for number, note in enumerate(notes):
            alike.setdefault(str(jax.typeof(note.value)), []).append(number)
        found[:] = [(number, notes[number].where) for some in alike.values() for number in some]
        return [_first(jnp.stack([notes[number].value.reshape(-1) for number in some])) for some in alike.values()]

    program = jax.jit(
        asked,
        out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()),
        compiler_options=quickly((jax.devices() if mesh is None else mesh.devices.flat)[0]),
    )

    def run(*args: object) -> list[NanOrigin]:
        rows = [row.tolist() for some in jax.device_get(program(*args)) for row in some]
        origins = [
            NanOrigin(number, where, _device(mesh, where, place))
            for (is_made, place), (number, where) in zip(rows, found, strict=True)
            if is_made
        ]
        return sorted(origins, key=lambda origin: (origin.where.primitive in KIND_OF, origin.number))

    return run


def first(found: list[NanOrigin], harmless: Set[int]) -> NanOrigin | None:
    """The earliest of those that are not `harmless`: numbers of equations that made a NaN which reached no result."""
    return next((origin for origin in found if origin.number not in harmless), None)


def _first(made: jax.Array) -> Any:
    """Whether each equation made a NaN on a device, and the number of the first such device."""
    return jnp.stack([made.any(1), made.argmax(1)], axis=1)


def _device(mesh: Mesh | None, where: Where, place: int) -> Any:
    """Known where one shard_map over the whole mesh holds the equation."""
    if mesh is None or where.lead != (mesh.axis_names,):
        return None
    return mesh.devices.reshape(-1)[place]
