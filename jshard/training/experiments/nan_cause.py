"""The cause of a NaN loss: NaN in its batch, or an operation, found by running the steps again."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.inspect.ledger.jaxpr_walk import KIND_OF
from jshard.inspect.verify.interpreter import Evaluation, Where, quickly
from jshard.training.checkpoints.checkpoint import Checkpoint
from jshard.training.data.sources import Position, Rows, Shuffled, Source, own_position
from jshard.training.experiments.experiment import Experiment
from jshard.training.experiments.loop import holds_nan, placed

MOST = 1000  # steps run again
LOOKS = 3  # last steps to search, because a NaN of an update shows later; the first step shows harmless NaNs
PARTS = ("inputs", "targets")


def suspect(source: Source, position: Position | None, rows: Rows) -> str:
    """Describe NaN data, as `inputs of its batch that rank 1 read`; all processes must call it."""
    own = _part(source, position, rows)
    if jax.process_count() == 1:
        return f"{PARTS[own]} of its batch" if own is not None else ""
    parts = multihost_utils.process_allgather(np.int32(-1 if own is None else own)).ravel()
    found = [(rank, int(part)) for rank, part in enumerate(parts) if part >= 0]
    return f"{PARTS[found[0][1]]} of its batch that rank {found[0][0]} read" if found else ""


def _part(source: Source, position: Position | None, rows: Rows) -> int | None:
    if not isinstance(source, Shuffled):
        return None
    read = next(source.read(position, rows))
    finite = [all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)) for tree in (read.x, read.y)]
    return None if all(finite) else finite.index(False)


def maker(
    failed: Experiment, step: int, since: Checkpoint | None, say: Callable[[str], None], begins: Callable[[int], None]
) -> str:
    """Find the operation that made the NaN of `step` by running the steps since the last checkpoint
    again. Returns `log at model.py:12 makes it in the forward pass, under signal "head"
    (mine.yaml:9)`; or nothing, and `say`s why. All processes must call it."""
    done = 0 if since is None else since.step
    steps = (
        f"{step - done:,} step{'s' * (step - done != 1)} from {'the beginning' if since is None else f'step {done}'}"
    )
    if step - done > MOST:
        say(f"the cause of the NaN is not searched for: that takes {steps}, and at most {MOST:,} are run again")
        return ""
    say(f"looking for the cause of the NaN: running again {steps}")
    result = _again(failed, step, since, begins)
    if result is None:
        say(f"the NaN did not occur again in {steps}")
        return ""
    number, origin = result
    if origin is None:
        return f"a parameter is NaN since step {number}"
    rank = f", on rank {origin.device.process_index}" if origin.device is not None and jax.process_count() > 1 else ""
    return origin.words("" if number == step else f" of step {number}") + rank


def _again(
    failed: Experiment, last: int, since: Checkpoint | None, begins: Callable[[int], None]
) -> tuple[int, NanOrigin | None] | None:
    """Run the steps again; return the first step with a NaN, and its origin, if searched."""
    fresh = Experiment.build(failed.configuration, failed.placement.mesh)
    step, done, position = fresh.step(), 0, None
    if since is not None:
        step.state, manifest = since.restore(step.state, fresh.configuration.source)
        done, position = manifest.step, own_position(manifest.position, since)
    look, harmless = nan_origins(step.program, fresh.placement.mesh), set[int]()
    numbers = range(done + 1, last + 1)
    with contextlib.closing(placed(fresh.data, fresh.placement, position, len(numbers))) as batches:
        for number, (batch, _) in zip(numbers, batches, strict=True):
            begins(number)
            origins = look(step.state, *batch) if number > last - LOOKS or number == done + 1 else None
            loss = step(*batch)
            if math.isnan(float(loss)) or holds_nan(step.state):
                return number, None if origins is None else first(origins, harmless)
            harmless |= {origin.number for origin in origins or ()}
    return None


# -- origins of NaNs among a program's equations --


@dataclasses.dataclass(frozen=True)
class NanOrigin:
    """The equation that made a NaN, and its device, if known."""

    number: int  # of the equation, equal in every run
    where: Where
    device: Any = None

    def words(self, step: str = "") -> str:
        """Describe it: `log at model.py:12 makes it in the forward pass, under signal "head"
        (mine.yaml:9)`. `step` is added after the pass."""
        cause, primitive = self.where.cause, self.where.primitive
        kind = KIND_OF.get(primitive)
        at = f" at {cause.source}" if cause.source else ""
        signal = (
            f', under signal "{".".join(cause.path)}"' + f" ({cause.place})" * bool(cause.place) if cause.path else ""
        )
        phase = "update" if cause.phase == "update" else f"{cause.phase} pass"
        return f"{primitive if kind is None else kind.name}{at} makes it in the {phase}{step}{signal}"


def nan_origins(f: Callable[..., Any], mesh: Mesh | None) -> Callable[..., list[NanOrigin]]:
    """Return a function of `args` for the equations of `f` with a new NaN, in program order.
    Collectives are last: their NaN may be another device's. All processes must call it."""
    equations: list[tuple[int, Where]] = []

    def asked(*args: object) -> Any:
        jaxpr = jax.make_jaxpr(f)(*args)
        _, notes = Evaluation(nan_origins=True)(jaxpr, jax.tree.leaves(args))
        alike: dict[Any, list[int]] = {}  # by type: a group is joined over devices at once, to compile faster
        for number, note in enumerate(notes):
            alike.setdefault(jax.typeof(note.value), []).append(number)
        equations[:] = [(number, notes[number].where) for numbers in alike.values() for number in numbers]
        return [
            _first(jnp.stack([notes[number].value.reshape(-1) for number in numbers])) for numbers in alike.values()
        ]

    program = jax.jit(
        asked,
        out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()),
        compiler_options=quickly((jax.devices() if mesh is None else mesh.devices.flat)[0]),
    )

    def run(*args: object) -> list[NanOrigin]:
        rows = [row.tolist() for group in jax.device_get(program(*args)) for row in group]
        origins = [
            NanOrigin(number, where, _device(mesh, where, place))
            for (is_made, place), (number, where) in zip(rows, equations, strict=True)
            if is_made
        ]
        return sorted(origins, key=lambda origin: (origin.where.primitive in KIND_OF, origin.number))

    return run


def first(origins: list[NanOrigin], harmless: Set[int]) -> NanOrigin | None:
    """Return the earliest origin not in `harmless`, the numbers of equations whose NaN reaches no result."""
    return next((origin for origin in origins if origin.number not in harmless), None)


def _first(made: jax.Array) -> Any:
    """Return for each equation if it made a NaN on any device, and the number of the first such device."""
    return jnp.stack([made.any(1), made.argmax(1)], axis=1)


def _device(mesh: Mesh | None, where: Where, place: int) -> Any:
    """Return the device of an equation inside a shard_map over the whole mesh, else None."""
    if mesh is None or where.lead != (mesh.axis_names,):
        return None
    return mesh.devices.reshape(-1)[place]
